"""Kernels of the CUDA target: compiled on any machine, without a GPU, a driver or a toolkit."""
