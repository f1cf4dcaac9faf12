"""Elements of each row picked by the indices of that row."""

from llmc.plugins.op import Op

OP = Op("gather_elements", inputs=("data", "ids"), rtol=0.0, atol=0.0)
"""y [..., k] = data[..., ids[..., k]] of data [..., A] and ids [..., K]; negative ids count from the end."""
