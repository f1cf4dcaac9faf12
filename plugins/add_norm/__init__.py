"""sum = a + b, y = norm(sum): a residual addition and the norm that reads it.

a, b, sum and y [..., D] float32; weight, bias and the attributes are those of llmc::norm.
"""

from llmc.plugins.op import Op

OP = Op(
    "add_norm",
    inputs=("a", "b", "weight?", "bias?"),
    outputs=("sum", "y"),
    attributes={"epsilon": float, "kind": str, "offset": float},
)
