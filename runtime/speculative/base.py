"""What proposers give and get: trees of draft tokens, and what is known of the sequences that they continue."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence as ListOf
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from llmc.runtime.batch import Executor
    from llmc.runtime.engine import Engine
    from llmc.runtime.request import Sequence


@dataclass(frozen=True, eq=False)
class Tree:
    """Draft tokens of one sequence. Node i hangs below node ``parents[i]`` < i; -1: below the sequence's last token.

    ``probabilities``: of drafts that were drawn at random, the distribution [vocabulary] that each was drawn from.
    """

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    probabilities: tuple[NDArray[np.float32], ...] | None = None

    @staticmethod
    def chain(tokens: list[int] | tuple[int, ...]) -> Tree:
        """One path."""
        return Tree(tuple(tokens), tuple(range(-1, len(tokens) - 1)))

    def __len__(self) -> int:
        return len(self.tokens)

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Of each node; 1: below the sequence's last token."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent < 0 else depths[parent] + 1)
        return tuple(depths)

    @cached_property
    def children(self) -> dict[int, list[int]]:
        """The nodes below each node that has any, in order; those of -1 are below the sequence's last token."""
        below: dict[int, list[int]] = {}
        for node, parent in enumerate(self.parents):
            below.setdefault(parent, []).append(node)
        return below

    @property
    def is_chain(self) -> bool:
        """Whether each node hangs below the one before."""
        return all(parent == node - 1 for node, parent in enumerate(self.parents))

    def find(self, parent: int, token: int) -> int | None:
        """The node of that token below a node."""
        return next((node for node in self.children.get(parent, ()) if self.tokens[node] == token), None)

    def keep(self, kept: list[bool]) -> Tree:
        """The nodes that are to be kept and whose ancestors are, too."""
        place: dict[int, int] = {-1: -1}
        nodes: list[int] = []
        for node, parent in enumerate(self.parents):
            if kept[node] and parent in place:
                place[node] = len(nodes)
                nodes.append(node)
        if len(nodes) == len(self):
            return self
        return Tree(
            tuple(self.tokens[node] for node in nodes),
            tuple(place[self.parents[node]] for node in nodes),
            None if self.probabilities is None else tuple(self.probabilities[node] for node in nodes),
        )

    def cut(self, nodes: int, depth: int, vocab_size: int) -> Tree:
        """Its first nodes, none deeper than ``depth``, none a token that the model does not have."""
        return self.keep(
            [
                node < nodes and level <= depth and 0 <= token < vocab_size
                for node, (token, level) in enumerate(zip(self.tokens, self.depths, strict=True))
            ]
        )

    def check(self) -> None:
        """Raise AssertionError, for a bug of a proposer, if it is no tree, or a token is twice below a node."""
        assert len(self.tokens) == len(self.parents), "a tree has as many parents as tokens"
        assert all(-1 <= parent < node for node, parent in enumerate(self.parents)), "a parent comes before its nodes"
        places = set(zip(self.parents, self.tokens, strict=True))
        assert len(places) == len(self.tokens), "a node has two children of the same token"


def tree_masks(parts: ListOf[tuple[int, ListOf[int]]]) -> NDArray[np.uint64] | None:
    """`Batch.tree_mask` of sequences that have so many known new rows, and behind them a tree with these parents.

    A parent of -1 is the last known row. None: all trees are chains, whose rows see what is before them anyway.
    """
    if all(parent == node - 1 for _, parents in parts for node, parent in enumerate(parents)):
        return None
    words = -(-max(known + len(parents) for known, parents in parts) // 64)
    masks = []
    for known, parents in parts:
        seen = np.tri(known + len(parents), words * 64, dtype=bool)
        for node, parent in enumerate(parents):
            seen[known + node] = seen[known + parent] if known + parent >= 0 else False
            seen[known + node, known + node] = True
        masks.append(np.packbits(seen, axis=1, bitorder="little").view(np.uint64))
    return np.concatenate(masks)


@dataclass(frozen=True, eq=False)
class Query:
    """What a proposer gets to know of one sequence, whose tokens it only reads.

    ``nodes``, ``depth``: of the tree, at most; both are at least 1. ``hidden`` [m, hidden size], m >= 1, for a proposer
    that wants it: what went into the head for the rows that the last step took, in order of position; the logits of
    the last one gave the last token of ``sequence.tokens``. ``pairs``: so many of the nodes are second guesses, each
    beside one of the first drafts of a chain.
    """

    sequence: Sequence
    nodes: int
    depth: int
    hidden: NDArray[np.float32] | None = None
    pairs: int = 0


@dataclass(frozen=True)
class Setting:
    """What a proposer may build on. ``engine`` is the one whose tokens are proposed."""

    engine: Engine
    threads: int
    isa: str | None
    max_sequences: int
    num_blocks: int
    """Of the engine's KV cache."""
    other: Engine | None = None
    """The one that `Proposer.load` gave."""
    draws: bool = False
    """Whether drafts that are drawn at random are worth more than likely ones."""
    executor: Executor | None = None
    """That of the engine; what drafts shares its device."""


class Proposer(ABC):
    """Guesses how sequences go on. A file of this folder that holds a subclass is found by its ``name``.

    Attributes:
        name: for ``--spec``, before a "=".
        wants_hidden: queries have ``hidden``.
        wants_features: `observe` is told the features of the engine's plan.
        ahead: it keeps what it knows of a position in the blocks of the sequence, and so many tokens after a block are
            part of that; None: it keeps nothing there.
        default_nodes: of a tree at most, unless ``--spec-tokens`` says otherwise.
        pairs: it drafts chains, and heeds `Query.pairs`.
        draws: it heeds `Setting.draws`; how many drafts a tree has then may not depend on which they are.
    """

    name: ClassVar[str]
    wants_hidden: ClassVar[bool] = False
    wants_features: ClassVar[bool] = False
    ahead: ClassVar[int | None] = None
    default_nodes: ClassVar[int] = 8
    pairs: ClassVar[bool] = False
    draws: ClassVar[bool] = False

    @property
    def gains(self) -> tuple[float, ...]:
        """If all trees are the first nodes of the same one, the chance that each of these is right; else none."""
        return ()

    @classmethod
    @abstractmethod
    def open(cls, argument: str, setting: Setting) -> Self:
        """Make one; ``argument`` is what follows the "=" of ``--spec``.

        Raises:
            UsageError, EngineError: it does not suit the engine, or makes no sense.
        """

    @classmethod
    def load(cls, argument: str) -> Engine | None:
        """Another engine that it needs, if it needs one.

        Raises:
            UsageError, EngineError: as `open`.
        """
        del argument
        return None

    @classmethod
    def check(cls, engine: Engine, sampling: str) -> None:
        """Refuse what it can't draft for.

        Raises:
            UsageError: the engine or the rule of acceptance does not suit it.
        """
        return

    @classmethod
    def kv_bytes_per_token(cls, engine: Engine, other: Engine | None) -> int:
        """Memory that it keeps for each position of the engine's KV cache."""
        del engine
        return 0 if other is None else other.kv_bytes_per_token

    @classmethod
    def beside(cls, engine: Engine, other: Engine | None) -> Engine | None:
        """What takes memory of the device besides the engine."""
        del engine
        return other

    def behind(self, sequence: Sequence) -> int:
        """Tokens of it that `catch_up` would read; 0 where there is nothing, or so little that it does not count."""
        del sequence
        return 0

    def catch_up(self, queries: list[Query]) -> int:
        """Called before `propose`, with the same queries: read what is behind; returns how many tokens that were."""
        del queries
        return 0

    @abstractmethod
    def propose(self, queries: list[Query]) -> list[Tree]:
        """One tree for each, maybe empty. Called at most once a step."""

    def observe(self, seen: list[tuple[Sequence, int, NDArray[np.float32]]]) -> int:
        """Of these sequences, a step has computed the features [n, width] of n known tokens from a position on.

        Returns how many tokens were read at once for that.
        """
        del seen
        return 0

    def settle(self, sequence: Sequence) -> int:
        """After a step of it: for how many of its tokens the blocks have all that they are to have."""
        return sequence.num_computed

    def forget(self, sequence: Sequence) -> None:
        """A sequence has ended, or has been preempted: drop what is kept for it, if anything is."""
        return

    def close(self) -> None:
        """Give back what a device holds for it."""
        return
