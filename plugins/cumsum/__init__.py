"""Running sums of the last axis."""

from llmc.plugins.op import Op

OP = Op("cumsum", inputs=("x",), attributes={"exclusive": bool})
"""y[..., i] = sum of x[..., :i + 1], or of x[..., :i] if ``exclusive``; float32, int32 or int64."""
