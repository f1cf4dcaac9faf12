"""Softmax over the last axis."""

from llmc.plugins.op import Op

OP = Op("softmax", inputs=("x",), attributes={"log": bool})
"""y = exp(x - max) / sum(exp(x - max)) over the last axis of x [..., D], or its logarithm. -inf counts as absent."""
