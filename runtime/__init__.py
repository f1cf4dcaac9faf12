"""Runs and serves engines. Never imports torch, onnx, transformers or the compiler."""
