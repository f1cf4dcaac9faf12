"""Ops along one axis or several: they go to the end as a view, where the kernels want them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import onnx_ir as ir

from llmc.compiler.lowering.builder import Builder, Rule
from llmc.compiler.lowering.elementwise import Formula
from llmc.compiler.lowering.nodes import attribute, axis_of
from llmc.compiler.lowering.values import ONE, ZERO, View, show
from llmc.errors import CompileError


def reduce(builder: Builder, function: str, x: View, axes: Sequence[int]) -> View:
    """Reduce these axes, which go away."""
    axes = sorted(axis % x.rank for axis in axes)
    refuse_tokens(x, axes)
    dtype = "int64" if function.startswith("arg") else x.dtype
    if function in ("max", "min") and dtype == "bool":
        function = "any" if function == "max" else "all"
    last = x.to_last(axes)
    result = builder.allocate(last.shape[: x.rank - len(axes)], dtype, rows_first=True)
    builder.emit_rows("reduce", [last], [result], function=function, num_axes=len(axes))
    return result


def refuse_tokens(x: View, axes: Sequence[int]) -> None:
    """Raise if one of these axes packs the tokens of several requests, which must not be mixed."""
    for axis in axes:
        if not x.shape[axis].is_constant:
            raise CompileError(
                f"works along axis {axis} of {show(x.shape)}, which packs the tokens of several requests"
            )


def _reduce(function: str) -> Rule:
    def rule(builder: Builder, node: ir.Node) -> Sequence[View]:
        x = builder.view(node.inputs[0])
        axes = builder.ints(node, 1) if len(node.inputs) > 1 else attribute(node, "axes")
        if not axes:
            if attribute(node, "noop_with_empty_axes", 0):
                return [x]
            axes = range(x.rank)
        return [_keep(node, _composed(builder, function, x, axes), axes, x.rank)]

    return rule


def _composed(builder: Builder, function: str, x: View, axes: Sequence[int]) -> View:
    f = Formula(builder)
    if function == "l1":
        return reduce(builder, "sum", f("abs", x), axes)
    if function in ("l2", "sum_square"):
        total = reduce(builder, "sum", f("mul", x, x), axes)
        return f("sqrt", total) if function == "l2" else total
    if function == "log_sum_exp":
        top = reduce(builder, "max", x, axes)
        shifted = f("sub", x, top.unsqueeze(sorted(axis % x.rank for axis in axes)))
        return f("add", f("log", reduce(builder, "sum", f("exp", shifted), axes)), top)
    return reduce(builder, function, x, axes)


def _keep(node: ir.Node, y: View, axes: Sequence[int], rank: int) -> View:
    return y.unsqueeze(sorted(axis % rank for axis in axes)) if attribute(node, "keepdims", 1) else y


def _arg(function: str) -> Rule:
    def rule(builder: Builder, node: ir.Node) -> Sequence[View]:
        x = builder.view(node.inputs[0])
        if attribute(node, "select_last_index", 0):
            raise CompileError(f"{node.op_type} that takes the last of equal values is not supported")
        axis = axis_of(node, x.rank, 0)
        return [_keep(node, reduce(builder, function, x, [axis]), [axis], x.rank)]

    return rule


def along(builder: Builder, op: str, x: View, axis: int, **attributes: bool) -> View:
    """An op that keeps the shape and works on the last axis, applied to any axis."""
    if x.strides[axis] != ZERO:  # what is the same for all tokens may be counted: a running sum of ones
        refuse_tokens(x, [axis])
    last = x.to_last([axis])
    result = builder.allocate(last.shape, x.dtype, rows_first=True)
    builder.emit_rows(op, [last], [result], **attributes)
    return from_last(result, axis)


def from_last(view: View, axis: int) -> View:
    """The last axis moved to where ``to_last`` took it from."""
    order = list(range(view.rank - 1))
    order.insert(axis, view.rank - 1)
    return view.transpose(order)


def _softmax(log: bool) -> Rule:
    def rule(builder: Builder, node: ir.Node) -> Sequence[View]:
        x = builder.view(node.inputs[0])
        return [along(builder, "softmax", x, axis_of(node, x.rank, -1), log=log)]

    return rule


def _cumsum(builder: Builder, node: ir.Node) -> Sequence[View]:
    x, axis = builder.view(node.inputs[0]), builder.ints(node, 1)
    assert axis is not None, "CumSum has an axis"
    exclusive = bool(attribute(node, "exclusive", 0))
    if attribute(node, "reverse", 0):
        raise CompileError("CumSum from the end is not supported")
    return [along(builder, "cumsum", x, axis[0] % x.rank, exclusive=exclusive)]


def _topk(builder: Builder, node: ir.Node) -> Sequence[View]:
    x, k = builder.view(node.inputs[0]), builder.ints(node, 1)
    assert k is not None, "TopK has a k"
    return topk(builder, node, x, axis_of(node, x.rank, -1), k[0], bool(attribute(node, "largest", 1)))


def topk(builder: Builder, node: ir.Node, x: View, axis: int, k: int, largest: bool) -> Sequence[View]:
    """Values and indices, sorted."""
    refuse_tokens(x, [axis])
    if x.dtype != "float32":
        raise CompileError(f"TopK of {x.dtype} is not supported, only of float32")
    last = x.to_last([axis])
    shape = [*last.shape[:-1], ONE * k]
    dtypes = zip(node.outputs, (x.dtype, "int64"), strict=True)
    outputs = [builder.allocate(shape, dtype, value.name) for value, dtype in dtypes]
    builder.emit_rows("topk", [last], outputs, k=k, largest=largest)
    return [from_last(output, axis) for output in outputs]


def _llmc_reduce(builder: Builder, node: ir.Node) -> Sequence[View]:
    x, count = builder.view(node.inputs[0]), attribute(node, "num_axes")
    return [reduce(builder, attribute(node, "function"), x, range(x.rank - count, x.rank))]


def _llmc_softmax(builder: Builder, node: ir.Node) -> Sequence[View]:
    x = builder.view(node.inputs[0])
    return [along(builder, "softmax", x, x.rank - 1, log=bool(attribute(node, "log")))]


def _llmc_cumsum(builder: Builder, node: ir.Node) -> Sequence[View]:
    x = builder.view(node.inputs[0])
    return [along(builder, "cumsum", x, x.rank - 1, exclusive=bool(attribute(node, "exclusive")))]


def _llmc_topk(builder: Builder, node: ir.Node) -> Sequence[View]:
    x = builder.view(node.inputs[0])
    return topk(builder, node, x, x.rank - 1, attribute(node, "k"), bool(attribute(node, "largest")))


RULES: Mapping[str, Rule] = {
    "ReduceSum": _reduce("sum"),
    "ReduceMean": _reduce("mean"),
    "ReduceMax": _reduce("max"),
    "ReduceMin": _reduce("min"),
    "ReduceProd": _reduce("prod"),
    "ReduceL1": _reduce("l1"),
    "ReduceL2": _reduce("l2"),
    "ReduceSumSquare": _reduce("sum_square"),
    "ReduceLogSumExp": _reduce("log_sum_exp"),
    "ArgMax": _arg("argmax"),
    "ArgMin": _arg("argmin"),
    "Softmax": _softmax(log=False),
    "LogSoftmax": _softmax(log=True),
    "CumSum": _cumsum,
    "TopK": _topk,
    "llmc::reduce": _llmc_reduce,
    "llmc::softmax": _llmc_softmax,
    "llmc::cumsum": _llmc_cumsum,
    "llmc::topk": _llmc_topk,
}
