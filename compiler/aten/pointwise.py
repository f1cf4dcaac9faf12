"""Arithmetic, activations and conversions."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import onnx_ir as ir
from torch import fx

from llmc.compiler.aten.logic import as_bool
from llmc.compiler.aten.operands import INTEGERS, floor_division, pair
from llmc.compiler.graph_builder import BOOL, FLOAT
from llmc.passes.fx.nodes import arguments

if TYPE_CHECKING:
    from llmc.compiler.graph import Converter, Emitter


def _unary(op: str) -> Converter:
    """A standard op; integers count as floats, but for those that stay integers."""

    def convert(e: Emitter, node: fx.Node) -> ir.Value:
        return e.build.unary(op, e.operand(node.args[0], e.dtype(node)))

    return convert


def _function(name: str) -> Converter:
    """A function of llmc::elementwise."""

    def convert(e: Emitter, node: fx.Node) -> ir.Value:
        return e.build.function(name, e.operand(node.args[0], e.dtype(node)))

    return convert


def _composed(compute: Callable[[Emitter, ir.Value], ir.Value]) -> Converter:
    """Several ops on one float input."""

    def convert(e: Emitter, node: fx.Node) -> ir.Value:
        return compute(e, e.operand(node.args[0], e.dtype(node)))

    return convert


def _scaled(op: str, factor: float, before: bool) -> Converter:
    """An op with a constant factor before or after it."""

    def compute(e: Emitter, x: ir.Value) -> ir.Value:
        number = e.operand(factor, FLOAT)
        if before:
            return e.build.unary(op, e.build.binary("Mul", x, number))
        return e.build.binary("Mul", e.build.unary(op, x), number)

    return _composed(compute)


def _square(e: Emitter, node: fx.Node) -> ir.Value:
    x = e.operand(node.args[0])
    return e.build.binary("Mul", x, x)


def _round(e: Emitter, node: fx.Node) -> ir.Value:
    decimals = arguments(node, ("decimals",))[0] if str(node.target) == "aten.round.decimals" else 0
    x = e.operand(node.args[0])
    if x.dtype in INTEGERS:
        return x
    if not decimals:
        return e.build.unary("Round", x)
    factor = e.operand(10.0**decimals, FLOAT)
    return e.build.binary("Div", e.build.unary("Round", e.build.binary("Mul", x, factor)), factor)


def _rounding(op: str) -> Converter:
    """Floor and its like: integers are whole already."""

    def convert(e: Emitter, node: fx.Node) -> ir.Value:
        x = e.operand(node.args[0])
        if x.dtype in INTEGERS:
            return x
        return e.build.function("trunc", x) if op == "trunc" else e.build.unary(op, x)

    return convert


def _gelu(e: Emitter, node: fx.Node) -> ir.Value:
    (approximate,) = arguments(node, ("approximate",))
    return e.build.unary("Gelu", e.operand(node.args[0]), approximate=approximate)


def _softplus(e: Emitter, node: fx.Node) -> ir.Value:
    x, beta, threshold = arguments(node, ("self", "beta", "threshold"))
    if threshold < 15:  # beyond it torch returns x itself, which in float32 differs only for small thresholds
        raise e.unsupported(node, f"with threshold {threshold}")
    value = e.operand(x)
    if beta == 1:
        return e.build.unary("Softplus", value)
    factor = e.operand(float(beta), FLOAT)
    return e.build.binary("Div", e.build.unary("Softplus", e.build.binary("Mul", value, factor)), factor)


def _binary(op: str) -> Converter:
    def convert(e: Emitter, node: fx.Node) -> ir.Value:
        return e.build.binary(op, *pair(e, node))

    return convert


def _addition(op: str, swap: bool = False) -> Converter:
    """A sum or difference, where torch scales the second operand by alpha."""

    def convert(e: Emitter, node: fx.Node) -> ir.Value:
        a, b = pair(e, node)
        if e.dtype(node) == BOOL:
            return e.build.binary("Or", a, b)
        (alpha,) = arguments(node, ("alpha",))
        if alpha != 1:
            b = e.build.binary("Mul", b, e.operand(alpha, e.dtype(node)))
        return e.build.binary(op, b, a) if swap else e.build.binary(op, a, b)

    return convert


def _rsub(e: Emitter, node: fx.Node) -> ir.Value:
    """The second operand less alpha times the first."""
    a, b = pair(e, node)
    (alpha,) = arguments(node, ("alpha",))
    if alpha != 1:
        a = e.build.binary("Mul", a, e.operand(alpha, e.dtype(node)))
    return e.build.binary("Sub", b, a)


def _mul(e: Emitter, node: fx.Node) -> ir.Value:
    return e.build.binary("And" if e.dtype(node) == BOOL else "Mul", *pair(e, node))


def _div(e: Emitter, node: fx.Node) -> ir.Value:
    mode = node.kwargs.get("rounding_mode")
    a, b = pair(e, node)
    if mode is None:
        return e.build.binary("Div", a, b)
    if e.dtype(node) in INTEGERS:
        return floor_division(e, a, b) if mode == "floor" else e.build.binary("Div", a, b)
    quotient = e.build.binary("Div", a, b)
    return e.build.unary("Floor", quotient) if mode == "floor" else e.build.function("trunc", quotient)


def _floor_divide(e: Emitter, node: fx.Node) -> ir.Value:
    a, b = pair(e, node)
    if e.dtype(node) in INTEGERS:
        return floor_division(e, a, b)
    return e.build.unary("Floor", e.build.binary("Div", a, b))


def _remainder(e: Emitter, node: fx.Node) -> ir.Value:
    return e.build.function("mod", *pair(e, node))


def _fmod(e: Emitter, node: fx.Node) -> ir.Value:
    return e.build.function("fmod", *pair(e, node))


def _pow(e: Emitter, node: fx.Node) -> ir.Value:
    base, exponent = arguments(node, ("self", "exponent"))
    dtype = e.dtype(node)
    if exponent == 2 and isinstance(base, fx.Node):
        x = e.operand(base, dtype)
        return e.build.binary("Mul", x, x)
    if exponent == 0.5 and isinstance(base, fx.Node):
        return e.build.unary("Sqrt", e.operand(base, dtype))
    if dtype in INTEGERS:
        a, b = e.operand(base, FLOAT), e.operand(exponent, FLOAT)
        return e.build.cast(e.build.binary("Pow", a, b), dtype)
    return e.build.binary("Pow", e.operand(base, dtype), e.operand(exponent, dtype))


def _clamp(e: Emitter, node: fx.Node) -> ir.Value:
    x, *bounds = arguments(node, ("self", "min", "max"))
    result = e.operand(x, e.dtype(node))
    for op, bound in zip(("Max", "Min"), bounds, strict=True):
        if bound is not None and bound not in (-math.inf, math.inf):
            result = e.build.binary(op, result, e.operand(bound, e.dtype(node)))
    return result


def _clamp_min(e: Emitter, node: fx.Node) -> ir.Value:
    return e.build.binary("Max", *pair(e, node, ("self", "min")))


def _clamp_max(e: Emitter, node: fx.Node) -> ir.Value:
    return e.build.binary("Min", *pair(e, node, ("self", "max")))


def _cast(e: Emitter, node: fx.Node) -> ir.Value:
    x = e.operand(node.args[0])
    wanted = e.dtype(node)
    return as_bool(e, x) if wanted == BOOL else e.build.cast(x, wanted)


def _tan(e: Emitter, x: ir.Value) -> ir.Value:
    return e.build.binary("Div", e.build.unary("Sin", x), e.build.unary("Cos", x))


def _hyperbolic(op: str) -> Callable[[Emitter, ir.Value], ir.Value]:
    def compute(e: Emitter, x: ir.Value) -> ir.Value:
        both = e.build.binary(op, e.build.unary("Exp", x), e.build.unary("Exp", e.build.unary("Neg", x)))
        return e.build.binary("Mul", both, e.operand(0.5, FLOAT))

    return compute


def _asinh(e: Emitter, x: ir.Value) -> ir.Value:
    """sign(x) * log(|x| + sqrt(x^2 + 1))."""
    size, one = e.build.unary("Abs", x), e.operand(1.0, FLOAT)
    root = e.build.unary("Sqrt", e.build.binary("Add", e.build.binary("Mul", x, x), one))
    return e.build.binary("Mul", e.build.unary("Sign", x), e.build.unary("Log", e.build.binary("Add", size, root)))


def _acosh(e: Emitter, x: ir.Value) -> ir.Value:
    """log(x + sqrt(x^2 - 1))."""
    root = e.build.unary("Sqrt", e.build.binary("Sub", e.build.binary("Mul", x, x), e.operand(1.0, FLOAT)))
    return e.build.unary("Log", e.build.binary("Add", x, root))


def _atanh(e: Emitter, x: ir.Value) -> ir.Value:
    """(log(1 + x) - log(1 - x)) / 2."""
    logs = (e.build.function("log1p", x), e.build.function("log1p", e.build.unary("Neg", x)))
    return e.build.binary("Mul", e.build.binary("Sub", *logs), e.operand(0.5, FLOAT))


def _hypot(e: Emitter, node: fx.Node) -> ir.Value:
    a, b = (e.build.binary("Mul", x, x) for x in pair(e, node))
    return e.build.unary("Sqrt", e.build.binary("Add", a, b))


def _erfc(e: Emitter, x: ir.Value) -> ir.Value:
    return e.build.binary("Sub", e.operand(1.0, FLOAT), e.build.unary("Erf", x))


def _fraction(e: Emitter, x: ir.Value) -> ir.Value:
    return e.build.binary("Sub", x, e.build.function("trunc", x))


def _logit(e: Emitter, node: fx.Node) -> ir.Value:
    x, eps = arguments(node, ("self", "eps"))
    value, one = e.operand(x, FLOAT), e.operand(1.0, FLOAT)
    if eps is not None:
        value = e.build.binary("Min", e.build.binary("Max", value, e.operand(eps, FLOAT)), e.operand(1 - eps, FLOAT))
    return e.build.unary("Log", e.build.binary("Div", value, e.build.binary("Sub", one, value)))


def _same(e: Emitter, node: fx.Node) -> Any:
    """Ops that change nothing here: copies, and what only matters in training."""
    if node.args and e.is_weight(node.args[0]):
        return e.stored(node.args[0])  # type: ignore[arg-type]
    return e.operand(node.args[0])


CONVERTERS: dict[str, Converter] = {
    **{
        f"aten.{name}": _unary(op)
        for name, op in {
            "neg": "Neg",
            "abs": "Abs",
            "exp": "Exp",
            "log": "Log",
            "sqrt": "Sqrt",
            "reciprocal": "Reciprocal",
            "sin": "Sin",
            "cos": "Cos",
            "tanh": "Tanh",
            "sigmoid": "Sigmoid",
            "erf": "Erf",
            "sign": "Sign",
            "sgn": "Sign",
            "relu": "Relu",
        }.items()
    },
    **{f"aten.{name}": _function(name) for name in ("rsqrt", "log1p", "expm1", "silu")},
    **{f"aten.{name}": _rounding(op) for name, op in (("floor", "Floor"), ("ceil", "Ceil"), ("trunc", "trunc"))},
    "aten.fix": _rounding("trunc"),
    "aten.round": _round,
    "aten.square": _square,
    "aten.log2": _scaled("Log", 1 / math.log(2), before=False),
    "aten.log10": _scaled("Log", 1 / math.log(10), before=False),
    "aten.exp2": _scaled("Exp", math.log(2), before=True),
    "aten.tan": _composed(_tan),
    "aten.sinh": _composed(_hyperbolic("Sub")),
    "aten.cosh": _composed(_hyperbolic("Add")),
    "aten.asinh": _composed(_asinh),
    "aten.acosh": _composed(_acosh),
    "aten.atanh": _composed(_atanh),
    "aten.hypot": _hypot,
    "aten.erfc": _composed(_erfc),
    "aten.special_erfc": _composed(_erfc),
    "aten.frac": _composed(_fraction),
    "aten.logit": _logit,
    "aten.gelu": _gelu,
    "aten.softplus": _softplus,
    "aten.add": _addition("Add"),
    "aten.sub": _addition("Sub"),
    "aten.subtract": _addition("Sub"),
    "aten.rsub": _rsub,
    "aten.mul": _mul,
    "aten.multiply": _mul,
    "aten.div": _div,
    "aten.divide": _div,
    "aten.true_divide": _div,
    "aten.floor_divide": _floor_divide,
    "aten.maximum": _binary("Max"),
    "aten.minimum": _binary("Min"),
    "aten.max.other": _binary("Max"),
    "aten.min.other": _binary("Min"),
    "aten.remainder": _remainder,
    "aten.fmod": _fmod,
    "aten.pow": _pow,
    "aten.clamp": _clamp,
    "aten.clip": _clamp,
    "aten.hardtanh": lambda e, node: _hardtanh(e, node),
    "aten.clamp_min": _clamp_min,
    "aten.clamp_max": _clamp_max,
    **{
        f"aten.{name}": _cast
        for name in ("to", "_to_copy", "type_as", "float", "double", "half", "bfloat16", "int", "long", "bool")
    },
    **{
        f"aten.{name}": _same
        for name in ("alias", "clone", "contiguous", "detach", "lift_fresh_copy", "lift", "positive", "dropout")
    },
    "aten.feature_dropout": _same,
    "aten.native_dropout": lambda e, node: [_same(e, node), None],
    "prims.convert_element_type": _cast,
}


def _hardtanh(e: Emitter, node: fx.Node) -> ir.Value:
    x, low, high = arguments(node, ("self", "min_val", "max_val"))
    value = e.build.binary("Max", e.operand(x), e.operand(low, e.dtype(node)))
    return e.build.binary("Min", value, e.operand(high, e.dtype(node)))
