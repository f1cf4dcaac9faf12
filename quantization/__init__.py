"""Weights and KV cache to fewer bits."""
