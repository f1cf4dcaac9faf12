"""The k largest or smallest values of the last axis, with their indices."""

from llmc.plugins.op import Op

OP = Op("topk", inputs=("x",), outputs=("values", "indices"), attributes={"k": int, "largest": bool})
"""values [..., k] of x [..., D], sorted, and indices [..., k] int64. Of equal values the lowest index comes first."""
