"""What arrives at the experts of a moe step: the tokens that are routed to each, and what it makes of them inside."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmc.compiler.lowering.builder import LoweredStep
from llmc.compiler.quantize.interpreter import Interpreter
from llmc.plugins import kernels
from llmc.quantization.base import LayerInputs, Statistics
from llmc.quantization.statistics import SAMPLE, InputCollector
from llmc.runtime.plan import Attribute

FEW_TOKENS = 256
"""An expert that saw fewer tokens is given a sample of all of them besides its own."""

GROUP_BYTES = 256 << 20
"""Statistics of as many experts as this holds are collected in one go; of one at least."""

HELD_ROWS = SAMPLE + 1024
"""Rows that a collector holds, about: its sample, and those that arrive."""


class Routing:
    """Which tokens go to which expert, over all chunks."""

    def __init__(self, interpreter: Interpreter, position: int, experts: int) -> None:
        self.interpreter = interpreter
        self.position = position
        self.step: LoweredStep = interpreter.steps[position]
        self.counts = np.zeros(experts, np.int64)
        self._begins = np.cumsum([0, *(len(batch.input_ids) for batch in interpreter.chunks)])
        interpreter.visit(position, self._count)
        needed = min(FEW_TOKENS, int(self._begins[-1]))
        self.few = [expert for expert in range(experts) if self.counts[expert] < needed]
        self._stride = max(1, int(self._begins[-1]) // needed)

    def tokens(self, chunk: int, ids: NDArray[np.int64], expert: int) -> NDArray[np.int64]:
        """The rows of a chunk that count for an expert."""
        chosen = (ids == expert).any(1)
        if expert in self.few:
            chosen |= (np.arange(len(ids)) + self._begins[chunk]) % self._stride == 0
        return np.flatnonzero(chosen)

    def facts(self) -> dict[str, Any]:
        """For the report."""
        found: dict[str, Any] = {"tokens": {"least": int(self.counts.min()), "most": int(self.counts.max())}}
        if self.few:
            found["experts_with_few_tokens"] = {str(e): int(self.counts[e]) for e in self.few}
            found["few_tokens"] = (
                f"these experts saw fewer than {FEW_TOKENS} tokens: a sample of all tokens was added to their own"
            )
        return found

    def _count(self, chunk: int, inputs: Sequence[NDArray[Any] | None]) -> None:
        ids = inputs[1]
        assert ids is not None, "moe has ids"
        for expert in range(len(self.counts)):
            self.counts[expert] += int((ids == expert).any(1).sum())


class ExpertInputs:
    """Statistics of one input of each expert, made for a group of experts at a time.

    Args:
        routing: the moe step.
        columns: of the input.
        needs: which statistics.
        inner: None for what arrives at gate_up; for down, a function that gives an expert's gate_up as packed.
        bias: of gate_up [experts, rows], or None.
        threads: of the kernels.
        name: for messages.
    """

    def __init__(
        self,
        routing: Routing,
        columns: int,
        needs: Statistics,
        *,
        inner: Callable[[int], NDArray[Any]] | None,
        bias: NDArray[np.float32] | None,
        threads: int,
        name: str,
    ) -> None:
        self._routing = routing
        self._columns = columns
        self._needs = needs
        self._inner = inner
        self._bias = bias
        self._threads = threads
        self._name = name
        self._made: dict[int, LayerInputs] = {}
        each = columns * (columns if needs is Statistics.HESSIAN else HELD_ROWS) * 4
        self._group = max(1, GROUP_BYTES // each)

    def __call__(self, expert: int | None) -> LayerInputs:
        """Those of an expert; experts are best asked for in order."""
        assert expert is not None, "experts are quantized one by one"
        if expert not in self._made:
            self._make(range(expert, min(len(self._routing.counts), expert + self._group)))
        return self._made[expert]

    def _make(self, experts: Sequence[int]) -> None:
        collectors = {
            e: InputCollector(self._columns, self._needs, name=f"{self._name}, expert {e}", threads=self._threads)
            for e in experts
        }
        packed = {} if self._inner is None else {e: self._inner(e) for e in experts}
        attributes = self._routing.step.attributes

        def collect(chunk: int, inputs: Sequence[NDArray[Any] | None]) -> None:
            x, ids = inputs[0], inputs[1]
            assert x is not None and ids is not None, "moe has inputs"
            for e, collector in collectors.items():
                rows = np.ascontiguousarray(x[self._routing.tokens(chunk, ids, e)])
                if len(rows) and self._inner is not None:
                    bias = None if self._bias is None else self._bias[e]
                    rows = inner_rows(rows, packed[e], bias, attributes, self._columns, self._threads)
                if len(rows):
                    collector.add(rows)

        self._routing.interpreter.visit(self._routing.position, collect)
        self._made = {e: collector.finish() for e, collector in collectors.items()}


def inner_rows(
    x: NDArray[np.float32],
    gate_up: NDArray[Any],
    bias: NDArray[np.float32] | None,
    attributes: dict[str, Attribute] | Any,
    columns: int,
    threads: int,
) -> NDArray[np.float32]:
    """What an expert's down is given [n, columns] for rows [n, H]; see plugins/moe."""
    gated = bool(attributes["gated"])
    made = np.empty((len(x), columns * 2 if gated else columns), np.float32)
    kernels.run_op("linear", [x, gate_up, bias], [made], threads=threads)
    function = str(attributes["function"])
    out = np.empty((len(x), columns), np.float32)
    if not gated:
        kernels.run_op("elementwise", [made, None, None], [out], {"function": function}, threads=threads)
        return out
    gate, up = (made[:, ::2], made[:, 1::2]) if attributes["interleaved"] else (made[:, :columns], made[:, columns:])
    gate, up = np.ascontiguousarray(gate), np.ascontiguousarray(up)
    if (limit := float(attributes["limit"])) > 0:
        gate, up = np.minimum(gate, np.float32(limit)), np.clip(up, np.float32(-limit), np.float32(limit))
    if function == "gpt_oss":
        alpha = np.float32(attributes["alpha"])
        with np.errstate(over="ignore"):
            return np.asarray(gate / (1 + np.exp(-alpha * gate)) * (up + 1), np.float32)
    kernels.run_op("glu", [gate, up], [out], {"function": function}, threads=threads)
    return out
