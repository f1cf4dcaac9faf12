"""Matrix products: with a weight they are linear steps, between activations matmul steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

import onnx_ir as ir

from llmc.compiler import weights
from llmc.compiler.lowering.builder import Builder, Rule, broadcast_shape
from llmc.compiler.lowering.elementwise import Formula, binary
from llmc.compiler.lowering.nodes import attribute
from llmc.compiler.lowering.reductions import reduce, refuse_tokens
from llmc.compiler.lowering.values import ONE, View, product, show
from llmc.compiler.weights import WeightSource
from llmc.errors import CompileError
from llmc.runtime.plan import Dim

MAX_MATRICES = 4096
"""Weights of more than two axes become one linear step for each matrix, up to so many."""


def linear(
    builder: Builder, x: View, weight: WeightSource, name: str, bias: View | None, out: View | None = None
) -> View:
    """X [..., K] times the transpose of weight [N, K], plus bias [N]."""
    count, width = weight.shape
    if x.shape[-1] != Dim(width):
        raise CompileError(f"linear of {show(x.shape)} with a weight of {list(weight.shape)}")
    y = out if out is not None else builder.allocate([*x.shape[:-1], Dim(count)], "float32")
    rows = y.collapse(2)
    assert rows is not None, "the result of a linear is rows of one stride"
    builder.emit("linear", [builder.rows(x), builder.packed(weight, name), bias], [rows])
    return y


def _llmc_linear(builder: Builder, node: ir.Node) -> Sequence[View]:
    x, weight, bias = builder.view(node.inputs[0]), node.inputs[1], builder.optional(node, 2)
    if bias is not None:
        bias = builder.vector(bias)
    if builder.is_constant(weight):
        assert weight is not None
        return [linear(builder, x, builder.constants.source(weight), weight.name or "weight", bias)]
    w = builder.view(weight)
    y = matmul(builder, x, w.transpose([1, 0]))
    return [y if bias is None else binary(builder, "add", y, bias)]


def matmul(builder: Builder, a: View, b: View) -> View:
    """[..., M, K] @ [..., K, N] of activations."""
    if a.shape[-1] != b.shape[-2]:
        raise CompileError(f"matmul of {show(a.shape)} and {show(b.shape)}")
    lead = broadcast_shape([a.shape[:-2], b.shape[:-2]])
    y = builder.allocate([*lead, a.shape[-2], b.shape[-1]], "float32")
    views = [a.expand([*lead, *a.shape[-2:]]), b.expand([*lead, *b.shape[-2:]]), y]
    while views[0].rank > 2 and all(view.shape[0] == ONE for view in views):
        views = [view.squeeze([0]) for view in views]
    builder.emit("matmul", views[:2], views[2:])
    return y


def _matmul(builder: Builder, node: ir.Node) -> Sequence[View]:
    a, weight = builder.view(node.inputs[0]), node.inputs[1]
    source = builder.constants.source(weight) if builder.is_constant(weight) and weight is not None else None
    name = (weight.name if weight is not None else None) or "weight"
    if source is not None and len(source.shape) == 2 and a.rank >= 2:
        return [linear(builder, a, weights.Transpose(source, (1, 0)), name, None)]
    if source is not None and len(source.shape) > 2 and a.rank >= 2 and prod(source.shape[:-2]) <= MAX_MATRICES:
        return [_matmul_weights(builder, a, source, name)]
    b = builder.view(weight)
    if a.rank == 1 and b.rank == 1:
        return [matmul(builder, a.unsqueeze([0]), b.unsqueeze([1])).squeeze([0, 1])]
    if a.rank == 1:
        y = matmul(builder, a.unsqueeze([0]), b)
        return [y.squeeze([y.rank - 2])]
    if b.rank == 1:
        y = matmul(builder, a, b.unsqueeze([1]))
        return [y.squeeze([y.rank - 1])]
    return [matmul(builder, a, b)]


def _matmul_weights(builder: Builder, a: View, source: WeightSource, name: str) -> View:
    """A [..., M, K] @ weights [E, ..., K, N]: a linear for each matrix."""
    lead = broadcast_shape([a.shape[:-2], tuple(Dim(size) for size in source.shape[:-2])])
    refuse_tokens(a, range(a.rank - 2))
    k, n = source.shape[-2:]
    y = builder.allocate([*lead, a.shape[-2], Dim(n)], "float32")
    flat_y = y.reshape([product(lead), *y.shape[-2:]])
    assert flat_y is not None, "a new buffer is contiguous"
    flat_a = builder.reshape(a.expand([*lead, *a.shape[-2:]]), [product(lead), *a.shape[-2:]])
    matrices = weights.Reshape(source, (prod(source.shape[:-2]), k, n))
    which = _broadcast_positions(source.shape[:-2], [size.constant for size in lead])
    for row, matrix in enumerate(which):
        one = weights.Reshape(weights.Slice(matrices, (slice(matrix, matrix + 1),)), (k, n))
        view = weights.Transpose(one, (1, 0))
        linear(builder, flat_a.select(0, row), view, f"{name}.{matrix}", None, flat_y.select(0, row))
    return y


def _broadcast_positions(shape: Sequence[int], lead: Sequence[int]) -> list[int]:
    """For each position of the broadcast shape, which matrix stands there."""
    positions = [0]
    padded = [1] * (len(lead) - len(shape)) + list(shape)
    for size, wanted in zip(padded, lead, strict=True):
        positions = [p * size + (i if size > 1 else 0) for p in positions for i in range(wanted)]
    return positions


def _gemm(builder: Builder, node: ir.Node) -> Sequence[View]:
    a, weight, bias = builder.view(node.inputs[0]), node.inputs[1], builder.optional(node, 2)
    f = Formula(builder)
    alpha, beta = attribute(node, "alpha", 1.0), attribute(node, "beta", 1.0)
    if attribute(node, "transA", 0):
        a = a.transpose([1, 0])
    if alpha != 1:
        a = f("mul", a, alpha)
    if bias is not None and beta != 1:
        bias = f("mul", bias, beta)
    transposed = bool(attribute(node, "transB", 0))
    if builder.is_constant(weight) and weight is not None:
        source = builder.constants.source(weight)
        if not transposed:
            source = weights.Transpose(source, (1, 0))
        fits = bias is not None and bias.shape[-1:] == (Dim(source.shape[0]),) and product(bias.shape) == bias.shape[-1]
        inner = builder.vector(bias) if fits and bias is not None else None
        y = linear(builder, a, source, weight.name or "weight", inner)
        return [y if bias is None or inner is not None else f("add", y, bias)]
    b = builder.view(weight)
    y = matmul(builder, a, b.transpose([1, 0]) if transposed else b)
    return [y if bias is None else f("add", y, bias)]


def _einsum(builder: Builder, node: ir.Node) -> Sequence[View]:
    """Two operands: shared labels that stay are leading axes, those that go are summed by a matmul."""
    equation = attribute(node, "equation").replace(" ", "")
    left, _, out = equation.partition("->")
    terms = left.split(",")
    plain = all(len(set(term)) == len(term) and term.isalpha() for term in (*terms, out) if term)
    if len(terms) != 2 or "->" not in equation or not plain:
        raise CompileError(f"Einsum {equation!r} is not supported")
    views = [builder.view(value) for value in node.inputs]
    for i, (term, other) in enumerate(zip(terms, terms[::-1], strict=True)):
        alone = [axis for axis, label in enumerate(term) if label not in other + out]
        if alone:
            views[i] = reduce(builder, "sum", views[i], alone)
            terms[i] = "".join(label for label in term if label in other + out)
    sizes = dict(zip("".join(terms), (*views[0].shape, *views[1].shape), strict=True))
    batch = [label for label in terms[0] if label in terms[1] and label in out]
    summed = [label for label in terms[0] if label in terms[1] and label not in out]
    rows = [label for label in terms[0] if label not in terms[1]]
    columns = [label for label in terms[1] if label not in terms[0]]

    def arranged(i: int, first: list[str], second: list[str]) -> View:
        view = views[i].transpose([terms[i].index(label) for label in (*batch, *first, *second)])
        parts = [product(sizes[label] for label in group) for group in (first, second)]
        return builder.reshape(view, [*(sizes[label] for label in batch), *parts])

    y = matmul(builder, arranged(0, rows, summed), arranged(1, summed, columns))
    order = [*batch, *rows, *columns]
    y = builder.reshape(y, [sizes[label] for label in order])
    return [y.transpose([order.index(label) for label in out])]


def _llmc_matmul(builder: Builder, node: ir.Node) -> Sequence[View]:
    return [matmul(builder, builder.view(node.inputs[0]), builder.view(node.inputs[1]))]


RULES: Mapping[str, Rule] = {
    "MatMul": _matmul,
    "Gemm": _gemm,
    "Einsum": _einsum,
    "llmc::linear": _llmc_linear,
    "llmc::matmul": _llmc_matmul,
}
