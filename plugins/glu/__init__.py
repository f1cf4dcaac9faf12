"""y = function(gate) * up: the gated unit of a feed-forward layer.

gate, up and y [..., I] float32; in a plan 2-D with any row stride. ``function`` is a unary one of llmc::elementwise.
Shazeer, https://arxiv.org/abs/2002.05202
"""

from llmc.plugins.op import Op

OP = Op("glu", inputs=("gate", "up"), attributes={"function": str}, rtol=2e-6, atol=2e-6)
