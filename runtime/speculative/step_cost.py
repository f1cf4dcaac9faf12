"""Seconds of a step by its rows, learnt from the steps that run and interpolated between them."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence as ListOf

FREE_ROWS = 32
"""Before anything is measured, so many rows are taken to cost as much as the step itself."""

MEMORY = 0.9
"""Weight that the mean of sizes, of those that are taken for one, keeps at the next one."""

EXACT = 64
"""Rows up to which each size is a size of its own: a few rows more are what is to be told apart."""

KEPT = 25
"""Times of steps of a size, of which the lower quartile counts: what disturbs a step only adds to it. Of a size that
ran seldom it is rather too high, so that none is chosen for having been lucky once."""

REFRESH = 8
"""Steps after which what was learnt is looked at again; at once, of a size that has not run as often yet."""


class StepCost:
    """See the module."""

    def __init__(self) -> None:
        self._times: dict[int, deque[float]] = {}  # of each size; large ones that are about the same are one
        self._quartiles: dict[int, float] = {}
        self._sizes: dict[int, float] = {}  # rows, on average
        self._added = 0
        self._rows: list[float] = []  # rising, and the seconds of each; none: they are to be found anew
        self._seconds: list[float] = []

    def add(self, rows: int, seconds: float) -> None:
        """A step has run."""
        place = _place(rows)
        size = self._sizes.setdefault(place, float(rows))
        self._sizes[place] = size + (1 - MEMORY) * (rows - size)
        times = self._times.setdefault(place, deque(maxlen=KEPT))
        times.append(seconds)
        self._quartiles[place] = quartile(times)
        self._added += 1
        if len(times) < REFRESH or self._added >= REFRESH:
            self._added, self._rows = 0, []

    def times(self, rows: int) -> int:
        """How many of the last steps of that size are known."""
        return len(self._times.get(_place(rows), ()))

    def at(self, rows: int) -> float:
        """Expected seconds; more rows never take less."""
        if not self._sizes:
            return float(rows + FREE_ROWS)
        self._update()
        place = bisect_left(self._rows, rows)
        if 0 < place < len(self._rows):
            below, above = self._rows[place - 1 : place + 1]
            least, most = self._seconds[place - 1 : place + 1]
            return least + (most - least) * (rows - below) / (above - below)
        end = max(0, place - 1)
        return self._seconds[end] * (rows + FREE_ROWS) / (self._rows[end] + FREE_ROWS)

    def _update(self) -> None:
        """The quartile of each size; where more rows took less, the mean of both, by how often they were seen."""
        if self._rows:
            return
        groups: list[tuple[list[float], float, int]] = []  # sizes, sum of seconds, times
        for place, size in sorted(self._sizes.items()):
            count = len(self._times[place])
            sizes, total = [size], count * self._quartiles[place]
            while groups and groups[-1][1] / groups[-1][2] > total / count:
                before = groups.pop()
                sizes, total, count = before[0] + sizes, before[1] + total, before[2] + count
            groups.append((sizes, total, count))
        self._rows = [size for sizes, _, _ in groups for size in sizes]
        self._seconds = [total / count for sizes, total, count in groups for _ in sizes]


def quartile(times: ListOf[float]) -> float:
    """The lower one."""
    return sorted(times)[(len(times) - 1) // 4]


def _place(rows: int) -> int:
    return rows if rows <= EXACT else EXACT + math.ceil(8 * math.log2(rows / EXACT))
