"""Arithmetic of the graph -> elementwise steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import reduce as fold

import onnx_ir as ir

from llmc.compiler.lowering.builder import Builder, Rule, plan_dtype
from llmc.compiler.lowering.nodes import attribute
from llmc.compiler.lowering.values import View
from llmc.errors import CompileError

UNARY = {
    "Abs": "abs",
    "Ceil": "ceil",
    "Cos": "cos",
    "Erf": "erf",
    "Exp": "exp",
    "Floor": "floor",
    "IsNaN": "isnan",
    "Log": "log",
    "Neg": "neg",
    "Not": "not",
    "Reciprocal": "reciprocal",
    "Relu": "relu",
    "Round": "round",
    "Sigmoid": "sigmoid",
    "Sign": "sign",
    "Sin": "sin",
    "Softplus": "softplus",
    "Sqrt": "sqrt",
    "Tanh": "tanh",
}
BINARY = {
    "Add": "add",
    "And": "and",
    "Div": "div",
    "Equal": "equal",
    "Greater": "greater",
    "GreaterOrEqual": "greater_equal",
    "Less": "less",
    "LessOrEqual": "less_equal",
    "Mul": "mul",
    "Or": "or",
    "Pow": "pow",
    "Sub": "sub",
    "Xor": "xor",
}
COMPARISONS = frozenset(("equal", "not_equal", "less", "less_equal", "greater", "greater_equal", "isnan"))


def _unary(function: str) -> Rule:
    def rule(builder: Builder, node: ir.Node) -> Sequence[View]:
        x = builder.view(node.inputs[0])
        return [builder.elementwise(function, x, dtype="bool" if function in COMPARISONS else x.dtype)]

    return rule


def _binary(function: str) -> Rule:
    def rule(builder: Builder, node: ir.Node) -> Sequence[View]:
        return [binary(builder, function, builder.view(node.inputs[0]), builder.view(node.inputs[1]))]

    return rule


def binary(builder: Builder, function: str, a: View, b: View) -> View:
    """A function of two operands, which are brought to one dtype first."""
    if a.dtype != b.dtype:
        dtype = _wider(a.dtype, b.dtype)
        a, b = builder.convert(a, dtype), builder.convert(b, dtype)
    return builder.elementwise(function, a, b, dtype="bool" if function in COMPARISONS else a.dtype)


def _wider(a: str, b: str) -> str:
    order = ("bool", "int32", "int64", "float32")
    return max(a, b, key=order.index)


def _variadic(function: str, mean: bool = False) -> Rule:
    def rule(builder: Builder, node: ir.Node) -> Sequence[View]:
        views = [builder.view(value) for value in node.inputs]
        total = fold(lambda a, b: binary(builder, function, a, b), views)
        if mean:
            total = binary(builder, "div", total, builder.number(len(views), total.dtype))
        return [total]

    return rule


def _mod(builder: Builder, node: ir.Node) -> Sequence[View]:
    function = "fmod" if attribute(node, "fmod", 0) else "mod"
    return [binary(builder, function, builder.view(node.inputs[0]), builder.view(node.inputs[1]))]


def _where(builder: Builder, node: ir.Node) -> Sequence[View]:
    condition, a, b = (builder.view(value) for value in node.inputs)
    dtype = _wider(a.dtype, b.dtype)
    return [builder.elementwise("where", condition, builder.convert(a, dtype), builder.convert(b, dtype), dtype=dtype)]


def _cast(builder: Builder, node: ir.Node) -> Sequence[View]:
    dtype = plan_dtype(ir.DataType(attribute(node, "to")), "Cast")
    raw = builder.raw(node.inputs[0])
    widens = (raw.dtype, dtype) == ("int32", "int64") and node.outputs[0].dtype is not None
    if raw.dtype == dtype or widens:  # whoever wants int64 converts it (Builder.view); as ids they stay int32
        return [raw]
    return [builder.convert(builder.view(node.inputs[0]), dtype)]


def _cast_like(builder: Builder, node: ir.Node) -> Sequence[View]:
    return [builder.convert(builder.view(node.inputs[0]), builder.view(node.inputs[1]).dtype)]


def _clip(builder: Builder, node: ir.Node) -> Sequence[View]:
    x = builder.view(node.inputs[0])
    low, high = builder.optional(node, 1), builder.optional(node, 2)
    if low is not None:
        x = binary(builder, "max", x, builder.convert(low, x.dtype))
    if high is not None:
        x = binary(builder, "min", x, builder.convert(high, x.dtype))
    return [x]


def _gelu(builder: Builder, node: ir.Node) -> Sequence[View]:
    kinds = {"none": "gelu", "tanh": "gelu_tanh"}
    approximate = attribute(node, "approximate", "none")
    if approximate not in kinds:
        raise CompileError(f"Gelu approximated by {approximate!r} is not supported")
    return [builder.elementwise(kinds[approximate], builder.view(node.inputs[0]))]


def _formula(function: Callable[[Formula, View, ir.Node], View]) -> Rule:
    def rule(builder: Builder, node: ir.Node) -> Sequence[View]:
        return [function(Formula(builder), builder.view(node.inputs[0]), node)]

    return rule


class Formula:
    """Writes arithmetic on float views and numbers as steps: ``f("mul", x, 2.0)``."""

    def __init__(self, builder: Builder) -> None:
        self._builder = builder

    def __call__(self, function: str, *operands: View | float) -> View:
        """Apply a function of llmc::elementwise."""
        views = [v if isinstance(v, View) else self._builder.number(v, "float32") for v in operands]
        return self._builder.elementwise(function, *views, dtype="bool" if function in COMPARISONS else "float32")


def _leaky_relu(f: Formula, x: View, node: ir.Node) -> View:
    return f("where", f("less", x, 0.0), f("mul", x, attribute(node, "alpha", 0.01)), x)


def _elu(f: Formula, x: View, node: ir.Node) -> View:
    negative = f("mul", f("expm1", x), attribute(node, "alpha", 1.0))
    return f("where", f("less", x, 0.0), negative, x)


def _hard_sigmoid(f: Formula, x: View, node: ir.Node) -> View:
    line = f("add", f("mul", x, attribute(node, "alpha", 0.2)), attribute(node, "beta", 0.5))
    return f("min", f("max", line, 0.0), 1.0)


def _hard_swish(f: Formula, x: View, node: ir.Node) -> View:
    return f("mul", x, f("min", f("max", f("add", f("mul", x, 1 / 6), 0.5), 0.0), 1.0))


def _mish(f: Formula, x: View, node: ir.Node) -> View:
    return f("mul", x, f("tanh", f("softplus", x)))


def _softsign(f: Formula, x: View, node: ir.Node) -> View:
    return f("div", x, f("add", f("abs", x), 1.0))


def _llmc_elementwise(builder: Builder, node: ir.Node) -> Sequence[View]:
    function = attribute(node, "function")
    views = [builder.view(value) for value in node.inputs if value is not None]
    if function == "copy":
        dtype = node.outputs[0].dtype
        return [builder.convert(views[0], views[0].dtype if dtype is None else plan_dtype(dtype, "copy"))]
    if len(views) == 2:
        return [binary(builder, function, *views)]
    return [builder.elementwise(function, *views, dtype="bool" if function in COMPARISONS else views[-1].dtype)]


RULES: Mapping[str, Rule] = {
    **{op: _unary(function) for op, function in UNARY.items()},
    **{op: _binary(function) for op, function in BINARY.items()},
    "Max": _variadic("max"),
    "Min": _variadic("min"),
    "Sum": _variadic("add"),
    "Mean": _variadic("add", mean=True),
    "Mod": _mod,
    "Where": _where,
    "Cast": _cast,
    "CastLike": _cast_like,
    "Clip": _clip,
    "Gelu": _gelu,
    "LeakyRelu": _formula(_leaky_relu),
    "Elu": _formula(_elu),
    "HardSigmoid": _formula(_hard_sigmoid),
    "HardSwish": _formula(_hard_swish),
    "Mish": _formula(_mish),
    "Softsign": _formula(_softsign),
    "llmc::elementwise": _llmc_elementwise,
}
