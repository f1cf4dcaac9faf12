"""How many drafts a step gets: as many as pay for themselves. What they are changes no result, only its time."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence as ListOf
from dataclasses import dataclass, field

from llmc.runtime.request import Sequence

FREE_ROWS = 32
"""Before anything is measured, so many rows are taken to cost as much as the step itself."""

MEMORY, MEMORY_OF_ALL = 0.9, 0.98
"""Weight that an observation keeps at the next one: of a sequence, and of all of them."""

FIRST_GUESS, GUESS_WEIGHT = 0.7, 2.0
"""Of the share of drafts that are right, and of how many drafts that counts for: few, or one that is lucky or unlucky
decides; more, and a sequence that differs from the others is not seen."""

SECOND_GUESS = 0.5
"""Of how often, where a draft was wrong, the one beside it is right."""

PROBE_AFTER, PROBE = 16, 2
"""Steps without drafts after which a sequence gets so many, to see whether they have become right."""

PLAIN_AFTER = 32
"""Steps with drafts after which one runs without, to see what that takes now; twice as many as such steps are known, if
these are few: all is compared with them."""

ALLOWED = 0.01
"""The share of all time that drafts may cost more than they save."""

CREDIT_FIRST, CREDIT_MOST = 1.0, 8.0
"""Steps without drafts: for as many drafts may go wrong before anything is known, and at any time."""

EXACT = 64
"""Rows up to which each size is a size of its own: a few rows more are what is to be told apart."""

KEPT = 25
"""Times of steps of a size, of which the lower quartile counts: what disturbs a step only adds to it. Of a size that
ran seldom it is rather too high, so that none is chosen for having been lucky once."""


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

    def times(self, rows: int) -> int:
        """How many of the last steps of that size are known."""
        return len(self._times.get(_place(rows), ()))

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
        """The quartile of each size; where more rows took less, the mean of both, by how often they were seen."""
        groups: list[tuple[list[float], float, int]] = []  # sizes, sum of seconds, times
        for place, size in sorted(self._sizes.items()):
            count = len(self._times[place])
            sizes, total = [size], count * _quartile(self._times[place])
            while groups and groups[-1][1] / groups[-1][2] > total / count:
                before = groups.pop()
                sizes, total, count = before[0] + sizes, before[1] + total, before[2] + count
            groups.append((sizes, total, count))
        return [(size, total / count) for sizes, total, count in groups for size in sizes]


def _quartile(times: ListOf[float]) -> float:
    return sorted(times)[(len(times) - 1) // 4]


def _place(rows: int) -> int:
    return rows if rows <= EXACT else EXACT + math.ceil(8 * math.log2(rows / EXACT))


@dataclass
class _Rate:
    """Drafts that were looked at, and those that were right; older ones count less."""

    right: float = 0.0
    tried: float = 0.0

    def add(self, right: float, tried: float, memory: float) -> None:
        self.right = memory * self.right + right
        self.tried = memory * self.tried + tried

    def estimate(self, guess: float) -> float:
        return (self.right + GUESS_WEIGHT * guess) / (self.tried + GUESS_WEIGHT)


@dataclass
class _Known:
    """Of a sequence: first guesses; those beside them, where the first was wrong; and steps since there were drafts."""

    first: _Rate = field(default_factory=_Rate)
    second: _Rate = field(default_factory=_Rate)
    idle: int = 0


_Node = tuple[float, int, bool, int]
"""Less the tokens that it is worth; its depth; whether it is a second guess; the number of its sequence."""


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
    is worth p**d tokens, where p is the share of the sequence's drafts that were right; a second guess beside it
    p**(d - 1) * (1 - p) times the share of these that were right where the first one was not; a node of a tree with
    known gains its gain, times what the sequence's trees gave as a part of what was expected of them.

    What drafts have cost and what they saved is added up, so that they never cost more than a small share of the time,
    whatever the guesses are worth.

    Args:
        gains: of a proposer whose trees always have the same shape: what each node is expected to be worth.
        pairs: of a proposer that can give a second guess beside each draft of a chain.
    """

    def __init__(self, gains: ListOf[float] = (), *, pairs: bool = False) -> None:
        self.cost = StepCost()
        self.pairs: list[int] = []
        """Of the last sizes: nodes that are second guesses, beside the first ones of a chain."""
        self._gains, self._has_pairs = gains, pairs
        self._known: dict[Sequence, _Known] = {}
        self._all = _Known()
        self._level_times: deque[float] = deque(maxlen=KEPT)
        self._level_seconds = 0.0
        self._last: _Step | None = None
        self._with_drafts = 0
        self._credit: float | None = None  # seconds; None: no step has run

    def sizes(self, sequences: ListOf[Sequence], most: ListOf[int], rows: int) -> list[int]:
        """Nodes for each sequence, at most so many, in a step that has ``rows`` rows without them."""
        self._settle()
        nodes, self.pairs = [0] * len(sequences), [0] * len(sequences)
        self._last = _Step(len(sequences), rows)
        if not sequences or self._with_drafts >= min(PLAIN_AFTER, 2 * self.cost.times(rows)):
            self._with_drafts = 0
            return nodes
        plain = self.cost.at(rows)
        credit = CREDIT_FIRST * plain if self._credit is None else self._credit
        for _, _, is_second, number in self._best(sequences, most, rows, credit):
            nodes[number] += 1
            self.pairs[number] += is_second
        self._probe(nodes, sequences, most, rows, plain + credit)
        self._last.drafts = sum(nodes)
        self._with_drafts += any(nodes)
        return nodes

    def learn(self, sequence: Sequence, nodes: int, depth: int, accepted: int, second: bool | None = None) -> None:
        """Of a tree of that size, so many drafts were right; those behind the first wrong one say nothing.

        ``second``: whether there it was the second guess; None: there was none.
        """
        tried = sum(self._gains[:nodes]) if self._gains else min(accepted + 1, depth)
        known = self._known.setdefault(sequence, _Known())
        for of, memory in ((known, MEMORY), (self._all, MEMORY_OF_ALL)):
            of.first.add(accepted, tried, memory)
            if self._has_pairs and accepted < tried:  # what was not tried for long is forgotten, and tried again
                of.second.add(bool(second), second is not None, memory)
        if self._last is not None:
            self._last.right += accepted + bool(second)

    def proposed(self, levels: int, seconds: float) -> None:
        """Making trees so deep took so long."""
        self._level_times.append(seconds / self._levels(max(1, levels)))
        self._level_seconds = _quartile(self._level_times)
        if self._credit is not None:
            self._credit -= seconds

    def ran(self, rows: int, seconds: float) -> None:
        """The step that was sized has run, with its drafts."""
        self.cost.add(rows, seconds)
        if self._last is not None:
            self._last.drafts = rows - self._last.rows

    def forget(self, sequence: Sequence) -> None:
        """It has ended."""
        self._known.pop(sequence, None)

    def _worth(self, sequence: Sequence, most: int, limit: int) -> list[tuple[float, int, bool]]:
        """Of so many nodes, the tokens that each is expected to give; its depth in a chain; if it is a second guess.

        ``limit``: of depths.
        """
        known = self._known.setdefault(sequence, _Known())
        if self._gains:
            share = known.first.estimate(self._all.first.estimate(1.0))
            return [(min(1.0, share * gain), depth, False) for depth, gain in enumerate(self._gains[:most], start=1)]
        right = known.first.estimate(self._all.first.estimate(FIRST_GUESS))
        nodes = [(right ** (depth - 1) * right, depth, False) for depth in range(1, min(most, limit) + 1)]
        if self._has_pairs:  # none is drafted without the first one
            share = min(right, (1 - right) * known.second.estimate(self._all.second.estimate(SECOND_GUESS)))
            nodes += [(right ** (depth - 1) * share, depth, True) for depth in range(1, min(most, limit) + 1)]
            nodes = sorted(nodes, key=lambda node: (-node[0], node[1:]))[:most]
        return nodes

    def _best(self, sequences: ListOf[Sequence], most: ListOf[int], rows: int, credit: float) -> list[_Node]:
        """The most valuable nodes, so many that tokens per second are highest.

        A second guess may be worth less than a first one that is deeper, but costs much less: no turn of the proposer.
        So depths are tried in turn where there are such.
        """
        plain = self.cost.at(rows)
        count, chosen = len(sequences), list[_Node]()
        best = count / plain
        deepest = max(most, default=0)
        for limit in range(1, deepest + 1) if self._has_pairs else [deepest]:
            worth = sorted(
                (-value, depth, is_second, number)
                for number, sequence in enumerate(sequences)
                for value, depth, is_second in self._worth(sequence, most[number], limit)
            )
            if not self._level_times:
                del worth[1:]  # what making drafts takes is not known
            tokens, levels = float(count), 0
            for nodes, (value, depth, _, _) in enumerate(worth, start=1):
                levels = max(levels, self._levels(depth))
                seconds = self._seconds(rows + nodes, levels)
                if seconds - plain > credit or (tokens - value * (len(worth) - nodes + 1)) / seconds <= best:
                    break  # it might cost too much, or even the best of what is to come gains nothing
                tokens -= value
                if tokens / seconds > best:
                    best, chosen = tokens / seconds, worth[:nodes]
        return chosen

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
        known = [self._known.setdefault(sequence, _Known()) for sequence in sequences]
        for of, count in zip(known, nodes, strict=True):
            of.idle = 0 if count else of.idle + 1
        total, level = sum(nodes), max(nodes)
        for number in sorted(range(len(known)), key=lambda number: -known[number].idle):
            probe = min(PROBE, most[number])
            level = max(level, probe)
            if known[number].idle <= PROBE_AFTER or self._seconds(rows + total + probe, self._levels(level)) > seconds:
                return
            nodes[number], known[number].idle = probe, 0
            total += probe

    def _settle(self) -> None:
        """Count what the drafts of the last step cost and saved."""
        last, self._last = self._last, None
        if last is None or not last.sequences or not self.cost.times(last.rows):
            return
        plain = self.cost.at(last.rows)
        if self._credit is None:
            self._credit = CREDIT_FIRST * plain
        saved = plain * (last.sequences + last.right) / last.sequences - self.cost.at(last.rows + last.drafts)
        most = CREDIT_MOST * plain  # and at least: one call that hung is not to be paid for ever
        self._credit = max(-most, min(self._credit + saved + ALLOWED * plain, most))
