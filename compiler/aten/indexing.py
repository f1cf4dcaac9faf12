"""Reading and writing at places that other tensors name."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import onnx_ir as ir
import torch
from torch import fx

from llmc.compiler.graph_builder import BOOL, INT64, ONE, Dims, broadcast, dims_of
from llmc.passes.fx.nodes import arguments
from llmc.runtime.plan import Dim

if TYPE_CHECKING:
    from llmc.compiler.graph import Converter, Emitter


def _embedding(e: Emitter, node: fx.Node) -> ir.Value:
    weight, ids = node.args[:2]
    if isinstance(weight, fx.Node) and e.is_weight(weight):
        outputs = [(e.dtype(node), e.dims(node))]
        return e.build.node("embedding", [e.operand(ids), e.stored(weight)], outputs, domain="llmc")[0]
    return e.build.gather(e.operand(weight), e.operand(ids), 0)


def _index_select(e: Emitter, node: fx.Node) -> ir.Value:
    x, dim, index = arguments(node, ("self", "dim", "index"))
    if e.is_weight(x) and dim == 0 and x.meta["val"].dim() == 2 and index.meta["val"].dim() == 1:
        outputs = [(e.dtype(node), e.dims(node))]
        return e.build.node("embedding", [e.operand(index), e.stored(x)], outputs, domain="llmc")[0]
    return e.build.gather(e.operand(x), e.operand(index), dim)


def _index(e: Emitter, node: fx.Node) -> ir.Value:
    """x[i, :, j, ...] with tensors of indices."""
    x, indices = node.args[:2]
    assert isinstance(indices, list | tuple), f"{node}: indices are a list"
    value = e.operand(x)
    used = [axis for axis, index in enumerate(indices) if index is not None]
    ids = [_ids(e, node, indices[axis]) for axis in used]
    if len(used) == 1:
        return e.build.gather(value, ids[0], used[0])
    adjacent = used == list(range(used[0], used[-1] + 1))
    front = used if adjacent and used[0] == 0 else None
    place = used[0] if adjacent else 0
    if front is None:
        others = [axis for axis in range(len(dims_of(value))) if axis not in used]
        value = e.build.transpose(value, [*used, *others])
    flat, rows = _flat_rows(e, value, ids)
    result = e.build.gather(flat, rows, 0)
    if place:  # the axes of the indices come where the first indexed axis was
        count = len(dims_of(rows))
        rank = len(dims_of(result))
        order = [*range(count, count + place), *range(count), *range(count + place, rank)]
        result = e.build.transpose(result, order)
    return result


def _ids(e: Emitter, node: fx.Node, index: Any) -> ir.Value:
    if index.meta["val"].dtype in (torch.bool, torch.uint8):
        raise e.unsupported(node, "with a mask gives a number of values that depends on the data")
    return e.operand(index, INT64)


def _flat_rows(e: Emitter, value: ir.Value, ids: Sequence[ir.Value]) -> tuple[ir.Value, ir.Value]:
    """The first axes of value merged into one, and where the indices point to in it."""
    sizes = dims_of(value)[: len(ids)]
    flat = e.build.reshape(value, (_product(sizes), *dims_of(value)[len(ids) :]))
    rows: ir.Value | None = None
    for size, index in zip(sizes, ids, strict=True):
        index = _from_front(e, index, size)
        if rows is None:
            rows = index
            continue
        if not size.is_constant:
            raise ValueError("an index of tokens after the first axis")
        scaled = e.build.binary("Mul", rows, e.operand(size.constant, INT64))
        rows = e.build.binary("Add", scaled, index)
    assert rows is not None, "no index"
    return flat, rows


def _from_front(e: Emitter, index: ir.Value, size: Dim) -> ir.Value:
    """Negative indices count from the end; where the size changes there are none."""
    if not size.is_constant:
        return index
    negative = e.build.binary("Less", index, e.operand(0, INT64), BOOL)
    return e.build.where(negative, e.build.binary("Add", index, e.operand(size.constant, INT64)), index)


def _product(sizes: Dims) -> Dim:
    return math.prod(sizes, start=ONE)


def _gather(e: Emitter, node: fx.Node) -> ir.Value:
    x, dim, index = arguments(node, ("self", "dim", "index"))
    value, ids = e.operand(x), e.operand(index, INT64)
    return e.build.gather_elements(_cut(e, value, dims_of(ids), dim), ids, dim)


def _take_along_dim(e: Emitter, node: fx.Node) -> ir.Value:
    x, index, dim = arguments(node, ("self", "indices", "dim"))
    value, ids = e.operand(x), e.operand(index, INT64)
    if dim is None:
        return e.build.gather(e.build.reshape(value, (_product(dims_of(value)),)), ids, 0)
    dim %= len(dims_of(value))

    def common(dims: Dims, other: Dims) -> Dims:
        return tuple(
            d if i == dim else broadcast((d,), (o,))[0] for i, (d, o) in enumerate(zip(dims, other, strict=True))
        )

    value = e.build.expand(value, common(dims_of(value), dims_of(ids)))
    ids = e.build.expand(ids, common(dims_of(ids), dims_of(value)))
    return e.build.gather_elements(value, ids, dim)


def _cut(e: Emitter, value: ir.Value, dims: Dims, dim: int) -> ir.Value:
    """Torch lets indices cover the start of the other axes only."""
    dim %= len(dims)
    for axis, (size, wanted) in enumerate(zip(dims_of(value), dims, strict=True)):
        if axis != dim and size != wanted:
            value = e.build.slice(value, axis, Dim(0), wanted)
    return value


def _scatter(reduction: str) -> Converter:
    """Scatter and scatter_add, with a tensor or a number as the source."""

    def convert(e: Emitter, node: fx.Node) -> ir.Value:
        x, dim, index, src = node.args[:4]
        reduce = node.kwargs.get("reduce", reduction)
        if reduce not in ("none", "add", "sum"):
            raise e.unsupported(node, f"with reduce={reduce}")
        if reduce == "sum" and node.kwargs.get("include_self") is False:
            raise e.unsupported(node, "with include_self=False")
        value, ids, dtype = e.operand(x), e.operand(index, INT64), e.dtype(node)
        if isinstance(src, fx.Node) and src.meta["val"].dim():
            source = e.operand(src, dtype)
            for axis, wanted in enumerate(dims_of(ids)):
                if dims_of(source)[axis] != wanted:
                    source = e.build.slice(source, axis, Dim(0), wanted)
        else:
            source = e.build.expand(e.operand(src, dtype), dims_of(ids))
        assert isinstance(dim, int), f"{node}: the axis is a number"
        if any(
            a != b
            for i, (a, b) in enumerate(zip(dims_of(value), dims_of(ids), strict=True))
            if i != dim % len(dims_of(ids))
        ):
            raise e.unsupported(node, "writes to a part of the other axes")
        return e.build.scatter_elements(value, ids, source, dim, "none" if reduce == "none" else "add")

    return convert


def _index_put(e: Emitter, node: fx.Node) -> ir.Value:
    """x[i, j, ...] = values, or += values, for indices of the first axes; or x[mask] = number."""
    x, indices, values, accumulate = arguments(node, ("self", "indices", "values", "accumulate"))
    value, dtype = e.operand(x), e.dtype(node)
    source = e.operand(values, dtype)
    if len(indices) == 1 and indices[0].meta["val"].dtype == torch.bool and not accumulate:
        if any(dim != ONE for dim in dims_of(source)):
            raise e.unsupported(node, "writes values where a mask says")
        mask = e.operand(indices[0])
        mask = e.build.unsqueeze(mask, *range(len(dims_of(mask)), len(dims_of(value))))
        return e.build.where(mask, e.build.reshape(source, ()), value)
    if any(index is None for index in indices):
        raise e.unsupported(node, "writes along whole axes before indexed ones")
    ids = [_ids(e, node, index) for index in indices]
    flat, rows = _flat_rows(e, value, ids)
    return _write_rows(e, value, flat, rows, source, bool(accumulate))


def _write_rows(
    e: Emitter, value: ir.Value, flat: ir.Value, rows: ir.Value, source: ir.Value, accumulate: bool
) -> ir.Value:
    """Rows of flat [A, ...] at ids ``rows`` replaced by, or with added, those of source; in the shape of value."""
    inner = dims_of(flat)[1:]
    source = e.build.expand(source, (*dims_of(rows), *inner))
    count, width = _product(dims_of(rows)), _product(inner)
    source = e.build.reshape(source, (count, width))
    ids = e.build.expand(e.build.unsqueeze(e.build.reshape(rows, (count,)), 1), (count, width))
    target = e.build.reshape(flat, (dims_of(flat)[0], width))
    written = e.build.scatter_elements(target, ids, source, 0, "add" if accumulate else "none")
    return e.build.reshape(written, dims_of(value))


def _index_add(e: Emitter, node: fx.Node) -> ir.Value:
    x, dim, index, source, alpha = arguments(node, ("self", "dim", "index", "source", "alpha"))
    value, dtype = e.operand(x), e.dtype(node)
    src = e.operand(source, dtype)
    if alpha != 1:
        src = e.build.binary("Mul", src, e.operand(alpha, dtype))
    return _along(e, value, dim, e.operand(index, INT64), src, accumulate=True)


def _index_copy(e: Emitter, node: fx.Node) -> ir.Value:
    x, dim, index, source = arguments(node, ("self", "dim", "index", "source"))
    return _along(e, e.operand(x), dim, e.operand(index, INT64), e.operand(source, e.dtype(node)), accumulate=False)


def _index_fill(e: Emitter, node: fx.Node) -> ir.Value:
    x, dim, index, number = arguments(node, ("self", "dim", "index", "value"))
    value, ids = e.operand(x), e.operand(index, INT64)
    dims = list(dims_of(value))
    dims[dim] = dims_of(ids)[0]
    return _along(e, value, dim, ids, e.build.expand(e.operand(number, e.dtype(node)), tuple(dims)), accumulate=False)


def _along(e: Emitter, value: ir.Value, dim: int, ids: ir.Value, src: ir.Value, *, accumulate: bool) -> ir.Value:
    """Slices of an axis replaced or added to."""
    rank = len(dims_of(value))
    dim %= rank
    order = [dim, *(axis for axis in range(rank) if axis != dim)]
    front = e.build.transpose(value, order)
    written = _write_rows(e, front, front, ids, e.build.transpose(src, order), accumulate)
    return e.build.transpose(written, [order.index(axis) for axis in range(rank)])


def _one_hot(e: Emitter, node: fx.Node) -> ir.Value:
    ids, count = node.args[0], e.dims(node)[-1]
    if not count.is_constant:
        raise e.unsupported(node, "has a number of classes that depends on the data")
    return e.build.cast(equal_to_each(e, e.operand(ids, INT64), count.constant), e.dtype(node))


def equal_to_each(e: Emitter, ids: ir.Value, count: int) -> ir.Value:
    """Bool [..., count]: whether ids [...] are 0, 1, ..."""
    return e.build.binary("Equal", e.build.unsqueeze(ids, len(dims_of(ids))), e.build.ints(*range(count)), BOOL)


def _bucketize(e: Emitter, node: fx.Node) -> ir.Value:
    """How many boundaries are below (or, with right=True, not above) each value."""
    values, boundaries, right = arguments(node, ("self", "boundaries", "right"))
    x = e.operand(values)
    x = e.build.unsqueeze(x, len(dims_of(x)))
    below = e.build.binary("LessOrEqual" if right else "Less", e.operand(boundaries, x.dtype), x, BOOL)
    counts = e.build.reduce("ReduceSum", e.build.cast(below, INT64), [-1], False)
    return e.build.cast(counts, e.dtype(node))


CONVERTERS: dict[str, Converter] = {
    "aten.embedding": _embedding,
    "aten.index_select": _index_select,
    "aten.index": _index,
    "aten.gather": _gather,
    "aten.take_along_dim": _take_along_dim,
    "aten.scatter": _scatter("none"),
    "aten.scatter_add": _scatter("add"),
    "aten.scatter_reduce": _scatter("none"),
    "aten.index_put": _index_put,
    "aten.index_add": _index_add,
    "aten.index_copy": _index_copy,
    "aten.index_fill": _index_fill,
    "aten.one_hot": _one_hot,
    "aten.bucketize": _bucketize,
}
