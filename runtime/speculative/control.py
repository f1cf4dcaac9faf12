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


class StepCost:
    """Seconds of a step by its rows, learnt from the steps that run and interpolated between them."""

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}

    def add(self, rows: int, seconds: float) -> None:
        """A step has run. One that took far longer was disturbed, and counts for less."""
        place = round(2 * math.log2(rows))
        known = self._seconds.get(place, seconds)
        self._seconds[place] = MEMORY * known + (1 - MEMORY) * min(seconds, 4 * known)

    def at(self, rows: int) -> float:
        """Expected seconds; more rows never take less."""
        points = sorted((2 ** (place / 2), seconds) for place, seconds in self._seconds.items())
        if not points:
            return float(rows + FREE_ROWS)
        below, least = points[0]
        if rows <= below:
            return least * (rows + FREE_ROWS) / (below + FREE_ROWS)
        for place, seconds in points[1:]:
            most = max(seconds, least)
            if rows <= place:
                return least + (most - least) * (rows - below) / (place - below)
            below, least = place, most
        return least * (rows + FREE_ROWS) / (below + FREE_ROWS)


@dataclass
class _Rate:
    """Drafts that were looked at, and those that were right; older ones count less."""

    right: float = 0.0
    tried: float = 0.0
    idle: int = 0
    """Steps since there were drafts."""

    def add(self, right: int, tried: int) -> None:
        self.right = MEMORY * self.right + right
        self.tried = MEMORY * self.tried + tried

    def estimate(self, guess: float) -> float:
        return (self.right + GUESS_WEIGHT * guess) / (self.tried + GUESS_WEIGHT)


class Controller:
    """Chooses sizes of trees by the acceptance of each sequence, the cost of rows and that of making drafts.

    A draft at depth d is worth p**d tokens, where p is the share of the sequence's drafts that were right. Drafts are
    added, the most valuable first, up to where tokens per second are highest.
    """

    def __init__(self) -> None:
        self.cost = StepCost()
        self._rates: dict[Sequence, _Rate] = {}
        self._all = _Rate()
        self._level_seconds = 0.0

    def sizes(self, sequences: ListOf[Sequence], most: ListOf[int], rows: int) -> list[int]:
        """Nodes for each sequence, at most so many, in a step that has ``rows`` rows without them."""
        worth: list[tuple[float, int, int]] = []
        for number, sequence in enumerate(sequences):
            right = self._rates.setdefault(sequence, _Rate()).estimate(self._all.estimate(FIRST_GUESS))
            worth += [(-(right**depth), depth, number) for depth in range(1, most[number] + 1)]
        worth.sort()
        best, chosen, tokens, deepest = len(sequences) / self.cost.at(rows), 0, float(len(sequences)), 0
        for count, (value, depth, _) in enumerate(worth, start=1):
            tokens -= value
            deepest = max(deepest, depth)
            speed = tokens / (self.cost.at(rows + count) + self._level_seconds * deepest)
            if speed > best:
                best, chosen = speed, count
        nodes = [0] * len(sequences)
        for _, _, number in worth[:chosen]:
            nodes[number] += 1
        for number, sequence in enumerate(sequences):
            rate = self._rates[sequence]
            rate.idle = 0 if nodes[number] else rate.idle + 1
            if rate.idle > PROBE_AFTER:
                nodes[number], rate.idle = min(PROBE, most[number]), 0
        return nodes

    def learn(self, sequence: Sequence, depth: int, accepted: int) -> None:
        """Of a tree so deep, so many drafts were right; those behind the first wrong one say nothing."""
        for rate in (self._rates.setdefault(sequence, _Rate()), self._all):
            rate.add(accepted, min(accepted + 1, depth))

    def proposed(self, levels: int, seconds: float) -> None:
        """Making trees so deep took so long."""
        if levels:
            self._level_seconds = MEMORY * self._level_seconds + (1 - MEMORY) * seconds / levels

    def forget(self, sequence: Sequence) -> None:
        """It has ended."""
        self._rates.pop(sequence, None)
