"""Tensors made of a number, or of numbers in a row."""

from __future__ import annotations

from typing import TYPE_CHECKING

import onnx_ir as ir
from torch import fx

from llmc.compiler.graph_builder import FLOAT, INT64
from llmc.passes.fx.nodes import arguments
from llmc.runtime.plan import Dim

if TYPE_CHECKING:
    from llmc.compiler.graph import Converter, Emitter


def _filled(number: float) -> Converter:
    """A constant of the shape that torch found; a tensor that torch leaves open is 0."""

    def convert(e: Emitter, node: fx.Node) -> ir.Value:
        return e.build.expand(e.operand(number, e.dtype(node)), e.dims(node))

    return convert


def _full(e: Emitter, node: fx.Node) -> ir.Value:
    (number,) = arguments(node, ("fill_value",))
    return e.build.expand(e.operand(number, e.dtype(node)), e.dims(node))


def _fill(e: Emitter, node: fx.Node) -> ir.Value:
    return e.build.expand(e.operand(node.args[1], e.dtype(node)), e.dims(node))


def _scalar(e: Emitter, node: fx.Node) -> ir.Value:
    return e.operand(node.args[0], e.dtype(node))


def _arange(e: Emitter, node: fx.Node) -> ir.Value:
    names = {"aten.arange.default": (None, None), "aten.arange.start": ("start", None)}
    first, step = names.get(str(node.target), ("start", "step"))
    start = arguments(node, (first,))[0] if first else 0
    stride = arguments(node, (step,))[0] if step else 1
    dtype, (size,) = e.dtype(node), e.dims(node)
    if size.is_constant and not isinstance(start, fx.Node) and not isinstance(stride, fx.Node):
        import numpy as np

        return e.build.constant(np.arange(size.constant) * stride + start, dtype)
    offset = e.size(start) if not isinstance(start, float) else Dim(0)
    if not offset.is_constant or isinstance(stride, fx.Node):
        raise e.unsupported(node, "counts from a number of tokens")
    numbers = e.build.cast(e.build.arange(size), dtype if dtype != FLOAT else INT64)
    numbers = e.build.cast(numbers, dtype)
    if stride != 1:
        numbers = e.build.binary("Mul", numbers, e.operand(stride, dtype))
    return e.build.binary("Add", numbers, e.operand(start, dtype)) if start else numbers


CONVERTERS: dict[str, Converter] = {
    **{f"aten.{name}": _filled(1) for name in ("ones", "ones_like", "new_ones")},
    **{
        f"aten.{name}": _filled(0)
        for name in ("zeros", "zeros_like", "new_zeros", "empty", "empty_like", "new_empty", "empty_permuted", "zero")
    },
    **{f"aten.{name}": _full for name in ("full", "full_like", "new_full")},
    "aten.fill": _fill,
    "aten.scalar_tensor": _scalar,
    "aten.arange": _arange,
}
