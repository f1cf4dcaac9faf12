"""The timeline that LLMC_TRACE asks for: when each step of the plan ran, for chrome://tracing or ui.perfetto.dev."""

from __future__ import annotations

import atexit
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from llmc.runtime.batch import Batch
from llmc.runtime.plan import Step

MAX_EVENTS = 1_000_000
"""Later ones are dropped, so that a long run neither fills the memory nor the disk."""


class Timeline:
    """Collects events and writes them to a file in Chrome's trace format when the process ends.

    Args:
        path: the file, which is overwritten.
        steps: the steps of the plan.
    """

    def __init__(self, path: Path, steps: Sequence[Step]) -> None:
        self._path = path
        self._names = [(step.op, step.module) for step in steps]
        self._events: list[tuple[int, int, int]] = []
        self._runs: list[tuple[str, int, int]] = []
        atexit.register(self.write)

    def add(self, batch: Batch, begin_ns: int, end_ns: int, steps: Iterable[tuple[int, int, int]]) -> None:
        """One run of the plan, and (step, begin, end) of each of its steps, in nanoseconds of ``perf_counter_ns``."""
        if len(self._events) < MAX_EVENTS:
            label = f"{len(batch.input_ids)} tokens, {len(batch.num_computed)} sequences"
            self._runs.append((label, begin_ns, end_ns))
            self._events.extend(steps)

    def write(self) -> None:
        """Write what was collected so far."""
        if not self._runs:
            return
        events = [_event(label, "run", 0, begin, end, {}) for label, begin, end in self._runs]
        for step, begin, end in self._events:
            op, module = self._names[step]
            events.append(_event(op, "step", 1, begin, end, {"module": module, "step": step}))
        self._path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))


def _event(name: str, category: str, row: int, begin: int, end: int, details: dict[str, object]) -> dict[str, object]:
    return {
        "name": name,
        "cat": category,
        "ph": "X",
        "pid": os.getpid(),
        "tid": row,
        "ts": begin / 1000,
        "dur": (end - begin) / 1000,
        "args": details,
    }
