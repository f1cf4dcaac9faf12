"""Drafts for tests of speculation."""

from __future__ import annotations

import random
from typing import Any, Self

from llmc.runtime.speculative.base import Proposer, Query, Setting, Tree


class Oracle(Proposer):
    """Random trees that contain what a model says next, as far as a coin allows."""

    name = "oracle"

    def __init__(self, model: Any, seed: int, right: float = 0.7, vocab_size: int = 384) -> None:
        self._model, self._rng, self._right, self._vocab_size = model, random.Random(seed), right, vocab_size
        self.forgotten: list[Any] = []
        self.known: set[Any] = set()

    @classmethod
    def open(cls, argument: str, setting: Setting) -> Self:
        raise NotImplementedError

    def propose(self, queries: list[Query]) -> list[Tree]:
        return [self._propose(query) for query in queries]

    def forget(self, sequence: Any) -> None:
        self.forgotten.append(sequence)
        self.known.discard(sequence)

    def _propose(self, query: Query) -> Tree:
        self.known.add(query.sequence)
        tokens: list[int] = []
        parents: list[int] = []
        paths: list[tuple[int, ...]] = [tuple(query.sequence.tokens)]
        for _ in range(self._rng.randrange(query.nodes + 3)):
            parent = self._rng.randrange(-1, len(tokens))
            token = self._rng.randrange(self._vocab_size + 2)  # some that the model does not have
            if self._rng.random() < self._right:
                token = int(self._model(paths[parent + 1]).argmax())
            if (parent, token) not in zip(parents, tokens, strict=True):
                tokens.append(token)
                parents.append(parent)
                paths.append((*paths[parent + 1], token))
        return Tree(tuple(tokens), tuple(parents))
