"""Sums, extremes, statistics, sorting and running sums along axes."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import onnx_ir as ir
from torch import fx

from llmc.compiler.aten.logic import as_bool
from llmc.compiler.graph_builder import BOOL, FLOAT, INT64, ONE, dims_of
from llmc.passes.fx.nodes import arguments

if TYPE_CHECKING:
    from llmc.compiler.graph import Converter, Emitter


def _axes(node: fx.Node, rank: int) -> tuple[list[int], bool]:
    """Which axes go, and whether they are kept with size 1."""
    names = {a.name for a in node.target._schema.arguments}  # type: ignore[union-attr]
    dim = arguments(node, ("dim",))[0] if "dim" in names else None
    keep = bool(arguments(node, ("keepdim",))[0]) if "keepdim" in names else False
    if dim is None or dim == []:
        return list(range(rank)), keep
    return [axis % rank for axis in ([dim] if isinstance(dim, int) else dim)], keep


def _reduction(op: str) -> Converter:
    def convert(e: Emitter, node: fx.Node) -> ir.Value:
        x = e.operand(node.args[0], e.dtype(node))
        return e.build.reduce(op, x, *_axes(node, len(dims_of(x))))

    return convert


def _all_or_any(function: str) -> Converter:
    """llmc::reduce of booleans, which the standard lacks: the axes go to the end."""

    def convert(e: Emitter, node: fx.Node) -> ir.Value:
        x = as_bool(e, e.operand(node.args[0]))
        axes, keep = _axes(node, len(dims_of(x)))
        return reduce_bool(e, x, function, axes, keep)

    return convert


def reduce_bool(e: Emitter, x: ir.Value, function: str, axes: list[int], keep: bool) -> ir.Value:
    """``any`` or ``all`` over axes."""
    rank = len(dims_of(x))
    left = [axis for axis in range(rank) if axis not in axes]
    moved = e.build.transpose(x, [*left, *sorted(axes)])
    dims = tuple(dims_of(x)[axis] for axis in left)
    attributes = {"function": function, "num_axes": len(axes)}
    (y,) = e.build.node("reduce", [moved], [(BOOL, dims)], attributes, "llmc")
    return e.build.unsqueeze(y, *sorted(axes)) if keep else y


def _extreme(reduce: str, arg: str, largest: bool) -> Converter:
    """Max and min: of everything; or along an axis, with the place where it is."""

    def convert(e: Emitter, node: fx.Node) -> ir.Value | list[ir.Value]:
        x = e.operand(node.args[0])
        if ".dim" not in str(node.target):
            return e.build.reduce(reduce, x, *_axes(node, len(dims_of(x))))
        (axis,), keep = _axes(node, len(dims_of(x)))
        return [e.build.reduce(reduce, x, [axis], keep), e.build.arg_reduce(arg, x, axis, keep)]

    return convert


def _arg_extreme(op: str) -> Converter:
    def convert(e: Emitter, node: fx.Node) -> ir.Value:
        x = e.operand(node.args[0])
        dim, keep = arguments(node, ("dim", "keepdim"))
        if dim is None:
            x = e.build.reshape(x, (math.prod(dims_of(x), start=ONE),))
        return e.build.arg_reduce(op, x, dim or 0, bool(keep))

    return convert


def _variance(root: bool) -> Converter:
    """Variance and deviation: the mean of squared distances from the mean, with n - correction in the divisor."""

    def convert(e: Emitter, node: fx.Node) -> ir.Value:
        variance, _ = _moments(e, node)
        return e.build.unary("Sqrt", variance) if root else variance

    return convert


def _variance_and_mean(root: bool) -> Converter:
    def convert(e: Emitter, node: fx.Node) -> list[ir.Value]:
        variance, mean = _moments(e, node)
        return [e.build.unary("Sqrt", variance) if root else variance, mean]

    return convert


def _moments(e: Emitter, node: fx.Node) -> tuple[ir.Value, ir.Value]:
    x = e.operand(node.args[0], FLOAT)
    axes, keep = _axes(node, len(dims_of(x)))
    names = {a.name for a in node.target._schema.arguments}  # type: ignore[union-attr]
    correction: Any = 1
    if "correction" in names:
        correction = arguments(node, ("correction",))[0]
    elif "unbiased" in names:
        correction = int(arguments(node, ("unbiased",))[0])
    correction = 1 if correction is None else correction
    count = math.prod((dims_of(x)[axis] for axis in axes), start=ONE)
    if not count.is_constant:
        raise e.unsupported(node, "takes statistics over the tokens")
    mean = e.build.reduce("ReduceMean", x, axes, True)
    distance = e.build.binary("Sub", x, mean)
    total = e.build.reduce("ReduceSum", e.build.binary("Mul", distance, distance), axes, keep)
    divisor = max(0.0, count.constant - float(correction))
    variance = e.build.binary("Div", total, e.operand(divisor, FLOAT))
    return variance, mean if keep else e.build.squeeze(mean, *axes)


def _vector_norm(e: Emitter, node: fx.Node) -> ir.Value:
    """The 1, 2, maximum or minimum norm."""
    order = node.args[1] if len(node.args) > 1 else next((node.kwargs[k] for k in ("ord", "p") if k in node.kwargs), 2)
    x = e.operand(node.args[0], FLOAT)
    axes, keep = _axes(node, len(dims_of(x)))
    if order in (None, 2):
        return e.build.unary("Sqrt", e.build.reduce("ReduceSum", e.build.binary("Mul", x, x), axes, keep))
    reductions = {1: "ReduceSum", math.inf: "ReduceMax", -math.inf: "ReduceMin"}
    if order not in reductions:
        raise e.unsupported(node, f"with order {order}")
    return e.build.reduce(reductions[order], e.build.unary("Abs", x), axes, keep)  # type: ignore[index]


def _log_sum_exp(e: Emitter, node: fx.Node) -> ir.Value:
    x = e.operand(node.args[0], FLOAT)
    axes, keep = _axes(node, len(dims_of(x)))
    top = e.build.reduce("ReduceMax", x, axes, True)
    total = e.build.reduce("ReduceSum", e.build.unary("Exp", e.build.binary("Sub", x, top)), axes, True)
    result = e.build.binary("Add", e.build.unary("Log", total), top)
    return result if keep else e.build.squeeze(result, *axes)


def _count_nonzero(e: Emitter, node: fx.Node) -> ir.Value:
    x = e.build.cast(as_bool(e, e.operand(node.args[0])), INT64)
    return e.build.reduce("ReduceSum", x, *_axes(node, len(dims_of(x))))


def _softmax(log: bool) -> Converter:
    def convert(e: Emitter, node: fx.Node) -> ir.Value:
        return e.build.softmax(e.operand(node.args[0], FLOAT), arguments(node, ("dim",))[0], log)

    return convert


def _cumsum(e: Emitter, node: fx.Node) -> ir.Value:
    x = e.operand(node.args[0], e.dtype(node))
    (dim,) = arguments(node, ("dim",))
    if not dims_of(x)[dim].is_constant:
        raise e.unsupported(node, "sums over the tokens, which are of several requests")
    return e.build.cumsum(x, dim)


def _topk(e: Emitter, node: fx.Node) -> list[ir.Value]:
    x, k, dim, largest = arguments(node, ("self", "k", "dim", "largest"))
    if isinstance(k, fx.Node):
        raise e.unsupported(node, "of a number that is not constant")
    return e.build.topk(e.operand(x), k, dim, largest)


def _sort(e: Emitter, node: fx.Node) -> list[ir.Value]:
    x, dim, descending = arguments(node, ("self", "dim", "descending"))
    value = e.operand(x)
    size = dims_of(value)[dim]
    if not size.is_constant:
        raise e.unsupported(node, "sorts the tokens, which are of several requests")
    return e.build.topk(value, size.constant, dim, descending)


def _argsort(e: Emitter, node: fx.Node) -> ir.Value:
    return _sort(e, node)[1]


CONVERTERS: dict[str, Converter] = {
    "aten.sum": _reduction("ReduceSum"),
    "aten.mean": _reduction("ReduceMean"),
    "aten.prod": _reduction("ReduceProd"),
    "aten.amax": _reduction("ReduceMax"),
    "aten.amin": _reduction("ReduceMin"),
    "aten.max": _extreme("ReduceMax", "ArgMax", largest=True),
    "aten.min": _extreme("ReduceMin", "ArgMin", largest=False),
    "aten.argmax": _arg_extreme("ArgMax"),
    "aten.argmin": _arg_extreme("ArgMin"),
    "aten.any": _all_or_any("any"),
    "aten.all": _all_or_any("all"),
    "aten.var": _variance(root=False),
    "aten.std": _variance(root=True),
    "aten.var_mean": _variance_and_mean(root=False),
    "aten.std_mean": _variance_and_mean(root=True),
    "aten.norm": _vector_norm,
    "aten.linalg_vector_norm": _vector_norm,
    "aten.logsumexp": _log_sum_exp,
    "aten.count_nonzero": _count_nonzero,
    **{f"aten.{name}": _softmax(log=False) for name in ("softmax", "_softmax", "special_softmax")},
    **{f"aten.{name}": _softmax(log=True) for name in ("log_softmax", "_log_softmax", "special_log_softmax")},
    "aten.cumsum": _cumsum,
    "aten.topk": _topk,
    "aten.sort": _sort,
    "aten.argsort": _argsort,
}
