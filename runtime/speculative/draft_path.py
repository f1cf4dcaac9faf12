"""Drafts that grow one below the other, each with others beside it, chosen as their sequence would choose."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from llmc.runtime.sampling import distribution, draw_token
from llmc.runtime.speculative import rules
from llmc.runtime.speculative.base import Query, Tree


@dataclass(eq=False)
class DraftPath:
    """The drafts of one query, as they grow.

    ``limit``, ``siblings``: how many at most, below each other and beside these. ``draws``: at random from the
    distribution of what drafts, which is kept, the siblings spread evenly; else the token that the sequence itself
    would draw, and beside each of the first ones the likeliest other.
    """

    query: Query
    limit: int
    siblings: int
    draws: bool
    drafts: list[int] = field(default_factory=list)
    """Those below each other."""
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    probabilities: list[NDArray[np.float32]] = field(default_factory=list)
    end: int = -1
    """Node of the last of the drafts."""

    def grow(self, row: NDArray[np.float32]) -> None:
        """Take the logits after the last draft."""
        sequence, place, level = self.query.sequence, len(self.tokens), len(self.drafts)
        position = len(sequence.tokens) + level
        if not self.draws:
            self.tokens.append(token := draw_token(row, sequence, position=position))
            if level < self.siblings:
                others = np.concatenate([row[:token], row[token + 1 :]])
                second = int(others.argmax())
                self.tokens.append(second + (second >= token))
        elif not np.isfinite(row.max()):
            self.limit = 0
            return
        else:
            left: rules.Probabilities | None = distribution(row, sequence.request.params)
            for number in range(1 + (self.siblings + self.limit - 1 - level) // self.limit):
                if left is not None:
                    self.probabilities.append(left.astype(np.float32))
                    self.tokens.append(rules.draft(left, sequence, position, number))
                    left = rules.without(left, self.tokens[-1])
        self.parents += [self.end] * (len(self.tokens) - place)
        self.drafts.append(self.tokens[place])
        self.end = place

    @property
    def tree(self) -> Tree:
        """All of them."""
        return Tree(tuple(self.tokens), tuple(self.parents), tuple(self.probabilities) if self.draws else None)
