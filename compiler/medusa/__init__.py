"""Medusa heads: trained on what the model writes itself, read, and lowered into an engine (arXiv:2401.10774)."""
