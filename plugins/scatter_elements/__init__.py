"""Elements of each row replaced or added to, at the indices of that row."""

from llmc.plugins.op import Op

OP = Op("scatter_elements", inputs=("data", "ids", "src"), attributes={"reduction": str})
"""y [..., A] = data with y[..., ids[..., k]] = src[..., k] (``none``) or += src[..., k] (``add``), k ascending.

ids [..., K] are int32 or int64, negative ones count from the end; any dtype.
"""
