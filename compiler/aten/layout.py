"""Ops that compute nothing: other shapes, parts, repetitions and combinations of tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import onnx_ir as ir
import torch
from torch import fx

from llmc.compiler.graph_builder import BOOL, ONE, dims_of
from llmc.passes.fx.nodes import arguments
from llmc.runtime.plan import Dim

if TYPE_CHECKING:
    from llmc.compiler.graph import Converter, Emitter


def _input(e: Emitter, argument: Any) -> tuple[ir.Value, bool]:
    """A tensor to be rearranged, and whether it is a weight, which then keeps its dtype."""
    if e.is_weight(argument):
        return e.stored(argument), True
    return e.operand(argument), False


def _rearranged(rearrange: Callable[[Emitter, fx.Node, ir.Value], ir.Value]) -> Converter:
    """An op on one tensor; what it makes of a weight is still a weight."""

    def convert(e: Emitter, node: fx.Node) -> ir.Value:
        x, is_weight = _input(e, node.args[0])
        result = rearrange(e, node, x)
        if is_weight:
            e.keep_stored(result)
        return result

    return convert


def _reshape(e: Emitter, node: fx.Node, x: ir.Value) -> ir.Value:
    return e.build.reshape(x, e.dims(node))


def _expand(e: Emitter, node: fx.Node, x: ir.Value) -> ir.Value:
    return e.build.expand(x, e.dims(node))


def _unsqueeze(e: Emitter, node: fx.Node, x: ir.Value) -> ir.Value:
    return e.build.unsqueeze(x, int(arguments(node, ("dim",))[0]))


def _squeeze(e: Emitter, node: fx.Node, x: ir.Value) -> ir.Value:
    rank = len(dims_of(x))
    axes: Any = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", list(range(rank)))
    wanted = {axis % rank for axis in ([axes] if isinstance(axes, int) else axes)}
    return e.build.squeeze(x, *(axis for axis in sorted(wanted) if dims_of(x)[axis] == ONE))


def _transpose(e: Emitter, node: fx.Node, x: ir.Value) -> ir.Value:
    order = list(range(len(dims_of(x))))
    a, b = node.args[1:3]
    order[a], order[b] = order[b], order[a]  # type: ignore[index]
    return e.build.transpose(x, order)


def _reverse_axes(e: Emitter, node: fx.Node, x: ir.Value) -> ir.Value:
    return e.build.transpose(x, list(range(len(dims_of(x))))[::-1])


def _swap_last(e: Emitter, node: fx.Node, x: ir.Value) -> ir.Value:
    order = list(range(len(dims_of(x))))
    return e.build.transpose(x, [*order[:-2], order[-1], order[-2]])


def _permute(e: Emitter, node: fx.Node, x: ir.Value) -> ir.Value:
    return e.build.transpose(x, arguments(node, ("dims",))[0])


def _movedim(e: Emitter, node: fx.Node, x: ir.Value) -> ir.Value:
    rank = len(dims_of(x))
    source, target = ([a] if isinstance(a, int) else list(a) for a in arguments(node, ("source", "destination")))
    source, target = [a % rank for a in source], [a % rank for a in target]
    order = [axis for axis in range(rank) if axis not in source]
    for to, axis in sorted(zip(target, source, strict=True)):
        order.insert(to, axis)
    return e.build.transpose(x, order)


def _bounds(e: Emitter, start: Any, stop: Any, size: Dim) -> tuple[Dim, Dim]:
    """Both ends of a Python slice within an axis."""

    def place(at: Any, default: Dim) -> Dim:
        if at is None or (isinstance(at, int) and at >= (1 << 31) - 1):
            return default
        dim = e.size(at)
        if dim.is_constant and dim.constant < 0:
            dim = size + dim
            return dim if not dim.is_constant else Dim(max(0, dim.constant))
        if dim.is_constant and size.is_constant:
            return Dim(min(dim.constant, size.constant))
        return dim

    return place(start, Dim(0)), place(stop, size)


def _slice(e: Emitter, node: fx.Node, x: ir.Value) -> ir.Value:
    dim, start, stop, step = arguments(node, ("dim", "start", "end", "step"))
    size = dims_of(x)[dim]
    low, high = _bounds(e, start, stop, size)
    if low.is_constant and high.is_constant and high.constant < low.constant:
        high = low
    return e.build.slice(x, dim, low, high, step)


def _narrow(e: Emitter, node: fx.Node, x: ir.Value) -> ir.Value:
    dim, start, length = arguments(node, ("dim", "start", "length"))
    low = _bounds(e, start, None, dims_of(x)[dim])[0]
    return e.build.slice(x, dim, low, low + e.size(length))


def _select(e: Emitter, node: fx.Node, x: ir.Value) -> ir.Value:
    dim, index = arguments(node, ("dim", "index"))
    low = _bounds(e, index, None, dims_of(x)[dim])[0]
    return e.build.squeeze(e.build.slice(x, dim, low, low + 1), dim)


def _diagonal(e: Emitter, node: fx.Node, x: ir.Value) -> ir.Value:
    offset, first, second = arguments(node, ("offset", "dim1", "dim2"))
    rank = len(dims_of(x))
    first, second = first % rank, second % rank
    rows, columns = dims_of(x)[first], dims_of(x)[second]
    if not (rows.is_constant and columns.is_constant):
        raise e.unsupported(node, "takes a diagonal over the tokens")
    order = [axis for axis in range(rank) if axis not in (first, second)] + [first, second]
    flat = e.build.transpose(x, order)
    flat = e.build.reshape(flat, (*dims_of(flat)[:-2], rows * columns))
    size = e.dims(node)[-1].constant
    start = offset if offset >= 0 else -offset * columns.constant
    ids = e.build.ints(*(start + i * (columns.constant + 1) for i in range(size)))
    return e.build.gather(flat, ids, -1)


def _repeat(e: Emitter, node: fx.Node, x: ir.Value) -> ir.Value:
    """Each axis as often as said: an axis of its own before it, stretched and merged."""
    counts = [e.size(count) for count in node.args[1]]  # type: ignore[union-attr]
    lead = len(counts) - len(dims_of(x))
    x = e.build.unsqueeze(x, *range(lead))
    old = dims_of(x)
    wide = e.build.unsqueeze(x, *(2 * axis for axis, count in enumerate(counts) if True))
    target = tuple(dim for pair in zip(counts, old, strict=True) for dim in pair)
    return e.build.reshape(e.build.expand(wide, target), e.dims(node))


def _repeat_interleave(e: Emitter, node: fx.Node, x: ir.Value) -> ir.Value:
    count, dim = arguments(node, ("repeats", "dim"))
    if isinstance(count, fx.Node):
        raise e.unsupported(node, "repeats by counts that depend on the data")
    if dim is None:
        x = e.build.reshape(x, (math.prod(dims_of(x), start=ONE),))
        dim = 0
    dim %= len(dims_of(x))
    wide = e.build.unsqueeze(x, dim + 1)
    target = (*dims_of(wide)[: dim + 1], Dim(int(count)), *dims_of(wide)[dim + 2 :])
    return e.build.reshape(e.build.expand(wide, target), e.dims(node))


def _flip(e: Emitter, node: fx.Node, x: ir.Value) -> ir.Value:
    for dim in node.args[1]:  # type: ignore[union-attr]
        size = dims_of(x)[dim]  # type: ignore[index]
        if not size.is_constant:
            raise e.unsupported(node, "reverses the tokens")
        x = e.build.gather(x, e.build.ints(*reversed(range(size.constant))), int(dim))  # type: ignore[arg-type]
    return x


def _roll(e: Emitter, node: fx.Node, x: ir.Value) -> ir.Value:
    shifts, dims = ([a] if isinstance(a, int) else list(a) for a in arguments(node, ("shifts", "dims")))
    shape = dims_of(x)
    if not dims:
        x, dims = e.build.reshape(x, (math.prod(shape, start=ONE),)), [0]
    for shift, dim in zip(shifts, dims, strict=True):
        size = dims_of(x)[dim]
        if not size.is_constant:
            raise e.unsupported(node, "moves values from one token to another")
        cut = Dim((size.constant - shift) % size.constant)
        x = e.build.concat([e.build.slice(x, dim, cut, size), e.build.slice(x, dim, Dim(0), cut)], dim)
    return e.build.reshape(x, shape)


def _split(e: Emitter, node: fx.Node) -> list[ir.Value]:
    x, is_weight = _input(e, node.args[0])
    (dim,) = arguments(node, ("dim",))
    parts = e.build.split(x, dim, [e.dims(node, i)[dim] for i in range(len(node.meta["val"]))])
    if is_weight:
        e.keep_stored(*parts)
    return parts


def _unbind(e: Emitter, node: fx.Node) -> list[ir.Value]:
    x, is_weight = _input(e, node.args[0])
    (dim,) = arguments(node, ("dim",))
    parts = [e.build.squeeze(part, dim) for part in e.build.split(x, dim, [ONE] * len(node.meta["val"]))]
    if is_weight:
        e.keep_stored(*parts)
    return parts


def _combined(combine: Callable[[Emitter, fx.Node, Sequence[ir.Value], int], ir.Value]) -> Converter:
    """An op on several tensors along an axis; weights of one dtype keep it."""

    def convert(e: Emitter, node: fx.Node) -> ir.Value:
        parts, dim = arguments(node, ("tensors", "dim"))
        parts = [part for part in parts if part.meta["val"].shape != (0,)] or parts[:1]
        kept = all(map(e.is_weight, parts)) and len({e.stored(part).dtype for part in parts}) == 1
        values = [e.stored(part) if kept else e.operand(part, e.dtype(node)) for part in parts]
        result = combine(e, node, values, dim)
        if kept:
            e.keep_stored(result)
        return result

    return convert


def _cat(e: Emitter, node: fx.Node, parts: Sequence[ir.Value], dim: int) -> ir.Value:
    return e.build.concat(parts, dim)


def _stack(e: Emitter, node: fx.Node, parts: Sequence[ir.Value], dim: int) -> ir.Value:
    dim %= len(e.dims(node))
    return e.build.concat([e.build.unsqueeze(part, dim) for part in parts], dim)


def _slice_scatter(e: Emitter, node: fx.Node) -> ir.Value:
    """The tensor with a slice replaced: what is before it, the new one, what is after it."""
    x, src, dim, start, stop, step = arguments(node, ("self", "src", "dim", "start", "end", "step"))
    if step != 1:
        raise e.unsupported(node, f"writes to every {step}th place")
    value, size = e.operand(x), e.dims(node)[dim]
    low, high = _bounds(e, start, stop, size)
    parts = [
        e.build.slice(value, dim, Dim(0), low),
        e.operand(src, e.dtype(node)),
        e.build.slice(value, dim, high, size),
    ]
    return e.build.concat([part for part in parts if dims_of(part)[dim] != Dim(0)], dim)


def _select_scatter(e: Emitter, node: fx.Node) -> ir.Value:
    x, src, dim, index = arguments(node, ("self", "src", "dim", "index"))
    value, size = e.operand(x), e.dims(node)[dim]
    low = _bounds(e, index, None, size)[0]
    middle = e.build.unsqueeze(e.operand(src, e.dtype(node)), dim % len(e.dims(node)))
    parts = [e.build.slice(value, dim, Dim(0), low), middle, e.build.slice(value, dim, low + 1, size)]
    return e.build.concat([part for part in parts if dims_of(part)[dim] != Dim(0)], dim)


def _copy(e: Emitter, node: fx.Node) -> ir.Value:
    return e.build.expand(e.operand(node.args[1], e.dtype(node)), e.dims(node))


def _pad(e: Emitter, node: fx.Node) -> ir.Value:
    """A constant before and after; negative sizes cut off."""
    x, pads = arguments(node, ("self", "pad"))
    if "pad.default" in str(node.target) and arguments(node, ("mode",))[0] != "constant":
        raise e.unsupported(node, "pads otherwise than with a constant")
    number = arguments(node, ("value",))[0] or 0
    value = e.operand(x)
    for i in range(0, len(pads), 2):
        axis = len(dims_of(value)) - 1 - i // 2
        low, high = int(pads[i]), int(pads[i + 1])
        size = dims_of(value)[axis]
        value = e.build.slice(value, axis, Dim(max(0, -low)), size + min(0, high))
        fill = e.operand(number, e.dtype(node))
        edges = []
        for count in (low, high):
            dims = list(dims_of(value))
            dims[axis] = Dim(max(0, count))
            edges.append([e.build.expand(fill, tuple(dims))] if count > 0 else [])
        value = e.build.concat([*edges[0], value, *edges[1]], axis)
    return value


def _triangle(upper: bool) -> Converter:
    """The upper or lower triangle of the last two axes; the rest is 0."""

    def convert(e: Emitter, node: fx.Node) -> ir.Value:
        x, diagonal = arguments(node, ("self", "diagonal"))
        value = e.operand(x)
        rows, columns = dims_of(value)[-2:]
        if not (rows.is_constant and columns.is_constant):
            raise e.unsupported(node, "masks a matrix of tokens by tokens")
        ones = torch.ones(rows.constant, columns.constant, dtype=torch.bool)
        mask = ones.triu(diagonal) if upper else ones.tril(diagonal)
        return e.build.where(e.build.constant(mask.numpy(), BOOL), value, e.operand(0, value.dtype))

    return convert


CONVERTERS: dict[str, Converter] = {
    **{
        f"aten.{name}": _rearranged(_reshape)
        for name in ("view", "reshape", "_unsafe_view", "flatten", "unflatten", "view_as", "ravel", "_reshape_alias")
    },
    **{f"aten.{name}": _rearranged(_expand) for name in ("expand", "expand_as", "broadcast_to", "expand_copy")},
    "aten.unsqueeze": _rearranged(_unsqueeze),
    "aten.squeeze": _rearranged(_squeeze),
    **{f"aten.{name}": _rearranged(_transpose) for name in ("transpose", "swapaxes", "swapdims")},
    **{f"aten.{name}": _rearranged(_reverse_axes) for name in ("t", "numpy_T")},
    **{f"aten.{name}": _rearranged(_swap_last) for name in ("mT", "adjoint", "matrix_H")},
    "aten.permute": _rearranged(_permute),
    **{f"aten.{name}": _rearranged(_movedim) for name in ("movedim", "moveaxis")},
    "aten.slice": _rearranged(_slice),
    "aten.narrow": _rearranged(_narrow),
    "aten.select": _rearranged(_select),
    "aten.diagonal": _rearranged(_diagonal),
    "aten.repeat": _rearranged(_repeat),
    "aten.tile": _rearranged(_repeat),
    "aten.repeat_interleave": _rearranged(_repeat_interleave),
    "aten.flip": _rearranged(_flip),
    "aten.roll": _rearranged(_roll),
    **{
        f"aten.{name}": _split
        for name in (
            *("split", "split_with_sizes", "chunk", "tensor_split", "unsafe_split", "unsafe_split_with_sizes"),
            *("unsafe_chunk", "split_copy", "split_with_sizes_copy"),
        )
    },
    "aten.unbind": _unbind,
    **{f"aten.{name}": _combined(_cat) for name in ("cat", "concat", "concatenate")},
    "aten.stack": _combined(_stack),
    "aten.slice_scatter": _slice_scatter,
    "aten.select_scatter": _select_scatter,
    "aten.copy": _copy,
    "aten.constant_pad_nd": _pad,
    "aten.pad": _pad,
    "aten.tril": _triangle(upper=False),
    "aten.triu": _triangle(upper=True),
    "getitem": lambda e, node: e.parts(node.args[0])[node.args[1]],  # type: ignore[arg-type, index]
}
