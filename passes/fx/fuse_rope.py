"""Rotary embeddings, however they are spelled -> llmc::rope."""

import hashlib
import math
from collections.abc import Sequence

import torch
from torch import Tensor, fx

from llmc.passes.fx.base import MAX_SEQ_LEN, FxPass
from llmc.passes.fx.evaluate import Evaluator, classify
from llmc.passes.fx.nodes import add_buffer, call, get_attr, is_dynamic, position_rows, replace, tensor
from llmc.passes.fx.rope_regions import Region, find_regions, token_axis
from llmc.passes.fx.rope_tables import Rope, Rotation, explains, find_rope, sample_positions

aten = torch.ops.aten
MAX_SIZE = 2048
"""Of a head: more are no rotary embedding."""


class FuseRope(FxPass):
    """A region that is linear in one tensor, with coefficients made from positions -> llmc::rope.

    1. The region is one of rope_regions.py.
    2. Its input and output have one axis of tokens, as many heads, and the width of a head last.
    3. Evaluated, each output is a sum of at most two scaled inputs (rope_tables.py).
    """

    runs_after = ("CleanUp", "UsePositions")

    def call(self, module: fx.GraphModule) -> bool:
        """See FxPass."""
        regions = list(find_regions(module.graph, classify(module)))
        if not regions:
            return False
        fuser = _Fuser(module)
        # Those with the fewest heads first: a table found for the keys is soon seen to fit the queries.
        changed = [fuser.fuse(region) for region in sorted(regions, key=_elements)]
        module.graph.eliminate_dead_code()
        return any(changed)


class _Fuser:
    """Fuses regions of one module, and remembers the ropes that it found."""

    def __init__(self, module: fx.GraphModule) -> None:
        self._module = module
        self._count = int(module.meta[MAX_SEQ_LEN])
        self._sample = sample_positions(self._count)
        self._evaluator = Evaluator(module, self._sample)
        self._known: dict[frozenset[fx.Node], list[Rope]] = {}
        self._names: dict[tuple[bytes, ...], tuple[str, str, str]] = {}
        self._done: set[fx.Node] = set()

    def fuse(self, region: Region) -> bool:
        for y in region.outputs:
            if y in self._done:
                return False
            for x in region.inputs:
                rope = self._match(x, y, region)
                if rope is not None:
                    self._rewrite(x, y, rope)
                    self._done.add(y)
                    return True
        return False

    def _match(self, x: fx.Node, y: fx.Node, region: Region) -> Rope | None:
        x_axis, y_axis, x_value, y_value = token_axis(x), token_axis(y), tensor(x), tensor(y)
        if x_axis is None or y_axis is None or x_value is None or y_value is None:
            return None
        heads, size = math.prod(_others(x_value, x_axis)), int(x_value.shape[-1])
        if math.prod(_others(y_value, y_axis)) != heads or not 0 < size <= MAX_SIZE:
            return None
        rotate = self._rotation(x, y, x_axis, y_axis)
        known = self._known.setdefault(region.positions, [])
        for rope in known:
            fits = int(rope.index[[0, 2]].max()) < size and rope.index.shape[1] == y_value.shape[-1]
            if fits and explains(rope, rotate, heads, size, self._sample):
                return rope
        found = find_rope(rotate, heads, size, self._sample, self._count)
        if found is not None:
            known.append(found)
        return found

    def _rotation(self, x: fx.Node, y: fx.Node, x_axis: int, y_axis: int) -> Rotation:
        """The region as a function of x [T, H, D]."""
        x_value, y_value = tensor(x), tensor(y)
        assert x_value is not None and y_value is not None
        others, width = _others(x_value, x_axis), y_value.shape[-1]

        def rotate(rows: Tensor, positions: Tensor) -> Tensor:
            at_sample = positions is self._sample
            evaluator = self._evaluator if at_sample else Evaluator(self._module, positions)
            given = rows.reshape(len(positions), *others, rows.shape[-1]).movedim(0, x_axis).contiguous()
            result = evaluator.run(y, {x: given})
            assert isinstance(result, Tensor)
            return result.movedim(y_axis, 0).reshape(len(positions), -1, width)

        return rotate

    def _rewrite(self, x: fx.Node, y: fx.Node, rope: Rope) -> None:
        graph = self._module.graph
        constants = [get_attr(self._module, name, x) for name in self._buffers(rope)]
        positions = position_rows(self._module)
        x_axis, y_axis, x_value, y_value = token_axis(x), token_axis(y), tensor(x), tensor(y)
        assert x_axis is not None and y_axis is not None and x_value is not None and y_value is not None
        heads = math.prod(_others(x_value, x_axis))
        with graph.inserting_before(y):
            rows = _permuted(graph, x, x_axis, 0, y)
            rows = _reshaped(graph, rows, (heads, int(x_value.shape[-1])), y)
            rotated = call(graph, torch.ops.llmc.rope.default, (rows, positions, *constants), y)
            result = _reshaped(graph, rotated, (*_others(y_value, y_axis), int(y_value.shape[-1])), y)
            result = _permuted(graph, result, 0, y_axis, y)
        replace(y, result)

    def _buffers(self, rope: Rope) -> tuple[str, str, str]:
        parts = (rope.table, rope.index, rope.sign)
        key = tuple(hashlib.sha256(part.numpy().data).digest() for part in parts)
        if key not in self._names:
            table, index, sign = (
                next((n for n, b in self._module.named_buffers() if n.startswith(stem) and torch.equal(b, part)), None)
                or add_buffer(self._module, stem, part)
                for stem, part in zip(("rope_table", "rope_index", "rope_sign"), parts, strict=True)
            )
            self._names[key] = (table, index, sign)
        return self._names[key]


def _elements(region: Region) -> int:
    """Of one token."""
    found = tensor(region.outputs[0])
    assert found is not None, "regions end in a tensor"
    return math.prod(int(size) for size in found.shape if not is_dynamic(size))


def _others(value: Tensor, axis: int) -> list[int]:
    """The sizes but those of the token axis and of the last."""
    return [int(size) for i, size in enumerate(value.shape[:-1]) if i != axis]


def _permuted(graph: fx.Graph, node: fx.Node, source: int, target: int, like: fx.Node) -> fx.Node:
    if source == target:
        return node
    found = tensor(node)
    assert found is not None
    order = list(range(found.dim()))
    order.insert(target, order.pop(source))
    result = call(graph, aten.permute.default, (node, order), like)
    assert isinstance(result, fx.Node)
    return result


def _reshaped(graph: fx.Graph, node: fx.Node, sizes: Sequence[int], like: fx.Node) -> fx.Node:
    """[T, ...] -> [T, *sizes]."""
    found = tensor(node)
    assert found is not None
    if tuple(found.shape[1:]) == tuple(sizes):
        return node
    result = call(graph, aten.reshape.default, (node, [-1, *sizes]), like)
    assert isinstance(result, fx.Node)
    return result
