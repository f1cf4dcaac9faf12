"""What the rules ask of a node: its attributes, and the shapes that the graph declares."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from llmc.compiler.lowering.values import Shape
from llmc.errors import CompileError
from llmc.runtime.plan import Dim

_SYMBOLS = {"T": Dim(tokens=1), "N": Dim(rows=1)}


def attribute(node: ir.Node, name: str, default: Any = None) -> Any:
    """The value of an attribute, or the default."""
    found = node.attributes.get(name)
    return default if found is None else found.value


def axis_of(node: ir.Node, rank: int, default: int | None = None) -> int:
    """The attribute ``axis``, counted from the front.

    Raises:
        CompileError: the tensor has no such axis.
    """
    axis = attribute(node, "axis", default)
    if axis is None or not -rank <= axis < rank:
        raise CompileError(f"axis {axis} of a tensor with {rank} axes")
    return int(axis) % rank


def declared_shape(value: ir.Value) -> Shape | None:
    """The shape that the graph gives a value: ``meta["dims"]``, or ints and the symbols T and N; None if it is open."""
    found: Shape | None = value.meta.get("dims")
    if found is not None:
        return tuple(found)
    if value.shape is None:
        return None
    sizes = []
    for size in value.shape:
        dim = Dim(size) if isinstance(size, int) else _SYMBOLS.get(str(size.value))
        if dim is None:
            return None
        sizes.append(dim)
    return tuple(sizes)
