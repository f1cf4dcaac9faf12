"""Sizes that a graph computes from the shapes of its values: known while lowering, so that they need no step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import onnx_ir as ir

from llmc.compiler.lowering.nodes import attribute
from llmc.compiler.lowering.values import Shape, View
from llmc.errors import CompileError
from llmc.runtime.plan import Dim


class Known(Protocol):
    """What has been lowered so far."""

    def is_constant(self, value: ir.Value | None) -> bool:
        """Whether a value depends on weights only."""
        ...

    def raw(self, value: ir.Value | None) -> View:
        """What a value became."""
        ...

    def sizes(self, value: ir.Value | None) -> Shape:
        """A list of sizes."""
        ...

    def known_sizes(self, value: ir.Value | None) -> Shape | None:
        """Sizes that depend on T or N, or None if the value is something else."""
        ...


def compute_sizes(node: ir.Node, known: Known) -> Shape | None:
    """The sizes that a node computes, or None if it computes something else."""
    if node.op_type == "Shape":
        shape = known.raw(node.inputs[0]).shape
        return shape[attribute(node, "start", 0) : attribute(node, "end", len(shape))]
    rule = _RULES.get(node.op_type) if node.domain == "" else None
    decisive = node.inputs if node.op_type in _OF_ALL else node.inputs[:1]
    if rule is None or all(known.known_sizes(value) is None for value in decisive):
        return None
    if any(known.known_sizes(value) is None and not known.is_constant(value) for value in node.inputs):
        raise CompileError("a number of tokens is used as data, which is not supported")
    return rule(node, known)


def _binary(function: Callable[[Dim, Dim], Dim]) -> Callable[[ir.Node, Known], Shape]:
    def rule(node: ir.Node, known: Known) -> Shape:
        a, b = (known.sizes(value) for value in node.inputs)
        count = max(len(a), len(b))
        return tuple(function(x, y) for x, y in zip(a * (count // len(a)), b * (count // len(b)), strict=True))

    return rule


def _same(node: ir.Node, known: Known) -> Shape:
    return known.sizes(node.inputs[0])


def _concat(node: ir.Node, known: Known) -> Shape:
    return tuple(size for value in node.inputs for size in known.sizes(value))


def _gather(node: ir.Node, known: Known) -> Shape:
    sizes = known.sizes(node.inputs[0])
    return tuple(sizes[index.constant] for index in known.sizes(node.inputs[1]))


def _slice(node: ir.Node, known: Known) -> Shape:
    sizes, starts, ends = (known.sizes(value) for value in node.inputs[:3])
    return sizes[starts[0].constant : ends[0].constant]


_OF_ALL = frozenset(("Add", "Sub", "Mul", "Concat"))
"""Ops of several lists of sizes; the first input of the others decides what they compute."""

_RULES: Mapping[str, Callable[[ir.Node, Known], Shape]] = {
    "Add": _binary(lambda a, b: a + b),
    "Sub": _binary(lambda a, b: a + b * -1),
    "Mul": _binary(lambda a, b: a * b),
    "Cast": _same,
    "Concat": _concat,
    "Gather": _gather,
    "Identity": _same,
    "Reshape": _same,
    "Slice": _slice,
    "Squeeze": _same,
    "Unsqueeze": _same,
}
