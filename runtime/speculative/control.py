"""How many drafts a step gets: as many as pay for themselves. What they are changes no result, only its time."""

from __future__ import annotations

import math
from collections.abc import Sequence as ListOf
from dataclasses import dataclass

from llmc.runtime.request import Sequence

FREE_ROWS = 32
"""Before anything is measured, so many rows are taken to cost as much as the step itself."""

MEMORY = 0.9
"""Weight that an observation keeps at the next one."""

FIRST_GUESS, GUESS_WEIGHT = 0.7, 2.0
"""Of the share of drafts that are right, and of how many drafts that counts for."""

PROBE_AFTER, PROBE = 16, 2
"""Steps without drafts after which a sequence gets so many, to see whether they have become right."""

PLAIN_AFTER = 64
"""Steps with drafts after which one runs without, to see what that takes now."""

ALLOWED = 0.02
"""The share of all time that drafts may cost more than they save."""

CREDIT_FIRST, CREDIT_MOST = 2.0, 8.0
"""Steps without drafts: for as many drafts may go wrong before anything is known, and at any time."""

DISTURBED = 1.5
"""A step that takes so many times as long as another one of its size was disturbed, if there is only that one."""


class StepCost:
    """Seconds of a step by its rows, learnt from the steps that run and interpolated between them."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[float, float]] = {}  # (rows, seconds) on average, of sizes that are about the same

    def add(self, rows: int, seconds: float) -> None:
        """A step has run. One that took far longer was disturbed, and counts for less."""
        place = _place(rows)
        size, known = self._known.get(place, (float(rows), seconds))
        if seconds * DISTURBED < known:
            known = seconds
        known += (1 - MEMORY) * (min(seconds, 4 * known) - known)
        self._known[place] = size + (1 - MEMORY) * (rows - size), known

    def knows(self, rows: int) -> bool:
        """Whether a step of about that size has run."""
        return _place(rows) in self._known

    def at(self, rows: int) -> float:
        """Expected seconds; more rows never take less."""
        points = sorted(self._known.values())
        if not points:
            return float(rows + FREE_ROWS)
        below, least = points[0]
        if rows <= below:
            return least * (rows + FREE_ROWS) / (below + FREE_ROWS)
        for size, seconds in points[1:]:
            most = max(seconds, least)
            if rows <= size:
                return least + (most - least) * (rows - below) / (size - below)
            below, least = size, most
        return least * (rows + FREE_ROWS) / (below + FREE_ROWS)


def _place(rows: int) -> int:
    return round(2 * math.log2(rows))


@dataclass
class _Rate:
    """Drafts that were looked at, and those that were right; older ones count less."""

    right: float = 0.0
    tried: float = 0.0
    idle: int = 0
    """Steps since there were drafts."""

    def add(self, right: float, tried: float) -> None:
        self.right = MEMORY * self.right + right
        self.tried = MEMORY * self.tried + tried

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
        plain = self.cost.at(rows)
        credit = CREDIT_FIRST * plain if self._credit is None else self._credit
        best, chosen, tokens, deepest = len(sequences) / plain, 0, float(len(sequences)), 0
        for count, (value, depth, _) in enumerate(worth, start=1):
            tokens -= value
            deepest = max(deepest, 1 if self._gains else depth)
            seconds = self.cost.at(rows + count) + self._level_seconds * deepest
            if seconds - plain > credit:
                break
            if tokens / seconds > best:
                best, chosen = tokens / seconds, count
        for _, _, number in worth[:chosen]:
            nodes[number] += 1
        for number, sequence in enumerate(sequences):
            rate = self._rates[sequence]
            rate.idle = 0 if nodes[number] else rate.idle + 1
            probe = min(PROBE, most[number])
            if rate.idle > PROBE_AFTER and self._extra(rows + sum(nodes), probe) <= credit:
                nodes[number], rate.idle = probe, 0
        self._last.drafts = sum(nodes)
        self._with_drafts += any(nodes)
        return nodes

    def learn(self, sequence: Sequence, nodes: int, depth: int, accepted: int) -> None:
        """Of a tree of that size, so many drafts were right; those behind the first wrong one say nothing."""
        tried = sum(self._gains[:nodes]) if self._gains else min(accepted + 1, depth)
        for rate in (self._rates.setdefault(sequence, _Rate()), self._all):
            rate.add(accepted, tried)
        if self._last is not None:
            self._last.right += accepted

    def proposed(self, levels: int, seconds: float) -> None:
        """Making trees so deep took so long."""
        if self._gains:
            levels = min(levels, 1)  # all at once
        if levels:
            self._level_seconds = MEMORY * self._level_seconds + (1 - MEMORY) * seconds / levels
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

    def _extra(self, rows: int, drafts: int) -> float:
        return self.cost.at(rows + drafts) - self.cost.at(rows) + self._level_seconds * (1 if self._gains else drafts)

    def _settle(self) -> None:
        """Count what the drafts of the last step cost and saved."""
        last, self._last = self._last, None
        if last is None or not last.sequences or not self.cost.knows(last.rows):
            return
        plain = self.cost.at(last.rows)
        if self._credit is None:
            self._credit = CREDIT_FIRST * plain
        saved = plain * (last.sequences + last.right) / last.sequences - self.cost.at(last.rows + last.drafts)
        self._credit = min(self._credit + saved + ALLOWED * plain, CREDIT_MOST * plain)
