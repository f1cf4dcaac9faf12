"""Graph to graph. One file a pass; the passes on FX, which run before there is an onnx_ir graph, are in fx/."""

from llmc import discover
from llmc.passes.base import GraphPass, Stage
from llmc.passes.order import in_order

__all__ = ["GraphPass", "Stage", "ordered_passes"]


def ordered_passes() -> list[type[GraphPass]]:
    """Every pass on the onnx_ir graph, in the order in which the compiler runs them."""
    found = discover.subclasses(__name__, GraphPass)  # type: ignore[type-abstract]
    ordered = []
    for stage in Stage:
        passes = {p.__name__: p for p in found if p.stage is stage}
        ordered += in_order(passes, {name: p.runs_after for name, p in passes.items()})
    return ordered
