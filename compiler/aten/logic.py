"""Comparisons, booleans, and choices that they make."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import onnx_ir as ir
import torch
from torch import Tensor, fx

from llmc.compiler.aten.operands import floor_division, pair
from llmc.compiler.graph_builder import BOOL, FLOAT, INT64
from llmc.passes.fx.nodes import arguments, op_name

if TYPE_CHECKING:
    from llmc.compiler.graph import Converter, Emitter


def as_bool(e: Emitter, x: ir.Value) -> ir.Value:
    """Whether it is not zero."""
    if x.dtype == BOOL:
        return x
    return e.build.function("not_equal", x, e.operand(0, x.dtype), dtype=BOOL)


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


def _logical(op: str) -> Converter:
    def convert(e: Emitter, node: fx.Node) -> ir.Value:
        a, b = (as_bool(e, e.operand(x)) for x in arguments(node, ("self", "other")))
        return e.build.binary(op, a, b)

    return convert


def _bitwise(op: str) -> Converter:
    def convert(e: Emitter, node: fx.Node) -> ir.Value:
        if e.dtype(node) != BOOL:
            raise e.unsupported(node, "combines the bits of integers")
        return e.build.binary(op, *pair(e, node))

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


CONVERTERS: dict[str, Converter] = {
    "aten.logical_not": _not,
    "aten.bitwise_not": _bitwise_not,
    "aten.isinf": _is_inf,
    "aten.isfinite": _is_finite,
    "aten.isnan": _is_nan,
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
}
