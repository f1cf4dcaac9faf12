"""Arithmetic, comparisons, activations and conversions."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import onnx_ir as ir
import torch
from torch import Tensor, fx

from llmc.compiler.graph_builder import BOOL, FLOAT, INT64
from llmc.passes.fx.nodes import arguments, op_name

if TYPE_CHECKING:
    from llmc.compiler.graph import Converter, Emitter

INTEGERS = (ir.DataType.INT32, ir.DataType.INT64)


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


def _not(e: Emitter, node: fx.Node) -> ir.Value:
    return e.build.unary("Not", as_bool(e, e.operand(node.args[0])))


def _bitwise_not(e: Emitter, node: fx.Node) -> ir.Value:
    x = e.operand(node.args[0])
    if x.dtype == BOOL:
        return e.build.unary("Not", x)
    return e.build.binary("Sub", e.build.unary("Neg", x), e.operand(1, x.dtype))


def _is_inf(e: Emitter, node: fx.Node) -> ir.Value:
    x = e.build.unary("Abs", e.operand(node.args[0], FLOAT))
    return e.build.binary("Equal", x, e.operand(math.inf, FLOAT), BOOL)


def _is_finite(e: Emitter, node: fx.Node) -> ir.Value:
    x = e.build.unary("Abs", e.operand(node.args[0], FLOAT))
    return e.build.binary("Less", x, e.operand(math.inf, FLOAT), BOOL)


def _is_nan(e: Emitter, node: fx.Node) -> ir.Value:
    return e.build.unary("IsNaN", e.operand(node.args[0], FLOAT), BOOL)


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


def _pair(e: Emitter, node: fx.Node, names: tuple[str, str] = ("self", "other")) -> tuple[ir.Value, ir.Value]:
    """Both operands in the dtype of the result."""
    a, b = arguments(node, names)
    return e.operand(a, e.dtype(node)), e.operand(b, e.dtype(node))


def _binary(op: str) -> Converter:
    def convert(e: Emitter, node: fx.Node) -> ir.Value:
        return e.build.binary(op, *_pair(e, node))

    return convert


def _addition(op: str, swap: bool = False) -> Converter:
    """A sum or difference, where torch scales the second operand by alpha."""

    def convert(e: Emitter, node: fx.Node) -> ir.Value:
        a, b = _pair(e, node)
        if e.dtype(node) == BOOL:
            return e.build.binary("Or", a, b)
        (alpha,) = arguments(node, ("alpha",))
        if alpha != 1:
            b = e.build.binary("Mul", b, e.operand(alpha, e.dtype(node)))
        return e.build.binary(op, b, a) if swap else e.build.binary(op, a, b)

    return convert


def _rsub(e: Emitter, node: fx.Node) -> ir.Value:
    """The second operand less alpha times the first."""
    a, b = _pair(e, node)
    (alpha,) = arguments(node, ("alpha",))
    if alpha != 1:
        a = e.build.binary("Mul", a, e.operand(alpha, e.dtype(node)))
    return e.build.binary("Sub", b, a)


def _mul(e: Emitter, node: fx.Node) -> ir.Value:
    return e.build.binary("And" if e.dtype(node) == BOOL else "Mul", *_pair(e, node))


def _div(e: Emitter, node: fx.Node) -> ir.Value:
    mode = node.kwargs.get("rounding_mode")
    a, b = _pair(e, node)
    if mode is None:
        return e.build.binary("Div", a, b)
    if e.dtype(node) in INTEGERS:
        return floor_division(e, a, b) if mode == "floor" else e.build.binary("Div", a, b)
    quotient = e.build.binary("Div", a, b)
    return e.build.unary("Floor", quotient) if mode == "floor" else e.build.function("trunc", quotient)


def _floor_divide(e: Emitter, node: fx.Node) -> ir.Value:
    a, b = _pair(e, node)
    if e.dtype(node) in INTEGERS:
        return floor_division(e, a, b)
    return e.build.unary("Floor", e.build.binary("Div", a, b))


def floor_division(e: Emitter, a: ir.Value, b: ir.Value) -> ir.Value:
    """Of integers, toward minus infinity, as // of Python."""
    return e.build.binary("Div", e.build.binary("Sub", a, e.build.function("mod", a, b)), b)


def _remainder(e: Emitter, node: fx.Node) -> ir.Value:
    return e.build.function("mod", *_pair(e, node))


def _fmod(e: Emitter, node: fx.Node) -> ir.Value:
    return e.build.function("fmod", *_pair(e, node))


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


def compared(e: Emitter, node: fx.Node) -> tuple[ir.Value, ir.Value]:
    """Both operands of a comparison, in the dtype in which torch compares them."""
    from llmc.compiler.graph import DTYPES

    a, b = arguments(node, ("self", "other"))
    examples = [x.meta["val"] if isinstance(x, fx.Node) else x for x in (a, b)]
    first, second = (x if isinstance(x, Tensor | int | float | bool) else 1 for x in examples)
    common = DTYPES[torch.result_type(first, second)]
    return e.operand(a, common), e.operand(b, common)


def _comparison(op: str) -> Converter:
    def convert(e: Emitter, node: fx.Node) -> ir.Value:
        a, b = compared(e, node)
        if op == "not_equal":
            return e.build.function(op, a, b, dtype=BOOL)
        if a.dtype == BOOL and op != "Equal":
            a, b = e.build.cast(a, INT64), e.build.cast(b, INT64)
        return e.build.binary(op, a, b, BOOL)

    return convert


def as_bool(e: Emitter, x: ir.Value) -> ir.Value:
    """Whether it is not zero."""
    if x.dtype == BOOL:
        return x
    return e.build.function("not_equal", x, e.operand(0, x.dtype), dtype=BOOL)


def _logical(op: str) -> Converter:
    def convert(e: Emitter, node: fx.Node) -> ir.Value:
        a, b = (as_bool(e, e.operand(x)) for x in arguments(node, ("self", "other")))
        return e.build.binary(op, a, b)

    return convert


def _bitwise(op: str) -> Converter:
    def convert(e: Emitter, node: fx.Node) -> ir.Value:
        if e.dtype(node) != BOOL:
            raise e.unsupported(node, "combines the bits of integers")
        return e.build.binary(op, *_pair(e, node))

    return convert


def _shift(e: Emitter, node: fx.Node) -> ir.Value:
    a, b = arguments(node, ("self", "other"))
    if not isinstance(b, int):
        raise e.unsupported(node, "shifts by a number that is not constant")
    x, factor = e.operand(a), e.operand(1 << b, e.dtype(node))
    if op_name(node) in ("aten.bitwise_left_shift", "aten.__lshift__"):
        return e.build.binary("Mul", x, factor)
    return floor_division(e, x, factor)


def _where(e: Emitter, node: fx.Node) -> ir.Value:
    if len(node.args) < 3:
        raise e.unsupported(node, "gives indices whose number depends on the data")
    condition, a, b = node.args[:3]
    dtype = e.dtype(node)
    return e.build.where(as_bool(e, e.operand(condition)), e.operand(a, dtype), e.operand(b, dtype))


def _masked_fill(e: Emitter, node: fx.Node) -> ir.Value:
    x, mask, value = arguments(node, ("self", "mask", "value"))
    dtype = e.dtype(node)
    return e.build.where(as_bool(e, e.operand(mask)), e.operand(value, dtype), e.operand(x, dtype))


def _clamp(e: Emitter, node: fx.Node) -> ir.Value:
    x, *bounds = arguments(node, ("self", "min", "max"))
    result = e.operand(x, e.dtype(node))
    for op, bound in zip(("Max", "Min"), bounds, strict=True):
        if bound is not None and bound not in (-math.inf, math.inf):
            result = e.build.binary(op, result, e.operand(bound, e.dtype(node)))
    return result


def _clamp_min(e: Emitter, node: fx.Node) -> ir.Value:
    return e.build.binary("Max", *_pair(e, node, ("self", "min")))


def _clamp_max(e: Emitter, node: fx.Node) -> ir.Value:
    return e.build.binary("Min", *_pair(e, node, ("self", "max")))


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
    a, b = (e.build.binary("Mul", x, x) for x in _pair(e, node))
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
    "aten.logical_not": _not,
    "aten.bitwise_not": _bitwise_not,
    "aten.isinf": _is_inf,
    "aten.isfinite": _is_finite,
    "aten.isnan": _is_nan,
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
    **{
        f"aten.{name}": _comparison(op)
        for op, names in {
            "Equal": ("eq", "equal"),
            "not_equal": ("ne", "not_equal"),
            "Less": ("lt", "less"),
            "LessOrEqual": ("le", "less_equal"),
            "Greater": ("gt", "greater"),
            "GreaterOrEqual": ("ge", "greater_equal"),
        }.items()
        for name in names
        if name != "equal"  # of whole tensors: gives a Python bool
    },
    **{f"aten.logical_{name}": _logical(op) for name, op in (("and", "And"), ("or", "Or"), ("xor", "Xor"))},
    **{f"aten.bitwise_{name}": _bitwise(op) for name, op in (("and", "And"), ("or", "Or"), ("xor", "Xor"))},
    **{f"aten.__{name}__": _bitwise(op) for name, op in (("and", "And"), ("or", "Or"), ("xor", "Xor"))},
    "aten.bitwise_left_shift": _shift,
    "aten.bitwise_right_shift": _shift,
    "aten.__lshift__": _shift,
    "aten.__rshift__": _shift,
    "aten.where": _where,
    "aten.masked_fill": _masked_fill,
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
