"""Trees that grow level by level: of all candidates so far, the likeliest are followed (EAGLE-2, arXiv:2406.16858).

Where drafts are drawn at random, which are followed may not depend on what they are: then a tree is a `DraftPath`.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from llmc.runtime.sampling import draw_token
from llmc.runtime.speculative.base import Query, Tree
from llmc.runtime.speculative.draft_path import DraftPath

WIDTH = 8
"""Candidates that are followed on each level, and those that each of them gets."""


class Growth:
    """The tree of one query.

    A candidate is worth the product of the probabilities on the way to it. Where the sequence draws its tokens, the one
    that its own random number draws from the draft's distribution counts as the likeliest.
    """

    def __init__(self, query: Query, nodes: int, depth: int) -> None:
        """``nodes``, ``depth``: at most."""
        self._query, self._nodes, self._depth = query, nodes, depth
        self._tokens: list[int] = []
        self._parents: list[int] = []
        self._worth: list[float] = []
        self._depths: list[int] = []
        self._newest = 0
        self.followed: list[int] = []
        """Of the best candidates: those below which there are others, or are to be. Each is behind its parent."""

    @property
    def tokens(self) -> list[int]:
        """Of those that are followed."""
        return [self._tokens[candidate] for candidate in self.followed]

    @property
    def depths(self) -> list[int]:
        """The same; 1: below the sequence's last token."""
        return [self._depths[candidate] for candidate in self.followed]

    @property
    def above(self) -> list[int]:
        """The same, the candidates below which they are; -1: the sequence's last token."""
        return [self._parents[candidate] for candidate in self.followed]

    @property
    def parents(self) -> list[int]:
        """The same, by their places in ``followed``; -1: the sequence's last token."""
        places = {candidate: place for place, candidate in enumerate(self.followed)} | {-1: -1}
        return [places[candidate] for candidate in self.above]

    def add(self, place: int, logits: NDArray[np.float32], ids: NDArray[np.int32] | None = None) -> None:
        """Candidates below the one at a place of ``followed`` (-1: the last token), by logits [vocabulary].

        ``ids``: the tokens that the logits are of.
        """
        parent = -1 if place < 0 else self.followed[place]
        highest = float(logits.max())
        if not math.isfinite(highest):
            return
        total = highest + math.log(float(np.exp(logits - highest).sum(dtype=np.float64)))
        count = min(WIDTH, self._nodes, len(logits))
        best = np.argpartition(-logits, count - 1)[:count]
        best = best[np.lexsort((best, -logits[best]))]
        depth = 1 if parent < 0 else self._depths[parent] + 1
        if (drawn := self._drawn(logits, ids, depth)) is not None:
            best = np.concatenate([[drawn], best[best != drawn][: count - 1]])
        worth = 0.0 if parent < 0 else self._worth[parent]
        for number, index in enumerate(best):
            likely = highest if number == 0 else float(logits[index])
            self._tokens.append(int(index if ids is None else ids[index]))
            self._parents.append(parent)
            self._worth.append(worth + min(0.0, likely - total))
            self._depths.append(depth)

    def follow(self) -> list[int]:
        """The places, in ``followed``, of the newest candidates that are to have others below them; maybe none.

        What is not among the best now won't be later, nor will anything below it.
        """
        best = set(self._best()[: self._nodes - 1])
        level = [n for n in range(self._newest, len(self._tokens)) if n in best and self._depths[n] < self._depth]
        self._newest = len(self._tokens)
        level = sorted(sorted(level, key=self._order)[:WIDTH])
        self.followed = [candidate for candidate in self.followed if candidate in best] + level
        return list(range(len(self.followed) - len(level), len(self.followed)))

    @property
    def tree(self) -> Tree:
        """The best candidates."""
        best = sorted(self._best())
        places = {candidate: place for place, candidate in enumerate(best)} | {-1: -1}
        return Tree(tuple(self._tokens[n] for n in best), tuple(places[self._parents[n]] for n in best))

    def _best(self) -> list[int]:
        """So many that what is below a candidate never goes before it."""
        return sorted(range(len(self._tokens)), key=self._order)[: self._nodes]

    def _order(self, candidate: int) -> tuple[float, int]:
        return -self._worth[candidate], candidate

    def _drawn(self, logits: NDArray[np.float32], ids: NDArray[np.int32] | None, depth: int) -> int | None:
        """Where the token is that the sequence would draw; None: the likeliest one."""
        sequence = self._query.sequence
        if sequence.request.params.temperature == 0:
            return None
        token = draw_token(_of_all(logits, ids), sequence, position=len(sequence.tokens) + depth - 1)
        return token if ids is None else int(np.flatnonzero(ids == token)[0])


class DrawnGrowth(Growth):
    """One whose candidates are drawn, as many beside each other as there is room for; all of them are in the tree."""

    def __init__(self, query: Query, nodes: int, depth: int) -> None:
        super().__init__(query, nodes, depth)
        limit = min(nodes - nodes // 3, depth)
        self._path = DraftPath(query, limit, nodes - limit, draws=True)
        self._tokens, self._parents = self._path.tokens, self._path.parents

    def add(self, place: int, logits: NDArray[np.float32], ids: NDArray[np.int32] | None = None) -> None:
        """As of all; ``place`` is that of the last one that was followed."""
        del place
        self._path.grow(_of_all(logits, ids))
        self._depths += [len(self._path.drafts)] * (len(self._tokens) - len(self._depths))

    def follow(self) -> list[int]:
        """The first of the newest ones."""
        if len(self._path.drafts) >= self._path.limit:
            return []
        self.followed.append(self._path.end)
        return [len(self.followed) - 1]

    @property
    def tree(self) -> Tree:
        """All candidates."""
        return self._path.tree


def _of_all(logits: NDArray[np.float32], ids: NDArray[np.int32] | None) -> NDArray[np.float32]:
    """Logits of all tokens up to the last one of ``ids``."""
    if ids is None:
        return logits
    row = np.full(int(ids.max()) + 1, -np.inf, np.float32)
    row[ids] = logits
    return row
