"""Speculative decoding: proposers guess several tokens, one step of the model verifies them. One file a proposer."""
