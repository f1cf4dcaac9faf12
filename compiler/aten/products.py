"""Matrix products: with a weight they become llmc::linear, of two activations MatMul."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import onnx_ir as ir
from torch import fx

from llmc.compiler.graph_builder import FLOAT, ONE, dims_of
from llmc.passes.fx.nodes import arguments

if TYPE_CHECKING:
    from llmc.compiler.graph import Converter, Emitter


def _linear(e: Emitter, node: fx.Node) -> ir.Value:
    x, weight, bias = arguments(node, ("input", "weight", "bias"))
    if not e.is_weight(weight):  # computed by the graph: hardly a weight, but the same product
        product = e.build.matmul(e.operand(x, FLOAT), e.build.transpose(e.operand(weight, FLOAT), [1, 0]))
        return product if bias is None else e.build.binary("Add", product, e.operand(bias, FLOAT))
    return e.build.linear(e.operand(x, FLOAT), e.stored(weight), None if bias is None else e.operand(bias, FLOAT))


def _product(e: Emitter, a: Any, b: Any, bias: ir.Value | None = None) -> ir.Value:
    """torch.matmul of two nodes, plus a bias for each column."""
    weight = _transposed_weight(e, a, b)
    if weight is not None:
        return e.build.linear(e.operand(a, FLOAT), weight, bias)
    product = _matmul(e, e.operand(a, FLOAT), e.operand(b, FLOAT))
    return product if bias is None else e.build.binary("Add", product, bias)


def _transposed_weight(e: Emitter, a: Any, b: Any) -> ir.Value | None:
    """The second factor as llmc::linear takes it, if it is a matrix of weights."""
    if not e.is_weight(b):
        return None
    weight = e.stored(b)
    lead = len(dims_of(weight)) - 2
    if lead < 0 or any(dim != ONE for dim in dims_of(weight)[:lead]) or len(dims_of(e.stored(a))) < lead + 2:
        return None
    return e.build.transpose(e.build.squeeze(weight, *range(lead)), [1, 0])


def _matmul(e: Emitter, a: ir.Value, b: ir.Value) -> ir.Value:
    """As torch.matmul, vectors included."""
    rank_a, rank_b = len(dims_of(a)), len(dims_of(b))
    wide_a = e.build.unsqueeze(a, 0) if rank_a == 1 else a
    wide_b = e.build.unsqueeze(b, 1) if rank_b == 1 else b
    y = e.build.matmul(wide_a, wide_b)
    gone = ([-2] if rank_a == 1 else []) + ([-1] if rank_b == 1 else [])
    return e.build.squeeze(y, *gone) if gone else y


def _matmul_converter(e: Emitter, node: fx.Node) -> ir.Value:
    a, b = node.args[:2]
    return _product(e, a, b)


def _addmm(e: Emitter, node: fx.Node) -> ir.Value:
    """A product times alpha, plus a bias times beta. The Conv1D of GPT-2 is one of these, with a weight [in, out]."""
    added, a, b = node.args[:3]
    beta, alpha = arguments(node, ("beta", "alpha"))
    bias = e.operand(added, FLOAT)
    if alpha == 1 and beta == 1 and len(dims_of(bias)) == 1:
        return _product(e, a, b, bias)
    product = _product(e, a, b)
    if alpha != 1:
        product = e.build.binary("Mul", product, e.operand(float(alpha), FLOAT))
    if beta == 0:
        return product
    return e.build.binary("Add", product, e.build.binary("Mul", bias, e.operand(float(beta), FLOAT)))


def _outer(e: Emitter, node: fx.Node) -> ir.Value:
    a, b = (e.operand(x, e.dtype(node)) for x in node.args[:2])
    return e.build.binary("Mul", e.build.unsqueeze(a, 1), e.build.unsqueeze(b, 0))


def _attention(e: Emitter, node: fx.Node) -> ir.Value:
    raise e.unsupported(node, "is attention that does not go through transformers' attention interface")


def _convolution(e: Emitter, node: fx.Node) -> ir.Value:
    """A convolution of width 1 is a linear; any other mixes tokens, whose past is not in the graph."""
    x, weight, bias, groups = arguments(node, ("input", "weight", "bias", "groups"))
    kernel = [int(size) for size in weight.meta["val"].shape[2:]]
    if math.prod(kernel) != 1 or groups != 1 or len(kernel) != 1 or not e.is_weight(weight):
        raise e.unsupported(node, f"is a convolution of width {kernel} with {groups} groups over the tokens")
    rows = e.build.transpose(e.operand(x, FLOAT), [0, 2, 1])
    flat = e.build.squeeze(e.stored(weight), 2)
    y = e.build.linear(rows, flat, None if bias is None else e.operand(bias, FLOAT))
    return e.build.transpose(y, [0, 2, 1])


CONVERTERS: dict[str, Converter] = {
    "aten.linear": _linear,
    **{f"aten.{name}": _matmul_converter for name in ("matmul", "mm", "bmm", "mv", "dot")},
    **{f"aten.{name}": _addmm for name in ("addmm", "baddbmm", "addmv")},
    **{f"aten.{name}": _outer for name in ("outer", "ger")},
    **{
        f"aten.{name}": _attention
        for name in ("scaled_dot_product_attention", "_scaled_dot_product_flash_attention_for_cpu")
    },
    **{f"aten.{name}": _convolution for name in ("conv1d", "convolution")},
}
