"""Runs engines on a CUDA device, by `cuda.bindings` alone."""
