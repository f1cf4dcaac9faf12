"""Ops that pick elements by index."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir as ir

from llmc.compiler.lowering.builder import Builder, Rule
from llmc.compiler.lowering.elementwise import binary
from llmc.compiler.lowering.nodes import attribute, axis_of
from llmc.compiler.lowering.reductions import from_last, refuse_tokens
from llmc.compiler.lowering.values import ONE, View, show
from llmc.errors import CompileError
from llmc.runtime.plan import Dim


def _gather(builder: Builder, node: ir.Node) -> Sequence[View]:
    data, ids = builder.view(node.inputs[0]), node.inputs[1]
    axis = axis_of(node, data.rank, 0)
    if builder.is_constant(ids) and data.shape[axis].is_constant:
        view = _gather_constant(builder, node, data, axis)
        if view is not None:
            return [view]
    return [builder.gather(data, builder.raw(ids), axis)]


def _gather_constant(builder: Builder, node: ir.Node, data: View, axis: int) -> View | None:
    """Indices in equal steps need no copy."""
    ids = builder.constant(node, 1)
    assert ids is not None, "Gather has ids"
    size = data.shape[axis].constant
    if ids.size and not (-size <= ids.min() and ids.max() < size):
        raise CompileError(f"index {ids.max()} of axis {axis} of {show(data.shape)}")
    ids = ids % size
    if ids.ndim == 0:
        return data.select(axis, int(ids))
    steps: Sequence[int] = np.unique(np.diff(ids)).tolist() if ids.ndim == 1 else []
    if ids.ndim != 1 or not ids.size or len(steps) > 1 or (len(steps) == 1 and steps[0] <= 0):
        return None
    return data.narrow(axis, Dim(int(ids[0])), Dim(ids.size), steps[0] if steps else 1)


def _gather_elements(builder: Builder, node: ir.Node) -> Sequence[View]:
    data, ids = builder.view(node.inputs[0]), builder.raw(node.inputs[1])
    return [gather_elements(builder, data, ids, axis_of(node, data.rank, 0))]


def gather_elements(builder: Builder, data: View, ids: View, axis: int) -> View:
    """ONNX GatherElements: the other axes of ids may be shorter than those of data."""
    refuse_tokens(data, [axis])
    for i in range(data.rank):
        if i != axis and data.shape[i] != ids.shape[i]:
            data = data.narrow(i, Dim(0), ids.shape[i])
    data, ids = data.to_last([axis]), ids.to_last([axis])
    result = builder.allocate(ids.shape, data.dtype)
    builder.emit_rows("gather_elements", [data, ids], [result])
    return from_last(result, axis)


def _scatter_elements(builder: Builder, node: ir.Node) -> Sequence[View]:
    data, ids, src = builder.view(node.inputs[0]), builder.raw(node.inputs[1]), builder.view(node.inputs[2])
    reduction = attribute(node, "reduction", "none")
    if reduction not in ("none", "add"):
        raise CompileError(f"ScatterElements with reduction {reduction!r} is not supported")
    return [scatter_elements(builder, data, ids, src, axis_of(node, data.rank, 0), reduction)]


def scatter_elements(builder: Builder, data: View, ids: View, src: View, axis: int, reduction: str) -> View:
    """Along any axis; the other axes have to be those of the data."""
    refuse_tokens(data, [axis])
    data, ids, src = (view.to_last([axis]) for view in (data, ids, src))
    if ids.shape[:-1] != data.shape[:-1]:
        raise CompileError(f"ScatterElements with indices {show(ids.shape)} into {show(data.shape)} is not supported")
    result = builder.allocate(data.shape, data.dtype)
    builder.emit_rows("scatter_elements", [data, ids, src.expand(ids.shape)], [result], reduction=reduction)
    return from_last(result, axis)


def _gather_nd(builder: Builder, node: ir.Node) -> Sequence[View]:
    """The indexed axes are taken as one, and the indices are turned into positions on it."""
    data, ids = builder.view(node.inputs[0]), builder.view(node.inputs[1])
    if attribute(node, "batch_dims", 0) or not ids.rank or not ids.shape[-1].is_constant:
        raise CompileError("GatherND is supported without batch axes only")
    count = ids.shape[-1].constant
    sizes = data.shape[:count]
    if count > 1:
        refuse_tokens(data, range(count))
    position = ids.select(ids.rank - 1, 0)
    for i in range(1, count):
        position = binary(builder, "mul", position, builder.number(sizes[i].constant, position.dtype))
        step = ids.select(ids.rank - 1, i)
        position = binary(builder, "add", position, step)
    total = ONE
    for size in sizes:
        total = total * size
    return [builder.gather(builder.reshape(data, [total, *data.shape[count:]]), position, 0)]


def _one_hot(builder: Builder, node: ir.Node) -> Sequence[View]:
    ids, depth, values = builder.view(node.inputs[0]), builder.ints(node, 1), builder.view(node.inputs[2])
    assert depth is not None, "OneHot has a depth"
    axis = axis_of(node, ids.rank + 1, -1)
    numbers = builder.array(np.arange(depth[0], dtype=ids.dtype), "positions")
    wrapped = binary(builder, "mod", ids, builder.number(depth[0], ids.dtype))
    inside = binary(builder, "less", ids, builder.number(depth[0], ids.dtype)).unsqueeze([ids.rank])
    hit = builder.elementwise("equal", wrapped.unsqueeze([ids.rank]), numbers, dtype="bool")
    hit = builder.elementwise("and", hit, inside, dtype="bool")
    off, on = values.select(0, 0), values.select(0, 1)
    return [from_last(builder.elementwise("where", hit, on, off, dtype=values.dtype), axis)]


def _llmc_gather(builder: Builder, node: ir.Node) -> Sequence[View]:
    return [builder.gather(builder.view(node.inputs[0]), builder.raw(node.inputs[1]), 0)]


def _llmc_gather_elements(builder: Builder, node: ir.Node) -> Sequence[View]:
    data, ids = builder.view(node.inputs[0]), builder.raw(node.inputs[1])
    return [gather_elements(builder, data, ids, data.rank - 1)]


def _llmc_scatter_elements(builder: Builder, node: ir.Node) -> Sequence[View]:
    data, ids, src = builder.view(node.inputs[0]), builder.raw(node.inputs[1]), builder.view(node.inputs[2])
    return [scatter_elements(builder, data, ids, src, data.rank - 1, attribute(node, "reduction"))]


RULES: Mapping[str, Rule] = {
    "Gather": _gather,
    "GatherElements": _gather_elements,
    "GatherND": _gather_nd,
    "ScatterElements": _scatter_elements,
    "OneHot": _one_hot,
    "llmc::gather": _llmc_gather,
    "llmc::gather_elements": _llmc_gather_elements,
    "llmc::scatter_elements": _llmc_scatter_elements,
}
