"""Proposes what Medusa heads guess from the row that gave the last token, and from that token (arXiv:2401.10774)."""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from llmc.errors import EngineError, UsageError
from llmc.runtime.batch import Batch, Executor
from llmc.runtime.devices import make_part
from llmc.runtime.engine import Engine
from llmc.runtime.heads import HIDDEN, MOST_NODES, MOST_RANKS, HeadTree
from llmc.runtime.speculative.base import Proposer, Query, Setting, Tree

GUESS = 0.5
"""What a head's best candidate is taken to be worth, where nothing was measured."""


FEW = 6
"""So many candidates are found one by one."""


class HeadRunner:
    """Runs the heads of an engine, on the device of its ``model`` if it has one.

    Raises:
        UsageError: the engine has none.
    """

    def __init__(
        self, engine: Engine, *, model: Executor | None = None, threads: int | None = None, isa: str | None = None
    ) -> None:
        part = _alone(engine)
        assert engine.heads is not None, "it was looked for"
        self.tree, self._token_ids = engine.heads.tree, engine.heads.token_ids
        self._most = engine.limits.max_sequences
        self._executor = make_part(part, model, num_blocks=1, threads=threads, isa=isa)
        self._width = part.plan.value(HIDDEN).shape[1].constant

    def best(self, hidden: NDArray[np.float32], tokens: NDArray[np.int32], ranks: int) -> NDArray[np.int64]:
        """The candidates of each head after each row [N, H] and the token that it gave [N]: [heads, N, ranks].

        The best come first.
        """
        if hidden.shape[1] != self._width:
            raise EngineError(f"heads for rows of {self._width} numbers were given {hidden.shape[1]}")
        spans = [slice(i, i + self._most) for i in range(0, len(hidden), self._most)]
        parts = [_best(self._run(hidden[span], tokens[span]), ranks) for span in spans]
        best = np.concatenate(parts, axis=1)
        return best if self._token_ids is None else self._token_ids[best].astype(np.int64)

    def _run(self, hidden: NDArray[np.float32], tokens: NDArray[np.int32]) -> NDArray[np.float32]:
        """Logits [heads, N, V]; valid until the next call."""
        rows = len(hidden)
        numbers, zeros = np.arange(rows + 1, dtype=np.int32), np.zeros(rows, np.int32)
        batch = Batch(tokens, zeros, numbers[:-1], numbers, zeros, zeros[:, None])
        return self._executor.run_on(batch, HIDDEN, hidden).reshape(self.tree.heads, rows, -1)


class MedusaProposer(Proposer):
    """See the module."""

    name: ClassVar[str] = "medusa"
    wants_hidden: ClassVar[bool] = True
    default_nodes: ClassVar[int] = MOST_NODES

    def __init__(self, runner: HeadRunner) -> None:
        self._runner = runner

    @classmethod
    def open(cls, argument: str, setting: Setting) -> Self:
        """With the heads of the engine itself."""
        if argument:
            raise UsageError(f"--spec medusa={argument}: the heads are those of the engine; leave ={argument} away")
        return cls(HeadRunner(setting.engine, model=setting.executor, threads=setting.threads, isa=setting.isa))

    @classmethod
    def beside(cls, engine: Engine, other: Engine | None) -> Engine:
        """The heads."""
        return _alone(engine)

    @property
    def gains(self) -> tuple[float, ...]:
        """As measured; else the product of what the heads are worth, or as if each candidate were half the last.

        Where the first head is right, the next ones are more often than elsewhere: products value depth too little.
        """
        tree = self._runner.tree
        if tree.gains:
            return tree.gains
        ranks = tree.accuracy or (tuple(GUESS**rank for rank in range(1, MOST_RANKS + 1)),) * tree.heads
        return tuple(
            math.prod(ranks[head][rank] if rank < len(ranks[head]) else 0.0 for head, rank in enumerate(path))
            for path in tree.paths
        )

    def propose(self, queries: list[Query]) -> list[Tree]:
        """One run of the heads for all sequences."""
        tree = self._runner.tree
        rows = [query.hidden[-1] for query in queries if query.hidden is not None]
        assert len(rows) == len(queries), "it wants them"
        tokens = np.array([query.sequence.tokens[-1] for query in queries], np.int32)
        is_cut = min(query.depth for query in queries) < tree.depth  # then later nodes are in place of deep ones
        paths = tree.paths if is_cut else tree.paths[: max(query.nodes for query in queries)]
        ranks = 1 + max(map(max, paths))
        best = self._runner.best(np.stack(rows), tokens, ranks).transpose(1, 0, 2)
        return [grow(tree, found, query.nodes, query.depth) for query, found in zip(queries, best, strict=True)]


def _alone(engine: Engine) -> Engine:
    """With the plan of the heads."""
    heads, limits = engine.heads, engine.limits
    if heads is None:
        raise UsageError(f"{engine.path}: has no Medusa heads; build it with: llmc build MODEL --medusa HEADS")
    few = dataclasses.replace(limits, max_batch_tokens=limits.max_sequences)
    manifest = dataclasses.replace(engine.manifest, limits=few)
    return dataclasses.replace(engine, manifest=manifest, plan=heads.plan, weights=heads.weights)


def grow(tree: HeadTree, candidates: NDArray[np.int64], nodes: int, depth: int) -> Tree:
    """The first nodes, none deeper than that, with the candidates [heads, ranks] of one row."""
    places: dict[tuple[int, ...], int] = {(): -1}
    tokens: list[int] = []
    parents: list[int] = []
    for path in tree.paths:
        if len(tokens) < nodes and len(path) <= depth:
            parents.append(places[path[:-1]])
            places[path] = len(tokens)
            tokens.append(int(candidates[len(path) - 1, path[-1]]))
    return Tree(tuple(tokens), tuple(parents))


def _first(logits: NDArray[np.float32], ranks: int) -> NDArray[np.int64]:
    """The same, found one after another: for a few that takes far less time."""
    left, result = logits.copy(), np.empty((*logits.shape[:-1], ranks), np.int64)
    for rank in range(ranks):
        result[..., rank] = found = left.argmax(axis=-1)
        np.put_along_axis(left, found[..., None], -np.inf, axis=-1)
    return result


def _best(logits: NDArray[np.float32], ranks: int) -> NDArray[np.int64]:
    """The ``ranks`` largest of the last axis, in falling order, the lower id first among equals."""
    ranks = min(ranks, logits.shape[-1])
    if ranks <= FEW:
        return _first(logits, ranks)
    chosen = np.sort(np.argpartition(-logits, ranks - 1, axis=-1)[..., :ranks], axis=-1)
    order = np.argsort(-np.take_along_axis(logits, chosen, -1), axis=-1, kind="stable")
    result: NDArray[np.int64] = np.take_along_axis(chosen, order, -1)
    return result
