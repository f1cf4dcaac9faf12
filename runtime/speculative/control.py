"""How many drafts a step gets: as many as pay for themselves. What they are changes no result, only its time."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence as ListOf
from dataclasses import dataclass

from llmc.runtime.request import Sequence

FREE_ROWS = 32
"""Before anything is measured, so many rows are taken to cost as much as the step itself."""

MEMORY, MEMORY_OF_ALL = 0.9, 0.98
"""Weight that an observation keeps at the next one: of a sequence, and of all of them."""

FIRST_GUESS, GUESS_WEIGHT = 0.7, 2.0
"""Of the share of drafts that are right, and of how many drafts that counts for: few, or one that is lucky or unlucky
decides; more, and a sequence that differs from the others is not seen."""

PROBE_AFTER, PROBE = 16, 2
"""Steps without drafts after which a sequence gets so many, to see whether they have become right."""

PLAIN_AFTER = 32
"""Steps with drafts after which one runs without, to see what that takes now."""

ALLOWED = 0.01
"""The share of all time that drafts may cost more than they save."""

CREDIT_FIRST, CREDIT_MOST = 1.0, 8.0
"""Steps without drafts: for as many drafts may go wrong before anything is known, and at any time."""

EXACT = 64
"""Rows up to which each size is a size of its own: a few rows more are what is to be told apart."""

KEPT = 25
"""Times of steps of a size, of which the median counts: steps are disturbed, and one of few would be believed."""


class StepCost:
    """Seconds of a step by its rows, learnt from the steps that run and interpolated between them."""

    def __init__(self) -> None:
        self._times: dict[int, deque[float]] = {}  # of each size; large ones that are about the same are one
        self._sizes: dict[int, float] = {}  # rows, on average
        self._points: list[tuple[float, float]] = []  # (rows, seconds), rising

    def add(self, rows: int, seconds: float) -> None:
        """A step has run."""
        place = _place(rows)
        size = self._sizes.setdefault(place, float(rows))
        self._sizes[place] = size + (1 - MEMORY) * (rows - size)
        self._times.setdefault(place, deque(maxlen=KEPT)).append(seconds)
        self._points = []

    def knows(self, rows: int) -> bool:
        """Whether a step of that size has run."""
        return _place(rows) in self._sizes

    def at(self, rows: int) -> float:
        """Expected seconds; more rows never take less."""
        if not self._points:
            if not self._sizes:
                return float(rows + FREE_ROWS)
            self._points = self._rising()
        place = bisect_left(self._points, (rows, 0.0))
        if 0 < place < len(self._points):
            (below, least), (above, most) = self._points[place - 1 : place + 1]
            return least + (most - least) * (rows - below) / (above - below)
        size, seconds = self._points[max(0, place - 1)]
        return seconds * (rows + FREE_ROWS) / (size + FREE_ROWS)

    def _rising(self) -> list[tuple[float, float]]:
        """The median of each size; where more rows took less, the mean of both, by how often they were seen."""
        groups: list[tuple[list[float], float, int]] = []  # sizes, sum of seconds, times
        for place, size in sorted(self._sizes.items()):
            count = len(self._times[place])
            sizes, total = [size], count * _median(self._times[place])
            while groups and groups[-1][1] / groups[-1][2] > total / count:
                before = groups.pop()
                sizes, total, count = before[0] + sizes, before[1] + total, before[2] + count
            groups.append((sizes, total, count))
        return [(size, total / count) for sizes, total, count in groups for size in sizes]


def _median(times: ListOf[float]) -> float:
    return sorted(times)[(len(times) - 1) // 2]


def _place(rows: int) -> int:
    return rows if rows <= EXACT else EXACT + round(8 * math.log2(rows / EXACT))


@dataclass
class _Rate:
    """Drafts that were looked at, and those that were right; older ones count less."""

    right: float = 0.0
    tried: float = 0.0
    idle: int = 0
    """Steps since there were drafts."""

    def add(self, right: float, tried: float, memory: float) -> None:
        self.right = memory * self.right + right
        self.tried = memory * self.tried + tried

    def estimate(self, guess: float) -> float:
        return (self.right + GUESS_WEIGHT * guess) / (self.tried + GUESS_WEIGHT)


@dataclass
class _Step:
    """The last step that was sized: its sequences, rows without drafts, drafts, and drafts that were right."""

    sequences: int
    rows: int
    drafts: int = 0
    right: int = 0


class Controller:
    """Chooses sizes of trees by the acceptance of each sequence, the cost of rows and that of making drafts.

    Drafts are added, the most valuable first, up to where tokens per second are highest. A draft at depth d of a chain
    is worth p**d tokens, where p is the share of the sequence's drafts that were right; a node of a tree with known
    gains is worth its gain, times what the sequence's trees gave as a part of what was expected of them.

    What drafts have cost and what they saved is added up, so that they never cost more than a small share of the time,
    whatever the guesses are worth.

    Args:
        gains: of a proposer whose trees always have the same shape: what each node is expected to be worth.
    """

    def __init__(self, gains: ListOf[float] = ()) -> None:
        self.cost = StepCost()
        self._gains = gains
        self._rates: dict[Sequence, _Rate] = {}
        self._all = _Rate()
        self._level_times: deque[float] = deque(maxlen=KEPT)
        self._level_seconds = 0.0
        self._last: _Step | None = None
        self._with_drafts = 0
        self._credit: float | None = None  # seconds; None: no step has run

    def sizes(self, sequences: ListOf[Sequence], most: ListOf[int], rows: int) -> list[int]:
        """Nodes for each sequence, at most so many, in a step that has ``rows`` rows without them."""
        self._settle()
        nodes = [0] * len(sequences)
        self._last = _Step(len(sequences), rows)
        if not sequences or not self.cost.knows(rows) or self._with_drafts >= PLAIN_AFTER:
            self._with_drafts = 0
            return nodes
        worth = sorted(
            (-value, depth, number)
            for number, sequence in enumerate(sequences)
            for depth, value in enumerate(self._worth(sequence, most[number]), start=1)
        )
        if not self._level_times:
            del worth[1:]  # what making drafts takes is not known
        plain = self.cost.at(rows)
        credit = CREDIT_FIRST * plain if self._credit is None else self._credit
        best, chosen, tokens, deepest = len(sequences) / plain, 0, float(len(sequences)), 0
        for count, (value, depth, _) in enumerate(worth, start=1):
            seconds = self._seconds(rows + count, max(deepest, self._levels(depth)))
            if seconds - plain > credit or (tokens - value * (len(worth) - count + 1)) / seconds <= best:
                break  # it might cost too much, or even the best of what is to come gains nothing
            tokens -= value
            deepest = max(deepest, self._levels(depth))
            if tokens / seconds > best:
                best, chosen = tokens / seconds, count
        for _, _, number in worth[:chosen]:
            nodes[number] += 1
        self._probe(nodes, sequences, most, rows, plain + credit)
        self._last.drafts = sum(nodes)
        self._with_drafts += any(nodes)
        return nodes

    def learn(self, sequence: Sequence, nodes: int, depth: int, accepted: int) -> None:
        """Of a tree of that size, so many drafts were right; those behind the first wrong one say nothing."""
        tried = sum(self._gains[:nodes]) if self._gains else min(accepted + 1, depth)
        self._rates.setdefault(sequence, _Rate()).add(accepted, tried, MEMORY)
        self._all.add(accepted, tried, MEMORY_OF_ALL)
        if self._last is not None:
            self._last.right += accepted

    def proposed(self, levels: int, seconds: float) -> None:
        """Making trees so deep took so long."""
        self._level_times.append(seconds / self._levels(max(1, levels)))
        self._level_seconds = _median(self._level_times)
        if self._credit is not None:
            self._credit -= seconds

    def ran(self, rows: int, seconds: float) -> None:
        """The step that was sized has run, with its drafts."""
        self.cost.add(rows, seconds)
        if self._last is not None:
            self._last.drafts = rows - self._last.rows

    def forget(self, sequence: Sequence) -> None:
        """It has ended."""
        self._rates.pop(sequence, None)

    def _worth(self, sequence: Sequence, most: int) -> list[float]:
        """Tokens that each node is expected to give."""
        rate = self._rates.setdefault(sequence, _Rate())
        if self._gains:
            share = rate.estimate(self._all.estimate(1.0))
            return [min(1.0, share * gain) for gain in self._gains[:most]]
        right = rate.estimate(self._all.estimate(FIRST_GUESS))
        return [right**depth for depth in range(1, most + 1)]

    def _levels(self, depth: int) -> int:
        """Turns that a proposer takes for a tree so deep."""
        return min(depth, 1) if self._gains else depth

    def _seconds(self, rows: int, levels: int) -> float:
        """Of a step with so many rows, for whose drafts a proposer takes so many turns."""
        return self.cost.at(rows) + self._level_seconds * levels

    def _probe(
        self, nodes: list[int], sequences: ListOf[Sequence], most: ListOf[int], rows: int, seconds: float
    ) -> None:
        """Give a few to those that had none for long, as many of them as the step may take ``seconds`` for."""
        rates = [self._rates[sequence] for sequence in sequences]
        for rate, count in zip(rates, nodes, strict=True):
            rate.idle = 0 if count else rate.idle + 1
        total, level = sum(nodes), max(nodes)
        for number in sorted(range(len(rates)), key=lambda number: -rates[number].idle):
            probe = min(PROBE, most[number])
            level = max(level, probe)
            if rates[number].idle <= PROBE_AFTER or self._seconds(rows + total + probe, self._levels(level)) > seconds:
                return
            nodes[number], rates[number].idle = probe, 0
            total += probe

    def _settle(self) -> None:
        """Count what the drafts of the last step cost and saved."""
        last, self._last = self._last, None
        if last is None or not last.sequences or not self.cost.knows(last.rows):
            return
        plain = self.cost.at(last.rows)
        if self._credit is None:
            self._credit = CREDIT_FIRST * plain
        saved = plain * (last.sequences + last.right) / last.sequences - self.cost.at(last.rows + last.drafts)
        most = CREDIT_MOST * plain  # and at least: one call that hung is not to be paid for ever
        self._credit = max(-most, min(self._credit + saved + ALLOWED * plain, most))
