"""y = x @ weight.T + bias.

x [..., K], weight [N, K] of float32, bfloat16 or float16, bias [N] float32; y [..., N]. In a plan the weight is packed
(packing.py), x and y are 2-D with any row stride. Bfloat16 weights round x to bfloat16 first, and sum in float32.
"""

from llmc.plugins.op import Op

OP = Op("linear", inputs=("x", "weight", "bias?"), rtol=2e-5, atol=2e-5)
