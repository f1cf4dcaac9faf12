"""Where the factors of an input can go: into the norm, the linear or the attention's values that the input comes from.

A method may want the columns of a weight multiplied by factors s. Then what arrives has to be divided by s, which
costs nothing if the step before can do it:

    norm, add_norm          weight (offset respected) and bias are divided
    glu                     the rows of up, in the linear that makes it, and its bias
    paged_attention         the rows of the values, in the linear that makes them; the heads of a group share factors

Everything that reads the input has to be scaled alike, linears that stay as they are too (a router).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmc.compiler import weights
from llmc.compiler.lower import LoweredGraph
from llmc.compiler.lowering.builder import LoweredStep, PackedWeight
from llmc.compiler.lowering.values import ONE, Buffer, View, product
from llmc.compiler.quantize.interpreter import strided
from llmc.compiler.quantize.sites import weight_view
from llmc.compiler.safetensors_writer import Tensor
from llmc.compiler.weights import Array, Cast, Elementwise, WeightSource
from llmc.runtime.plan import Storage

Factors = NDArray[np.float32]

NORM_WEIGHT = {"norm": 1, "add_norm": 2}
"""Which input of a norm is its weight; its bias follows."""


@dataclass(frozen=True)
class Producer:
    """What makes an input, and how its channels are found there.

    ``tie`` [K]: channels with the same number have to have the same factor; None: each has its own. ``rows`` [K]: the
    row of the linear ``step`` that makes each channel (not for norms).
    """

    kind: str
    step: int
    rows: NDArray[np.int64] | None = None
    tie: NDArray[np.int64] | None = None


@dataclass(frozen=True, eq=False)
class Scaled(Elementwise):
    """A weight [rows, columns], or [experts, rows, columns]: columns multiplied, rows divided.

    Factors are [rows] and [columns], or with the experts in front.
    """

    row_divisors: Factors | None
    column_factors: Factors | None

    def rows(self, start: int, stop: int) -> NDArray[Any]:
        """Rows, or experts."""
        values = self.source.rows(start, stop).astype(np.float32)
        stacked = values.ndim == 3
        if (columns := self.column_factors) is not None:
            values *= columns[start:stop, None] if columns.ndim == 2 else columns
        if (rows := self.row_divisors) is not None:
            values /= rows[start:stop, :, None] if stacked else rows[start:stop, None]
        return values


class Folding:
    """Collects what is to be scaled, and makes the graph with all of it."""

    def __init__(self, graph: LoweredGraph) -> None:
        self._graph = graph
        self._writers: dict[Buffer, list[int]] = defaultdict(list)
        self._readers: dict[Buffer, list[int]] = defaultdict(list)
        for number, step in enumerate(graph.steps):
            for view in step.outputs:
                self._writers[view.buffer].append(number)
            for buffer in {view.buffer for view in step.inputs if view is not None}:
                self._readers[buffer].append(number)
        self._vectors: dict[tuple[int, int], Factors] = {}
        self.rows: dict[str, Factors] = {}
        """Divisors of the rows of weights, and in ``columns`` factors of their columns, by their names."""
        self.columns: dict[str, Factors] = {}
        self.touched: set[str] = set()
        """Names of the weights that differ from the checkpoint's, but for the quantized ones."""

    def readers_of(self, x: View) -> list[int]:
        """The products that read exactly this input."""
        return [n for n in self._readers[x.buffer] if _product_input(self._graph.steps[n], x)]

    def find(self, x: View) -> Producer | str:
        """What makes an input, or why factors can't be folded into it."""
        return self._find(x, set(self.readers_of(x)))

    def divide(self, producer: Producer, scale: Factors) -> None:
        """Let a producer give its output divided by factors [K]."""
        step = self._graph.steps[producer.step]
        if producer.kind == "norm":
            self._divide_norm(producer.step, step, scale)
            return
        assert producer.rows is not None and step.inputs[1] is not None, "rows of a linear"
        name = step.inputs[1].buffer.name
        count = self._source(name).shape[0]
        divisors = np.ones(count, np.float32)
        divisors[producer.rows] = scale
        self.rows[name] = self.rows.get(name, np.ones(count, np.float32)) * divisors
        if len(step.inputs) > 2 and step.inputs[2] is not None:
            bias = self._vector(producer.step, 2)
            assert bias is not None, "checked above"
            self._vectors[producer.step, 2] = bias / divisors

    def multiply(self, name: str, scale: Factors) -> None:
        """Multiply the columns of a weight: [K], or [experts, K]."""
        assert name not in self.columns, f"{name} has one input"
        self.columns[name] = np.asarray(scale, np.float32)

    def divide_expert_rows(self, number: int, divisors: Factors) -> None:
        """Divide the rows of gate_up [experts, rows] of a moe step, and its bias."""
        step = self._graph.steps[number]
        assert step.inputs[3] is not None, "moe has gate_up"
        self.rows[step.inputs[3].buffer.name] = np.asarray(divisors, np.float32)
        bias = self._vector(number, 5) if len(step.inputs) > 5 else None
        if bias is not None:
            self._vectors[number, 5] = bias / divisors

    def apply(self) -> LoweredGraph:
        """The graph with everything that was asked for."""
        made: dict[str, Tensor] = dict(self._graph.weights)
        for name in sorted({*self.rows, *self.columns}):
            weight = self._graph.weights[name]
            assert isinstance(weight, PackedWeight), "a weight of the checkpoint"
            scaled = Scaled(self._source(name), self.rows.get(name), self.columns.get(name))
            made[name] = replace(weight, source=Cast(scaled, weight.dtype))
            self.touched.add(name)
        steps = list(self._graph.steps)
        for (number, index), vector in sorted(self._vectors.items()):
            step = steps[number]
            old = step.inputs[index] if index < len(step.inputs) else None
            stem = old.buffer.name if old is not None else f"{step.module or step.op}.scale"
            shared = old is None or len(self._readers[old.buffer]) > 1 or _count(step, old.buffer) > 1
            name = _unique(f"{stem}.scaled" if shared else stem, made) if shared else stem
            made[name] = weight = PackedWeight(name, Array(vector.astype(np.float32)))
            self.touched.add(name)
            steps[number] = _with_input(step, index, weight_view(weight))
        return replace(self._graph, steps=steps, weights=made)

    # ------------------------------------------------------------------------------------------------ finding
    def _find(self, x: View, readers: set[int]) -> Producer | str:
        """The same for a value that only ``readers`` may read."""
        writers = self._writers[x.buffer]
        if len(writers) != 1:
            return "it is put together by several steps"
        if others := sorted({self._graph.steps[n].op for n in set(self._readers[x.buffer]) - readers}):
            return f"it is also read by {', '.join(others)}"
        if x.buffer is self._graph.logits.buffer:
            return "it is what the model returns"
        number = writers[0]
        step = self._graph.steps[number]
        if step.op in NORM_WEIGHT:
            return self._find_norm(number, step, x)
        if step.op == "glu":
            return self._find_rows("glu", number, step.inputs[1], step.outputs[0], x)
        if step.op == "paged_attention":
            return self._find_values(number, step, x)
        picked = _rows_of(step.inputs[0], step.outputs[0], x) if step.op == "gather" else None
        if picked is not None:  # some rows of a value, all of its channels
            return self._find(picked, {number})
        return f"it is made by {step.attributes.get('function', step.op)}"

    def _find_norm(self, number: int, step: LoweredStep, x: View) -> Producer | str:
        y, index = step.outputs[-1], NORM_WEIGHT[step.op]
        scales = [view for view in step.inputs[index : index + 2] if view is not None]
        if not same_elements(x, y) or any(view.rank != 1 for view in scales):
            return "its channels are not those of the norm"
        return Producer("norm", number)

    def _find_rows(self, kind: str, number: int, part: View | None, y: View, x: View) -> Producer | str:
        """Channels that a linear makes, at ``part`` of its output: [T, K], one behind the other."""
        if part is None or not same_elements(x, y):
            return f"its channels are not those of {kind}"
        found = self._linear_rows(part, number)
        if isinstance(found, str):
            return found
        linear, first, strides = found
        if strides != (1,):
            return f"the channels of {kind} are not neighbouring rows"
        return Producer(kind, linear, np.arange(first, first + x.shape[1].constant))

    def _find_values(self, number: int, step: LoweredStep, x: View) -> Producer | str:
        y, v = step.outputs[0], step.inputs[2]
        assert v is not None, "attention has values"
        slot = step.attributes["slot"]
        users = [s for s in self._graph.steps if s.op == "paged_attention" and s.attributes["slot"] == slot]
        if len(users) > 1:
            return "its values are read by several attention ops"
        merged = y.reshape([y.shape[0], y.shape[1] * y.shape[2]])
        if merged is None or not same_elements(x, merged):
            return "its channels are not those of attention"
        found = self._linear_rows(v, number)
        if isinstance(found, str):
            return found
        linear, first, strides = found
        heads, size = y.shape[1].constant, y.shape[2].constant
        group = heads // v.shape[1].constant
        rows = first + (np.arange(heads) // group)[:, None] * strides[0] + np.arange(size) * strides[1]
        flat = rows.reshape(-1).astype(np.int64)
        return Producer("attention", linear, flat, flat)

    def _linear_rows(self, part: View, reader: int) -> tuple[int, int, tuple[int, ...]] | str:
        """The linear that makes a part of its output [T, ...], its first row, and the strides of its axes in rows."""
        writers = self._writers[part.buffer]
        if part.buffer.storage is not Storage.ARENA or len(writers) != 1:
            return "what makes it is no linear"
        step = self._graph.steps[writers[0]]
        if step.op != "linear" or step.inputs[1] is None:
            return f"what makes it is {step.op}"
        if len(self._readers[step.inputs[1].buffer]) > 1:
            return "the linear that makes it shares its weight"
        out = step.outputs[0]
        columns = _columns(part, out)
        if columns is None or part.shape[0] != out.shape[0]:
            return "it is no part of the rows of a linear"
        for number in self._readers[part.buffer]:
            for view in self._graph.steps[number].inputs:
                if view is None or view.buffer is not part.buffer or (number == reader and view == part):
                    continue
                others = _columns(view, out)
                if others is None or np.isin(columns, others).any():
                    return f"the linear that makes it is also read by {self._graph.steps[number].op}"
        first = part.offset.constant - out.offset.constant
        return writers[0], first, tuple(stride.constant for stride in part.strides[1:])

    # ------------------------------------------------------------------------------------------------ changing
    def _divide_norm(self, number: int, step: LoweredStep, scale: Factors) -> None:
        index, offset = NORM_WEIGHT[step.op], np.float32(step.attributes["offset"])
        weight, bias = self._vector(number, index), self._vector(number, index + 1)
        whole = np.ones_like(scale) if weight is None else weight + offset
        self._vectors[number, index] = whole / scale - offset
        if bias is not None:
            self._vectors[number, index + 1] = bias / scale

    def _vector(self, number: int, index: int) -> Factors | None:
        """A small weight of a step as it is by now."""
        if (number, index) in self._vectors:
            return self._vectors[number, index]
        step = self._graph.steps[number]
        view = step.inputs[index] if index < len(step.inputs) else None
        if view is None:
            return None
        flat = weights.read(self._source(view.buffer.name)).astype(np.float32).reshape(-1)
        return strided(flat, view, 1, 1).copy()

    def _source(self, name: str) -> WeightSource:
        weight = self._graph.weights[name]
        assert isinstance(weight, PackedWeight), f"{name} is a weight of the checkpoint"
        source = weight.source
        return source.source if isinstance(source, Cast) and weight.panels else source


def same_elements(a: View, b: View) -> bool:
    """Whether two views of [T, ...] name the same elements in the same order."""
    if a.buffer is not b.buffer or a.offset != b.offset:
        return False
    axes = [[(s, d) for s, d in zip(v.shape, v.strides, strict=True) if s != ONE] for v in (a, b)]
    return axes[0] == axes[1]


def _product_input(step: LoweredStep, x: View) -> bool:
    if step.op not in ("linear", "moe") or step.inputs[0] is None or not same_elements(step.inputs[0], x):
        return False
    return all(view is None or view.buffer is not x.buffer for view in step.inputs[1:])


def _rows_of(data: View | None, out: View, x: View) -> View | None:
    """The data [T, K] of a gather whose result, all channels of some rows, is x; None if x is something else."""
    if data is None or data.rank < 2 or not all(size.is_constant for size in data.shape[1:]):
        return None
    width = product(data.shape[1:])
    flat, whole = data.reshape([data.shape[0], width]), out.reshape([out.shape[0], width])
    return flat if flat is not None and whole is not None and same_elements(x, whole) else None


def _columns(view: View, out: View) -> NDArray[np.int64] | None:
    """The columns of the output [T, N] of a linear that a view of it reads; None if it is no view of whole rows."""
    axes = list(zip(view.shape, view.strides, strict=True))
    tokens = [axis for axis in axes if axis == (out.shape[0], out.strides[0])]
    inner = [axis for axis in axes if axis != (out.shape[0], out.strides[0])]
    if len(tokens) != 1 or not all(dim.is_constant for dim in (*(d for axis in inner for d in axis), view.offset)):
        return None
    found = np.array([view.offset.constant - out.offset.constant], np.int64)
    for size, stride in inner:
        found = np.unique(found[:, None] + np.arange(size.constant) * stride.constant)
    return found if found[0] >= 0 and found[-1] < out.shape[1].constant else None


def _with_input(step: LoweredStep, index: int, view: View) -> LoweredStep:
    inputs: list[View | None] = [*step.inputs, *[None] * (index + 1 - len(step.inputs))]
    inputs[index] = view
    return replace(step, inputs=tuple(inputs))


def _count(step: LoweredStep, buffer: Buffer) -> int:
    return sum(view is not None and view.buffer is buffer for view in step.inputs)


def _unique(name: str, taken: Mapping[str, Any]) -> str:
    unique, count = name, 0
    while unique in taken:
        count += 1
        unique = f"{name}.{count}"
    return unique
