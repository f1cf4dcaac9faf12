"""Product of two activations; weights go through llmc::linear."""

from llmc.plugins.op import Op

OP = Op("matmul", inputs=("a", "b"))
"""y [..., M, N] = a [..., M, K] @ b [..., K, N], float32, any strides. In a plan a and b have the leading axes of y."""
