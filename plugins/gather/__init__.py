"""Rows picked by index."""

from llmc.plugins.op import Op

OP = Op("gather", inputs=("data", "ids"), rtol=0.0, atol=0.0)
"""y [*ids.shape, ...] = data[ids] of data [A, ...]. Ids are int32 or int64; negative ones count from the end."""
