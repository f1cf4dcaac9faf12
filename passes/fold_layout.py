"""Chains of ops that only rearrange -> the fewest that do the same."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import onnx_ir as ir

from llmc.passes.base import GraphPass, Stage

LAYOUT = ("Reshape", "Transpose", "Squeeze", "Unsqueeze")
SYMBOLS = {"T": 1_000_003, "N": 999_983}
"""Primes that stand for the sizes that change: a size is a multiple of T if and only if its number is one of this."""


class FoldLayout(GraphPass):
    """x -> Reshape, Transpose, Squeeze and Unsqueeze in any number -> y becomes at most Reshape, Transpose, Reshape.

    1. Nothing at all, if x has the shape of y and no axes changed places.
    2. One Reshape, if no axes changed places.
    3. Otherwise a Transpose of axes that are split and merged no more than needed, if that takes fewer nodes.
    """

    stage: ClassVar[Stage] = Stage.CLEAN_UP

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """See onnx_ir."""
        changed = False
        for node in list(model.graph):
            if node.op_type in LAYOUT and node.domain == "" and _ends_chain(node):
                changed |= _try_fold(model.graph, node)
        return ir.passes.PassResult(model, modified=changed)


@dataclass
class _Axes:
    """How the axes of a value are made of pieces of the axes of another one."""

    sizes: dict[int, int]
    """piece -> its size."""
    order: list[int]
    """All pieces, as they lie in the other value."""
    groups: list[list[int]]
    """For each axis, its pieces."""

    @staticmethod
    def of(shape: list[int]) -> _Axes:
        sizes = {i: size for i, size in enumerate(shape) if size != 1}
        return _Axes(sizes, list(sizes), [[i] if i in sizes else [] for i in range(len(shape))])

    def reshape(self, shape: list[int]) -> bool:
        """Regroup for a new shape, splitting pieces where it has to be; False if that can't be said."""
        rest = [piece for group in self.groups for piece in group]
        groups: list[list[int]] = []
        for size in shape:
            group: list[int] = []
            while size != 1:
                if not rest:
                    return False
                piece = rest.pop(0)
                if size % self.sizes[piece]:
                    inner = self._split(piece, size)
                    if inner is None:
                        return False
                    rest.insert(0, inner)
                size //= self.sizes[piece]
                group.append(piece)
            groups.append(group)
        self.groups = groups
        return not rest

    def _split(self, piece: int, outer: int) -> int | None:
        """Leave ``outer`` of a piece, and make its rest a piece behind it."""
        if self.sizes[piece] % outer:
            return None
        inner = max(self.sizes) + 1
        self.sizes[inner], self.sizes[piece] = self.sizes[piece] // outer, outer
        self.order.insert(self.order.index(piece) + 1, inner)
        return inner

    def runs(self) -> list[list[int]]:
        """The pieces in their new order, with those together that are neighbours in the old one, too."""
        following = dict(zip(self.order, self.order[1:], strict=False))
        runs: list[list[int]] = []
        for piece in (piece for group in self.groups for piece in group):
            if runs and following.get(runs[-1][-1]) == piece:
                runs[-1].append(piece)
            else:
                runs.append([piece])
        return runs


def _ends_chain(node: ir.Node) -> bool:
    value = node.outputs[0]
    readers = [use.node for use in value.uses()]
    return value.is_graph_output() or any(r.op_type not in LAYOUT or r.domain != "" for r in readers)


def _try_fold(graph: ir.Graph, last: ir.Node) -> bool:
    chain = [last]
    while (before := chain[-1].inputs[0]) is not None and (node := before.producer()) is not None:
        if node.op_type not in LAYOUT or node.domain != "":
            break
        chain.append(node)
    chain.reverse()
    x, y = chain[0].inputs[0], last.outputs[0]
    axes = None if x is None else _compose(x, chain)
    plan = None if x is None or axes is None else _plan(x, y, axes)
    if x is None or plan is None or len(plan) >= len(chain) or (not plan and y.is_graph_output()):
        return False
    _replace(graph, x, last, plan)
    for node in reversed(chain):
        if not node.outputs[0].uses() and not node.outputs[0].is_graph_output():
            graph.remove(node, safe=True)
    return True


def _compose(x: ir.Value, chain: list[ir.Node]) -> _Axes | None:
    shape = _numbers(x)
    if shape is None:
        return None
    axes = _Axes.of(shape)
    for node in chain:
        target = _numbers(node.outputs[0])
        if target is None:
            return None
        if node.op_type == "Transpose":
            axes.groups = [axes.groups[i] for i in node.attributes["perm"].as_ints()]
        elif not axes.reshape(target):
            return None
    return axes


def _plan(x: ir.Value, y: ir.Value, axes: _Axes) -> list[tuple[str, list[int]]] | None:
    """(Reshape, sizes) and (Transpose, order) that make y of x; None where sizes can't be said."""
    before, after = _numbers(x), _numbers(y)
    assert before is not None and after is not None, "composed before"
    runs = axes.runs()
    if [piece for run in runs for piece in run] == axes.order:
        return [] if before == after else [("Reshape", after)]
    old = sorted(runs, key=lambda run: axes.order.index(run[0]))
    split = [math.prod(axes.sizes[piece] for piece in run) for run in old]
    if any(_symbol(size) is None for size in split):  # part of the tokens and something else
        return None
    order = [old.index(run) for run in runs]
    moved = [split[i] for i in order]
    plan = [("Reshape", split)] if split != before else []
    plan.append(("Transpose", order))
    return plan + ([("Reshape", after)] if moved != after else [])


def _replace(graph: ir.Graph, x: ir.Value, last: ir.Node, plan: list[tuple[str, list[int]]]) -> None:
    y, current = last.outputs[0], x
    numbers = _numbers(x)
    assert numbers is not None, "composed before"
    for i, (op, argument) in enumerate(plan):
        if op == "Reshape":
            node = ir.node(op, [current, _sizes(graph, argument)])
            numbers = argument
        else:
            node = ir.node(op, [current], {"perm": argument})
            numbers = [numbers[axis] for axis in argument]
        node.metadata_props.update(last.metadata_props)
        made = node.outputs[0]
        made.type, made.name = y.type, f"{y.name}.{i}"
        if i + 1 == len(plan):
            made.shape = y.shape
            made.meta.update(y.meta)
        else:
            made.shape = ir.Shape([_symbol(number) for number in numbers])
        graph.insert_before(last, node)
        current = made
    name = y.name
    ir.convenience.replace_all_uses_with(y, current, replace_graph_outputs=True)
    if plan:
        y.name, current.name = None, name


def _sizes(graph: ir.Graph, numbers: list[int]) -> ir.Value:
    """The target of a Reshape; one size that changes is -1."""
    sizes = [-1 if isinstance(_symbol(number), str) or _symbol(number) is None else number for number in numbers]
    name = f"_sizes.{'_'.join(map(str, sizes))}"
    if name not in graph.initializers:
        tensor = ir.tensor(np.array(sizes, np.int64), name=name)
        graph.register_initializer(
            ir.Value(
                name=name, type=ir.TensorType(tensor.dtype), shape=ir.Shape(tensor.shape.numpy()), const_value=tensor
            )
        )
    return graph.initializers[name]


def _numbers(value: ir.Value) -> list[int] | None:
    """The shape with numbers for T and N; None if a size is neither a number nor a multiple of one of them."""
    if value.shape is None:
        return None
    numbers = []
    for size in value.shape:
        factor, _, symbol = str(size if isinstance(size, int) else size.value).rpartition("*")
        if isinstance(size, int):
            numbers.append(size)
        elif symbol in SYMBOLS and (not factor or factor.isdigit()):
            numbers.append(int(factor or 1) * SYMBOLS[symbol])
        else:
            return None
    return numbers if numbers.count(0) == 0 else None


def _symbol(number: int) -> int | str | None:
    """The size that a number stands for; None for multiples of T and N, which have no name."""
    for symbol, prime in SYMBOLS.items():
        if number == prime:
            return symbol
        if number % prime == 0:
            return None
    return number
