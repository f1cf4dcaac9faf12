"""Reductions over the last axes."""

from llmc.plugins.op import Op

FUNCTIONS = ("sum", "mean", "max", "min", "prod", "any", "all", "argmax", "argmin")

OP = Op("reduce", inputs=("x",), attributes={"function": str, "num_axes": int})
"""y [...] = function over the last ``num_axes`` axes of x.

float32, int32 or int64, and y has the dtype of x; bool for ``any`` and ``all``. ``argmax`` and ``argmin`` take one axis
and give int64: the lowest index where several values tie.
"""
