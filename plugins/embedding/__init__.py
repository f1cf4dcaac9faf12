"""y = weight[ids].

ids [...] int32 or int64, weight [V, H] of float32, bfloat16 or float16; y [..., H] float32. In a plan the weight is
plain, or packed as llmc::linear has it where a tied output layer shares it; the kernel tells by the rank. A plan may
have a quantized table, packed as llmc::quantized_linear has it: ``format`` and ``group`` are those of that op.
"""

from llmc.plugins.op import Op

OP = Op(
    "embedding",
    inputs=("ids", "weight"),
    rtol=0.0,
    atol=0.0,
    stored_inputs=("scale?", "zero?"),
    stored_attributes={"format": "plain", "group": 0},
)
