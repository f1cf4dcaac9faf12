"""Ops that move nothing: other views of the same elements, and copies where strides can't say it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir as ir

from llmc.compiler.lowering.builder import Builder, Rule, broadcast_shape
from llmc.compiler.lowering.nodes import attribute, axis_of, declared_shape
from llmc.compiler.lowering.values import ONE, ZERO, Shape, View, divide, product, show
from llmc.errors import CompileError
from llmc.runtime.plan import Dim


def _identity(builder: Builder, node: ir.Node) -> Sequence[View]:
    return [builder.raw(node.inputs[0])]


def _reshape(builder: Builder, node: ir.Node) -> Sequence[View]:
    x = builder.raw(node.inputs[0])
    return [builder.reshape(x, declared_shape(node.outputs[0]) or _reshape_target(builder, node, x))]


def _reshape_target(builder: Builder, node: ir.Node, x: View) -> Shape:
    """The target: 0 keeps an axis (unless ``allowzero``), one -1 takes what is left."""
    sizes = builder.sizes(node.inputs[1])
    keeps = not attribute(node, "allowzero", 0)
    shape = [x.shape[i] if size == ZERO and keeps else size for i, size in enumerate(sizes)]
    if Dim(-1) in shape:
        at = shape.index(Dim(-1))
        rest = divide(product(x.shape), product(shape[:at] + shape[at + 1 :]))
        if rest is None:
            raise CompileError(f"can't reshape {show(x.shape)} to {show(sizes)}")
        shape[at] = rest
    return tuple(shape)


def _flatten(builder: Builder, node: ir.Node) -> Sequence[View]:
    x = builder.raw(node.inputs[0])
    axis = attribute(node, "axis", 1)
    axis += x.rank if axis < 0 else 0
    return [builder.reshape(x, (product(x.shape[:axis]), product(x.shape[axis:])))]


def _transpose(builder: Builder, node: ir.Node) -> Sequence[View]:
    x = builder.raw(node.inputs[0])
    return [x.transpose(attribute(node, "perm", range(x.rank)[::-1]))]


def _squeeze(builder: Builder, node: ir.Node) -> Sequence[View]:
    x, axes = builder.raw(node.inputs[0]), builder.ints(node, 1)
    if axes is not None and any(x.shape[axis] != ONE for axis in axes):
        raise CompileError(f"can't squeeze axes {axes} of {show(x.shape)}")
    return [x.squeeze(axes)]


def _unsqueeze(builder: Builder, node: ir.Node) -> Sequence[View]:
    x, axes = builder.raw(node.inputs[0]), builder.ints(node, 1)
    return [x.unsqueeze(axes or [])]


def _expand(builder: Builder, node: ir.Node) -> Sequence[View]:
    x = builder.raw(node.inputs[0])
    shape = declared_shape(node.outputs[0])
    if shape is None:
        shape = broadcast_shape([x.shape, builder.sizes(node.inputs[1])])
    try:
        return [x.expand(shape)]
    except ValueError as error:
        raise CompileError(str(error)) from None


def _slice(builder: Builder, node: ir.Node) -> Sequence[View]:
    x = builder.raw(node.inputs[0])
    starts, ends = builder.sizes(node.inputs[1]), builder.sizes(node.inputs[2])
    axes = builder.ints(node, 3) or list(range(len(starts)))
    steps = builder.ints(node, 4) or [1] * len(starts)
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        x = _cut(builder, x, axis % x.rank, start, end, step)
    return [x]


def _cut(builder: Builder, x: View, axis: int, start: Dim, end: Dim, step: int) -> View:
    size = x.shape[axis]
    whole = end == size or (end.is_constant and end.constant >= (1 << 31) - 1)
    if start == ZERO and whole and step == 1:
        return x
    if not size.is_constant or not start.is_constant or not end.is_constant:
        raise CompileError(f"slices the axis {axis} of {show(x.shape)}, which packs the tokens of several requests")
    first, last = start.constant, end.constant
    if step < 0:
        positions = range(size.constant)[slice(first, last if last >= -size.constant else None, step)]
        return builder.gather(x, builder.array(np.array(positions, np.int64), "reversed"), axis)
    positions = range(size.constant)[first:last:step]
    return x.narrow(axis, Dim(positions.start if len(positions) else 0), Dim(len(positions)), step)


def _split(builder: Builder, node: ir.Node) -> Sequence[View]:
    x, sizes = builder.raw(node.inputs[0]), builder.ints(node, 1)
    axis = axis_of(node, x.rank, 0)
    whole = x.shape[axis]
    if not whole.is_constant:
        raise CompileError(f"splits the axis {axis} of {show(x.shape)}, which packs the tokens of several requests")
    if sizes is None:
        part = -(-whole.constant // len(node.outputs))
        sizes = [min(part, whole.constant - i * part) for i in range(len(node.outputs))]
    if sum(sizes) != whole.constant or min(sizes) < 0:
        raise CompileError(f"can't split axis {axis} of {show(x.shape)} into {sizes}")
    starts = np.cumsum([0, *sizes[:-1]])
    return [x.narrow(axis, Dim(int(start)), Dim(size)) for start, size in zip(starts, sizes, strict=True)]


def _concat(builder: Builder, node: ir.Node) -> Sequence[View]:
    """Each part is copied to its place; copies.py lets producers write there at once."""
    parts = [builder.view(value) for value in node.inputs]
    axis = axis_of(node, parts[0].rank)
    total = ZERO
    for part in parts:
        total = total + part.shape[axis]
    shape = list(parts[0].shape)
    shape[axis] = total
    result = builder.allocate(shape, parts[0].dtype, rows_first=True)
    start = ZERO
    for part in parts:
        if part.rank != result.rank or part.dtype != result.dtype:
            raise CompileError(f"can't concatenate {part.dtype} {show(part.shape)} to {result.dtype} {show(shape)}")
        if part.shape[axis] != ZERO:
            builder.elementwise("copy", part, out=result.narrow(axis, start, part.shape[axis]))
        start = start + part.shape[axis]
    return [result]


def _tile(builder: Builder, node: ir.Node) -> Sequence[View]:
    x, repeats = builder.raw(node.inputs[0]), builder.ints(node, 1)
    for axis, count in enumerate(repeats or []):
        if count != 1:
            wide = x.unsqueeze([axis])
            wide = wide.expand([*wide.shape[:axis], Dim(count), *wide.shape[axis + 1 :]])
            x = builder.reshape(wide, [*x.shape[:axis], x.shape[axis] * count, *x.shape[axis + 1 :]])
    return [x]


def _pad(builder: Builder, node: ir.Node) -> Sequence[View]:
    x, pads, axes = builder.view(node.inputs[0]), builder.ints(node, 1), builder.ints(node, 3)
    axes = list(range(x.rank)) if axes is None else [axis % x.rank for axis in axes]
    if attribute(node, "mode", "constant") != "constant" or pads is None or min(pads) < 0:
        raise CompileError("Pad is supported with a constant and at the ends only")
    value = builder.optional(node, 2)
    before, after = pads[: len(axes)], pads[len(axes) :]
    shape = list(x.shape)
    for axis, low, high in zip(axes, before, after, strict=True):
        if (low or high) and not x.shape[axis].is_constant:
            raise CompileError(f"pads the axis {axis} of {show(x.shape)}, which packs the tokens of several requests")
        shape[axis] = shape[axis] + (low + high)
    result = builder.allocate(shape, x.dtype, rows_first=True)
    builder.elementwise("copy", value.squeeze() if value is not None else builder.number(0, x.dtype), out=result)
    inner = result
    for axis, low in zip(axes, before, strict=True):
        inner = inner.narrow(axis, Dim(low), x.shape[axis])
    builder.elementwise("copy", x, out=inner)
    return [result]


RULES: Mapping[str, Rule] = {
    "Identity": _identity,
    "Reshape": _reshape,
    "Flatten": _flatten,
    "Transpose": _transpose,
    "Squeeze": _squeeze,
    "Unsqueeze": _unsqueeze,
    "Expand": _expand,
    "Slice": _slice,
    "Split": _split,
    "Concat": _concat,
    "Tile": _tile,
    "Pad": _pad,
}
