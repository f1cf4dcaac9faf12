"""`llmc bench --profile`: where the time of a step goes, and how near each op comes to what the machine allows."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from llmc.plugins.paged_attention.storage import bytes_per_position
from llmc.runtime.plan import Dim, Plan, Step, Storage, Value

if TYPE_CHECKING:
    from llmc.runtime.batch import Batch

SIZES = {"float32": 4, "bfloat16": 2, "float16": 2, "int32": 4, "int64": 8, "bool": 1, "uint8": 1}
PEAKS = {"int8": ("amx_int8", "int8"), "bfloat16": ("amx_bf16", "bf16"), "float32": ()}
"""Ceilings that bound products, the fastest first; all others, and what the machine doesn't have: fp32."""


@dataclass
class Total:
    """What the steps of one op did, summed."""

    steps: int = 0
    seconds: float = 0
    bytes: int = 0
    operations: int = 0
    least_seconds: float = 0
    """That the ceilings allow: the longer of reading the bytes and of doing the operations, step by step."""

    def to_json(self, seconds: float) -> dict[str, float]:
        """``seconds``: the time of which the share is wanted."""
        spent = max(self.seconds, 1e-12)
        return {
            "steps": self.steps,
            "seconds": self.seconds,
            "share": self.seconds / seconds,
            "gigabytes_per_second": self.bytes / spent / 1e9,
            "giga_operations_per_second": self.operations / spent / 1e9,
            "of_roofline": self.least_seconds / spent,
        }


class Decodes:
    """Steps without prompts that follow one of the same size: by the number of sequences, (inside, outside) in ns."""

    FEWEST = 8
    """Steps of a size from which on it is looked at."""

    def __init__(self) -> None:
        self._steps: dict[int, list[tuple[int, int]]] = {}

    def add(self, sequences: int, inside: int, outside: int) -> None:
        """One step."""
        self._steps.setdefault(sequences, []).append((inside, outside))

    def to_json(self) -> dict[str, float] | None:
        """Of the most sequences; None if no size had enough steps."""
        sizes = [size for size, steps in self._steps.items() if len(steps) >= self.FEWEST]
        if not sizes:
            return None
        inside, outside = (statistics.median(times) / 1e9 for times in zip(*self._steps[max(sizes)], strict=True))
        return {"sequences": max(sizes), "seconds": inside + outside, "outside": outside / (inside + outside)}


class Profile:
    """Watches an executor and adds up, by op, time and work.

    Args:
        plan: what is run.
        kv_dtype: what keys and values are stored as.
        ceilings: of the machine, in 10**9 a second, see `bench.measure_ceilings`.
        decodes_only: leave out the runs with prompts.
    """

    def __init__(self, plan: Plan, kv_dtype: str, ceilings: Mapping[str, float], *, decodes_only: bool) -> None:
        self._plan, self._ceilings = plan, ceilings
        self._kv_bytes = [s.kv_heads * bytes_per_position(kv_dtype, s.key_dim, s.value_dim) for s in plan.kv_slots]
        self._attention = kv_dtype if kv_dtype in PEAKS else "bfloat16"
        self._decodes_only = decodes_only
        self._last_end: int | None = None
        self._inside = self._between = 0
        self._decodes = Decodes()
        self._last_decodes = 0
        self.totals: dict[str, Total] = {}

    def add(self, batch: Batch, begin_ns: int, end_ns: int, steps: Sequence[tuple[int, int, int]]) -> None:
        """One run of the plan, and (step, begin, end) of each of its steps."""
        if self._decodes_only and len(batch.input_ids) != len(batch.num_computed):
            self._last_end = None
            return
        gap = 0 if self._last_end is None else begin_ns - self._last_end
        self._inside += end_ns - begin_ns
        self._between += gap
        rows = len(batch.num_computed)
        decodes = rows if rows == len(batch.input_ids) else 0
        if gap and decodes > 1 and decodes == self._last_decodes:
            self._decodes.add(decodes, end_ns - begin_ns, gap)
        self._last_decodes = decodes
        sizes = len(batch.input_ids), len(batch.logit_rows)
        seen = _positions(batch)
        for number, begin, end in steps:
            step = self._plan.steps[number]
            total = self.totals.setdefault(step.op, Total())
            read, operations, peak = self._work(step, sizes, seen)
            total.steps += 1
            total.seconds += (end - begin) / 1e9
            total.bytes += read
            total.operations += operations
            total.least_seconds += max(read / self._ceilings["read_bandwidth"], operations / peak) / 1e9
        self._last_end = time.perf_counter_ns()  # what is done here is nobody's time

    def to_json(self) -> dict[str, Any]:
        """By op, the longest first; ``outside``: the share of scheduling, sampling and text, between runs.

        ``of_roofline``: the share of the time that the ops would take at the ceilings, each at most what it took.
        ``decodes``: the share outside in steps without prompts, by medians, for the most sequences of enough steps.
        """
        least = sum(min(total.seconds, total.least_seconds) for total in self.totals.values())
        seconds = max(1, self._inside + self._between) / 1e9
        ops = sorted(self.totals.items(), key=lambda item: -item[1].seconds)
        return {
            "seconds": seconds,
            "outside": self._between / 1e9 / seconds,
            "of_roofline": least / seconds,
            "decodes": self._decodes.to_json(),
            "ops": {op: total.to_json(seconds) for op, total in ops},
        }

    def _work(self, step: Step, sizes: tuple[int, int], seen: tuple[int, int]) -> tuple[int, int, float]:
        """(bytes that have to be moved, operations, the peak of their kind)."""
        values = [self._plan.value(name) for name in (*step.inputs, *step.outputs) if name is not None]
        weights = [value for value in values if value.storage is Storage.WEIGHT]
        moved = sum(_bytes(value, sizes) for value in values if value.storage is not Storage.WEIGHT)
        first = self._plan.value(str(step.inputs[0]))
        if step.op == "paged_attention":
            number = int(step.attributes["slot"])
            slot, (positions, pairs) = self._plan.kv_slots[number], seen
            operations = 2 * pairs * _at(first.shape[1], sizes) * (slot.key_dim + slot.value_dim)
            return moved + positions * self._kv_bytes[number], operations, self._peak(self._attention)
        if step.op in ("linear", "quantized_linear"):
            matrix = self._plan.value(str(step.inputs[1]))
            numbers = (
                _bytes(matrix, sizes) * (2 if step.attributes.get("format") == "int4" else 1) // SIZES[matrix.dtype]
            )
            peak = self._peak(str(step.attributes.get("compute", matrix.dtype)))
            return moved + sum(_bytes(v, sizes) for v in weights), 2 * _at(first.shape[0], sizes) * numbers, peak
        if step.op not in ("embedding", "gather", "moe", "rope"):  # which read few rows of theirs
            moved += sum(_bytes(value, sizes) for value in weights)
        return moved, 0, self._ceilings["fp32"]

    def _peak(self, compute: str) -> float:
        known = [self._ceilings[name] for name in PEAKS.get(compute, ()) if name in self._ceilings]
        return known[0] if known else self._ceilings["fp32"]


def _at(dim: Dim, sizes: tuple[int, int]) -> int:
    return dim.constant + dim.tokens * sizes[0] + dim.rows * sizes[1]


def _bytes(value: Value, sizes: tuple[int, int]) -> int:
    """Of the numbers that a view shows; repeated ones count once."""
    shown = zip(value.shape, value.strides, strict=True)
    return math.prod(_at(size, sizes) for size, stride in shown if stride != Dim(0)) * SIZES[value.dtype]


def _positions(batch: Batch) -> tuple[int, int]:
    """(cached positions that attention reads, pairs of a row and a position that it sees), without windows."""
    rows = np.diff(batch.cu_seqlens).astype(np.int64)
    past = batch.num_computed.astype(np.int64)
    return int((past + rows).sum()), int((rows * past + rows * (rows + 1) // 2).sum())
