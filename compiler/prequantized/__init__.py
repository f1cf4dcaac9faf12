"""Checkpoints that other libraries quantized: one file for each kind, found by the ``quant_method`` of its config."""
