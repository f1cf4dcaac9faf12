"""Fixes for model families that the tracer can't take as they are, one file each."""
