"""EAGLE layers: drafts that go on with what a model computed, read from a checkpoint and put into an engine."""
