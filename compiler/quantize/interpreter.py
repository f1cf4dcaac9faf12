"""Runs the steps of a lowered model over all calibration tokens, a stretch of steps at a time.

The whole model is never in memory: a stretch loads the weights of its steps, and runs one chunk of tokens after the
other through them; what later steps read is kept in between.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from llmc.compiler.lower import LoweredGraph
from llmc.compiler.lowering.builder import LoweredStep
from llmc.compiler.lowering.values import Buffer, View
from llmc.compiler.quantize.activations import Activations
from llmc.compiler.weights import numpy_dtype
from llmc.plugins import kernels
from llmc.runtime.batch import Batch
from llmc.runtime.plan import KvSlot, Storage

BLOCK_SIZE = 16

SMALL_BYTES = 1 << 20
"""Weights up to this size stay loaded: norms, biases, tables."""

CHUNK_TOKENS = 2048
"""Of a chunk, unless one sample has more."""

STRETCH_BYTES = 256 << 20
"""Weights that are loaded together, at most, unless one step has more."""

Watcher = Callable[[int, Sequence[NDArray[Any] | None]], None]
"""Is given the number of a chunk and the inputs of the step that it watches (weights as None)."""


class Weights:
    """Where the interpreter gets its weights."""

    def load(self, name: str) -> NDArray[Any]:
        """A stored weight, packed as the kernels read it."""
        raise NotImplementedError

    def is_table(self, name: str) -> bool:
        """Whether ``table_rows`` can read it; other tables are loaded whole."""
        raise NotImplementedError

    def table_rows(self, name: str, ids: NDArray[np.int64]) -> NDArray[np.float32]:
        """Rows of an embedding's table [n, columns]; ``ids`` ascend."""
        raise NotImplementedError


def make_chunks(samples: Sequence[NDArray[np.int32]], tokens: int = CHUNK_TOKENS) -> list[Batch]:
    """Samples as packed sequences, in chunks of at least one sample and up to so many tokens."""
    chunks: list[Batch] = []
    waiting: list[NDArray[np.int32]] = []
    for sample in [*samples, None]:
        size = sum(map(len, waiting))
        if waiting and (sample is None or size + len(sample) > tokens):
            chunks.append(_pack(waiting))
            waiting = []
        if sample is not None:
            waiting.append(sample)
    return chunks


def _pack(samples: Sequence[NDArray[np.int32]]) -> Batch:
    sizes = [len(sample) for sample in samples]
    blocks = [-(-size // BLOCK_SIZE) for size in sizes]
    tables = np.zeros((len(samples), max(blocks)), np.int32)
    for row, (count, begin) in enumerate(zip(blocks, np.cumsum([0, *blocks]), strict=False)):
        tables[row, :count] = np.arange(begin, begin + count)
    return Batch(
        input_ids=np.concatenate(samples).astype(np.int32),
        position_ids=np.concatenate([np.arange(size, dtype=np.int32) for size in sizes]),
        logit_rows=np.arange(sum(sizes), dtype=np.int32),
        cu_seqlens=np.cumsum([0, *sizes]).astype(np.int32),
        num_computed=np.zeros(len(samples), np.int32),
        block_tables=tables,
    )


class Interpreter:
    """Runs stretches of steps in order.

    Args:
        graph: what to run.
        chunks: the tokens.
        weights: gives the weights when they are needed.
        activations: keeps what crosses from one stretch to the next.
        threads: of the kernels; they change no bit.
    """

    def __init__(
        self,
        graph: LoweredGraph,
        chunks: Sequence[Batch],
        weights: Weights,
        activations: Activations,
        threads: int,
    ) -> None:
        self.steps = own_keys(graph.steps)
        self.chunks = chunks
        self.activations = activations
        self._sizes = {name: tensor.nbytes for name, tensor in graph.weights.items()}
        self._slots = graph.kv_slots
        self._logits = graph.logits
        self._weights = weights
        self._threads = threads
        self._small: dict[str, NDArray[Any]] = {}
        self._first, self._last = lifetimes(self.steps)
        self._last[graph.logits.buffer] = len(self.steps)

    def run(self, begin: int, end: int) -> None:
        """Run the steps ``begin`` to ``end`` (exclusive) over all chunks."""
        for first, last in self.stretches(begin, end):
            self._run_stretch(first, last)

    def stretches(self, begin: int, end: int) -> Iterator[tuple[int, int]]:
        """Steps whose weights fit in memory together, as ranges."""
        names: set[str] = set()
        for position in range(begin, end):
            own = self._loads(self.steps[position])
            if names and sum(self._sizes[name] for name in names | own) > STRETCH_BYTES:
                yield begin, position
                begin, names = position, set()
            names |= own
        if begin < end:
            yield begin, end

    def _run_stretch(self, begin: int, end: int) -> None:
        loaded = self._load(self.steps[begin:end])
        incoming = self._crossing(begin)
        outgoing = self._crossing(end)
        for number, batch in enumerate(self.chunks):
            memory = {buffer: self.activations.get(buffer.name, number) for buffer in incoming}
            self._run_steps(begin, end, memory, batch, loaded)
            for buffer in outgoing:
                self.activations.put(buffer.name, number, memory[buffer])
        for buffer in incoming:
            if buffer not in outgoing:
                self.activations.drop(buffer.name)

    def logits(self, begin: int) -> Iterator[NDArray[np.float32]]:
        """Run the steps from ``begin`` on; the logits of each chunk."""
        loaded = self._load(self.steps[begin:])
        for number, batch in enumerate(self.chunks):
            memory = {buffer: self.activations.get(buffer.name, number) for buffer in self._crossing(begin)}
            self._run_steps(begin, len(self.steps), memory, batch, loaded)
            yield view_of(self._logits, memory, batch)
        self.activations.clear()

    def visit(self, position: int, watcher: Watcher) -> None:
        """Show a watcher the inputs of the step that comes next, once ``run`` has come up to it."""
        buffers = [b for b in self._crossing(position) if any(v and v.buffer is b for v in self.steps[position].inputs)]
        for number, batch in enumerate(self.chunks):
            memory = {buffer: self.activations.get(buffer.name, number) for buffer in buffers}
            watcher(number, self.inputs(self.steps[position], memory, batch))

    def inputs(
        self, step: LoweredStep, memory: Mapping[Buffer, NDArray[Any]], batch: Batch
    ) -> list[NDArray[Any] | None]:
        """The inputs of a step but for weights, which are None."""
        return [
            None if view is None or view.buffer.storage is Storage.WEIGHT else view_of(view, memory, batch)
            for view in step.inputs
        ]

    def _run_steps(
        self,
        begin: int,
        end: int,
        memory: dict[Buffer, NDArray[Any]],
        batch: Batch,
        loaded: Mapping[str, NDArray[Any]],
        weights: Weights | None = None,
    ) -> None:
        for position in range(begin, end):
            self._run_step(self.steps[position], memory, batch, loaded, weights)
            for buffer in [b for b in memory if self._last[b] <= position]:
                del memory[buffer]

    def _crossing(self, position: int) -> list[Buffer]:
        """Buffers that hold something when so many steps have run, and that later ones use."""
        return [b for b, first in self._first.items() if first < position <= self._last[b]]

    def _load(self, steps: Sequence[LoweredStep]) -> dict[str, NDArray[Any]]:
        """The weights of steps, but for tables of which rows can be read."""
        loaded: dict[str, NDArray[Any]] = {}
        for name in sorted({name for step in steps for name in self._loads(step)}):
            loaded[name] = array = self._small[name] if name in self._small else self._weights.load(name)
            if array.nbytes <= SMALL_BYTES:
                self._small[name] = array
        return loaded

    def _loads(self, step: LoweredStep) -> set[str]:
        """The weights that a step needs whole."""
        return {
            view.buffer.name
            for index, view in enumerate(step.inputs)
            if view is not None
            and view.buffer.storage is Storage.WEIGHT
            # a table may be the largest weight: only the rows that are asked for are read
            and not (step.op == "embedding" and index == 1 and self._weights.is_table(view.buffer.name))
        }

    def _run_step(
        self,
        step: LoweredStep,
        memory: dict[Buffer, NDArray[Any]],
        batch: Batch,
        loaded: Mapping[str, NDArray[Any]],
        weights: Weights | None = None,
    ) -> None:
        sizes = len(batch.input_ids), len(batch.logit_rows)
        for view in step.outputs:
            if view.buffer not in memory:
                size = view.buffer.elements.at(*sizes)
                memory[view.buffer] = np.empty(size, numpy_dtype(view.buffer.dtype))
        inputs = self.inputs(step, memory, batch)
        outputs = [view_of(view, memory, batch) for view in step.outputs]
        table = step.inputs[1] if step.op == "embedding" else None
        if table is not None and table.buffer.name not in loaded:
            assert inputs[0] is not None, "embedding has two inputs"
            ids, places = np.unique(inputs[0], return_inverse=True)
            rows = (weights or self._weights).table_rows(table.buffer.name, ids.astype(np.int64))
            outputs[0][...] = rows[places.reshape(inputs[0].shape)]
            return
        for index, weight in enumerate(step.inputs):
            if weight is not None and weight.buffer.storage is Storage.WEIGHT:
                inputs[index] = strided(loaded[weight.buffer.name].reshape(-1), weight, *sizes)
        attributes, kv = dict(step.attributes), None
        if step.op == "paged_attention":
            kv = _cache(self._slots[int(attributes["slot"])], batch)
            attributes["slot"] = 0
        kernels.run_op(step.op, inputs, outputs, attributes, threads=self._threads, batch=batch, kv=kv)


def own_keys(steps: Sequence[LoweredStep]) -> list[LoweredStep]:
    """Attention that shares the cache of an earlier op is given that op's keys and values, to write them once more."""
    written: dict[int, tuple[View | None, ...]] = {}
    result = []
    for step in steps:
        if step.op == "paged_attention":
            slot = int(step.attributes["slot"])
            if step.attributes["write"]:
                written[slot] = step.inputs[1:3]
            else:
                inputs = (step.inputs[0], *written[slot], *step.inputs[3:])
                step = replace(step, inputs=inputs, attributes={**step.attributes, "write": True})
        result.append(step)
    return result


def view_of(view: View, memory: Mapping[Buffer, NDArray[Any]], batch: Batch) -> NDArray[Any]:
    """A value of the arena or of the batch as an array."""
    base = getattr(batch, view.buffer.name) if view.buffer.storage is Storage.BATCH else memory[view.buffer]
    return strided(base, view, len(batch.input_ids), len(batch.logit_rows))


def strided(base: NDArray[Any], view: View, tokens: int, rows: int) -> NDArray[Any]:
    """A view of a flat array, for so many tokens and rows of logits."""
    item = base.itemsize
    shape = [size.at(tokens, rows) for size in view.shape]
    strides = [stride.at(tokens, rows) * item for stride in view.strides]
    return as_strided(base[view.offset.at(tokens, rows) :], shape, strides)


def _cache(slot: KvSlot, batch: Batch) -> kernels.Kv:
    """A cache in float32 for the keys and values of one op."""
    blocks = int(batch.block_tables.max()) + 1
    return kernels.Kv([(slot.kv_heads, slot.key_dim, slot.value_dim)], "float32", BLOCK_SIZE, blocks)


def lifetimes(steps: Sequence[LoweredStep]) -> tuple[dict[Buffer, int], dict[Buffer, int]]:
    """The step that first writes a buffer, and the last that reads it or writes to it."""
    first: dict[Buffer, int] = {}
    last: dict[Buffer, int] = {}
    for number, step in enumerate(steps):
        for view in step.outputs:
            first.setdefault(view.buffer, number)
            last[view.buffer] = number
        for read in step.inputs:
            if read is not None and read.buffer.storage is Storage.ARENA:
                last[read.buffer] = number
    return first, last
