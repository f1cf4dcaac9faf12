"""What drafts of a sequence are expected to be worth, by what was seen of them."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as ListOf
from dataclasses import dataclass, field
from heapq import heapify, heappop, heapreplace
from itertools import accumulate
from typing import NamedTuple

MEMORY, MEMORY_OF_ALL = 0.9, 0.98
"""Weight that an observation keeps at the next one: of a sequence, and of all of them."""

FIRST_GUESS, GUESS_WEIGHT = 0.7, 2.0
"""Of the share of drafts that are right, and of how many drafts that counts for: few, or one that is lucky or unlucky
decides; more, and a sequence that differs from the others is not seen."""

KNOWN_MEMORY, KNOWN_WEIGHT = 0.95, 6.0
"""The same of trees with known gains: texts differ less from what was measured than a few steps do from another."""

SECOND_GUESS = 0.5
"""Of how often, where a draft was wrong, the one beside it is right."""

Node = tuple[float, int, bool, int]
"""Less the tokens that it is worth; its depth; whether it is a second guess; the number of its sequence."""


@dataclass
class Rate:
    """Of what was tried, and what of that was right; older observations count less."""

    right: float = 0.0
    tried: float = 0.0

    def add(self, right: float, tried: float, memory: float) -> None:
        """``memory``: the weight that what is known keeps."""
        self.right = memory * self.right + right
        self.tried = memory * self.tried + tried

    def estimate(self, guess: float, weight: float = GUESS_WEIGHT) -> float:
        """The share; a guess counts for a few observations."""
        return (self.right + weight * guess) / (self.tried + weight)


@dataclass
class Known:
    """Of a sequence: first guesses; those beside them, where the first was wrong; and steps since there were drafts."""

    first: Rate = field(default_factory=Rate)
    second: Rate = field(default_factory=Rate)
    idle: int = 0


class Outlook(NamedTuple):
    """Of one sequence, in tokens.

    Attributes:
        right: the chance that a draft is right; of trees with known gains, what they give as a part of these.
        first, second: what the first node is worth, and the one beside it.
        gained: what all nodes are.
    """

    right: float
    first: float
    second: float
    gained: float


NOTHING = Outlook(0.0, 0.0, 0.0, 0.0)


class Shape:
    """What is known of the trees of a proposer: the arguments of `Controller`."""

    def __init__(self, gains: ListOf[float], pairs: bool) -> None:
        self.gains, self.pairs = tuple(gains), pairs
        self.sums = (0.0, *accumulate(gains))
        self.memory = KNOWN_MEMORY if gains else MEMORY

    def outlook(self, known: Known, of_all: Known, most: int) -> Outlook:
        """Of a tree of so many nodes at most."""
        if self.gains:
            share = known.first.estimate(of_all.first.estimate(1.0, KNOWN_WEIGHT), KNOWN_WEIGHT)
            return Outlook(share, min(1.0, share * self.gains[0]), 0.0, share * self.sums[min(most, len(self.gains))])
        right = known.first.estimate(of_all.first.estimate(FIRST_GUESS))
        second = 0.0
        if self.pairs:
            second = min(right, (1 - right) * known.second.estimate(of_all.second.estimate(SECOND_GUESS)))
        gained = (right + second) * (1 - right**most) / (1 - right) if right < 1 else float(most)
        return Outlook(right, right, second, gained)

    def nodes(self, outlook: list[Outlook], worth: list[float], most: ListOf[int], limit: int) -> Iterator[Node]:
        """The nodes of all sequences, the most valuable first.

        Args:
            outlook: of each.
            worth: of a token of each.
            most: nodes of each.
            limit: of depths; of trees with known gains, of nodes.
        """
        heap: list[Node] = []
        left = list(most)
        for number, (of, factor) in enumerate(zip(outlook, worth, strict=True)):
            if of.gained > 0:
                heap.append((-factor * of.first, 1, False, number))
                if self.pairs:  # none is drafted without the first one
                    heap.append((-factor * of.second, 1, True, number))
        heapify(heap)
        limit = min(limit, len(self.gains)) if self.gains else limit
        while heap:
            value, depth, is_second, number = node = heap[0]
            if depth >= limit:
                heappop(heap)
            elif self.gains:
                below = -worth[number] * min(1.0, outlook[number].right * self.gains[depth])
                heapreplace(heap, (below, depth + 1, False, number))
            else:
                heapreplace(heap, (value * outlook[number].right, depth + 1, is_second, number))
            if left[number] > 0:
                left[number] -= 1
                yield node
