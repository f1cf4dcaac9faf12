"""How much a model suffers when one layer is rounded: the distance of its next-token distributions, layer by layer.

All trials run in one pass over the steps: where a layer stands, a fork of the tokens goes through it rounded, and from
there on beside the others through the layers as they are. So no layer is loaded twice, and memory is that of a layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmc.compiler.evaluation.scores import compare
from llmc.compiler.lower import LoweredGraph
from llmc.compiler.lowering.values import Buffer
from llmc.compiler.quantize.activations import Activations
from llmc.compiler.quantize.interpreter import Interpreter, make_chunks, view_of
from llmc.compiler.quantize.loader import Loader, Rounded
from llmc.compiler.quantize.sites import Site
from llmc.compiler.quantize.work import Work
from llmc.errors import CompileError
from llmc.quantization.base import Method
from llmc.runtime.batch import Batch

WINDOWS, LENGTH, ROWS = 8, 128, 256
"""Pieces of the calibration text, their tokens, and how many places of them are looked at."""


@dataclass(frozen=True, eq=False)
class Layer:
    """What is rounded together: the weights with the method of each."""

    sites: Sequence[tuple[Site, Method]]

    @property
    def position(self) -> int:
        """The first step that reads it."""
        return min(number for site, _ in self.sites for number, _ in site.readers)

    @property
    def weights(self) -> dict[str, tuple[Site, Method]]:
        """By name."""
        return {site.name: (site, method) for site, method in self.sites}


def trial_batch(tokens: NDArray[np.int32]) -> Batch:
    """The tokens of the trials: pieces from all over those of the calibration [samples, length], as one batch."""
    chosen = np.unique(np.linspace(0, len(tokens) - 1, min(WINDOWS, len(tokens))).astype(int))
    (batch,) = make_chunks([tokens[i, :LENGTH] for i in chosen], tokens=WINDOWS * LENGTH)
    count = len(batch.input_ids)
    rows = np.arange(0, count, max(1, count // ROWS), dtype=np.int32)
    return replace(batch, logit_rows=rows)


def measure(
    graph: LoweredGraph,
    layers: Mapping[str, Layer],
    tokens: NDArray[np.int32],
    dtype: str,
    work: Work,
    threads: int,
    advance: Callable[[int], None],
) -> dict[str, float]:
    """KL(model || model with that layer rounded) in nats per token, the mean over the places that are looked at.

    Args:
        graph: the model.
        layers: by name, each with methods that need no calibration.
        tokens: of the calibration.
        dtype: of the weights of the engine.
        work: its folder takes activations that are too large for memory.
        threads: they change no bit.
        advance: told the steps that are done.

    Raises:
        CompileError: the model's logits are not finite.
        ResourceError: the disk is full.
    """
    batch = trial_batch(tokens)
    forks = sorted(layers, key=lambda name: layers[name].position)
    weights = [Rounded(graph, layers[name].weights, work, dtype) for name in forks]
    activations = Activations(work.path, len(forks) + 1)
    trials = _Trials(graph, [batch] * (len(forks) + 1), Loader(graph, {}, work, dtype), activations, threads)
    begin, running = 0, 0
    for position in sorted({layers[name].position for name in forks}):
        for first, last in trials.stretches(begin, position):
            trials.run_forks(first, last, weights[:running])
        stop = running + sum(layers[name].position == position for name in forks)
        trials.run_forks(position, position + 1, weights[:running], weights[running:stop])
        running, begin = stop, position + 1
        advance(begin)
    for first, last in trials.stretches(begin, len(trials.steps) - 1):
        trials.run_forks(first, last, weights)
        begin = last
    return dict(zip(forks, trials.distances(begin, weights), strict=True))


class _Trials(Interpreter):
    """Chunk 0 is the model as it is; chunk i + 1 is fork i."""

    def run_forks(self, begin: int, end: int, forks: Sequence[Rounded], starting: Sequence[Rounded] = ()) -> None:
        """Run the model and the forks, and those that start here, which are copies of the model before."""
        incoming, outgoing = self._crossing(begin), self._crossing(end)
        loaded = self._load(self.steps[begin:end])
        first = len(forks) + 1
        copies = [(first + i, 0, weights) for i, weights in enumerate(starting)]
        running = [(i, i, weights) for i, weights in enumerate([None, *forks])]
        for chunk, source, weights in [*copies, *running]:  # a step may change its inputs: copies are made first
            memory = {buffer: self.activations.get(buffer.name, source) for buffer in incoming}
            if chunk != source:
                memory = {buffer: array.copy() for buffer, array in memory.items()}
            self._run_fork(begin, end, memory, loaded, weights)
            for buffer in outgoing:
                self.activations.put(buffer.name, chunk, memory[buffer])
        for buffer in incoming:
            if buffer not in outgoing:
                self.activations.drop(buffer.name)

    def distances(self, begin: int, forks: Sequence[Rounded]) -> list[float]:
        """Run to the end; the distance of each fork from the model."""
        loaded = self._load(self.steps[begin:])
        found, reference = [], None
        for chunk, weights in enumerate([None, *forks]):
            memory = {buffer: self.activations.get(buffer.name, chunk) for buffer in self._crossing(begin)}
            self._run_fork(begin, len(self.steps), memory, loaded, weights)
            logits = view_of(self._logits, memory, self.chunks[0])
            if reference is None:
                reference = logits.copy()
                continue
            kl = float(compare(logits, reference, np.zeros(len(logits), np.int64)).divergence.mean())
            if not np.isfinite(kl):
                raise CompileError("the logits of the model are not finite; check the checkpoint with --dtype float32")
            found.append(kl)
        self.activations.clear()
        return found

    def _run_fork(
        self,
        begin: int,
        end: int,
        memory: dict[Buffer, NDArray[Any]],
        loaded: Mapping[str, NDArray[Any]],
        weights: Rounded | None,
    ) -> None:
        own: dict[str, NDArray[Any]] = {}
        if weights is not None:
            names = {v.buffer.name for step in self.steps[begin:end] for v in step.inputs if v is not None}
            own = {name: weights.load(name) for name in weights.names if name in names and name in loaded}
        self._run_steps(begin, end, memory, self.chunks[0], {**loaded, **own}, weights)
