"""What several converters need."""

from __future__ import annotations

from typing import TYPE_CHECKING

import onnx_ir as ir
from torch import fx

from llmc.passes.fx.nodes import arguments

if TYPE_CHECKING:
    from llmc.compiler.graph import Emitter

INTEGERS = (ir.DataType.INT32, ir.DataType.INT64)


def pair(e: Emitter, node: fx.Node, names: tuple[str, str] = ("self", "other")) -> tuple[ir.Value, ir.Value]:
    """Both operands in the dtype of the result."""
    a, b = arguments(node, names)
    return e.operand(a, e.dtype(node)), e.operand(b, e.dtype(node))


def floor_division(e: Emitter, a: ir.Value, b: ir.Value) -> ir.Value:
    """Of integers, toward minus infinity, as // of Python."""
    return e.build.binary("Div", e.build.binary("Sub", a, e.build.function("mod", a, b)), b)
