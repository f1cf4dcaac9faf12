"""Passes on the traced FX graph: they need the tracer's facts (module names, fake tensors). One file a pass."""

from llmc import discover
from llmc.passes.fx.base import MAX_SEQ_LEN, WEIGHT_DTYPES, FxPass
from llmc.passes.order import in_order

__all__ = ["MAX_SEQ_LEN", "WEIGHT_DTYPES", "FxPass", "ordered_fx_passes"]


def ordered_fx_passes() -> list[type[FxPass]]:
    """Every pass on the FX graph, in the order in which the compiler runs them."""
    passes = {p.__name__: p for p in discover.subclasses(__name__, FxPass)}  # type: ignore[type-abstract]
    return in_order(passes, {name: p.runs_after for name, p in passes.items()})
