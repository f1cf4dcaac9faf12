"""Medusa heads of an engine: the files that hold them, read with checks, and the tree that they are asked for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from llmc.errors import EngineError
from llmc.runtime import plan_file, strict
from llmc.runtime.manifest import Limits
from llmc.runtime.plan import Dim, Plan

if TYPE_CHECKING:
    from llmc.runtime.engine import Weight

PLAN, WEIGHTS, TREE = "medusa/plan.json", "medusa/weights.safetensors", "medusa/tree.json"
FILES = (PLAN, WEIGHTS, TREE)
HIDDEN = "hidden"
"""The value of the plan that is written from outside: [N, hidden size]."""

TOKEN_IDS = "medusa.token_ids"
"""Not read by the plan: the tokens that it gives logits of, rising, if these are not all of the model."""

MOST_NODES, MOST_RANKS = 256, 64


@dataclass(frozen=True)
class HeadTree:
    """Which guesses are tried.

    Attributes:
        heads: how many there are; head k speaks of the token k places after the one that the model itself gave.
        paths: the nodes, best first; a node is the rank of the candidate of each head on the way to it.
        accuracy: measured, of each head, the share of tokens that had rank 0, 1, ...; empty: not measured.
        gains: measured, of each path, the share of places where all of it was right; empty: not measured.
    """

    heads: int
    paths: tuple[tuple[int, ...], ...]
    accuracy: tuple[tuple[float, ...], ...] = ()
    gains: tuple[float, ...] = ()

    def check(self, where: str, error: type[Exception] = EngineError) -> None:
        """Raise an error if it is no tree for these heads."""
        if not self.paths or len(self.paths) > MOST_NODES:
            raise error(f"{where}: {len(self.paths)} paths, expected 1 to {MOST_NODES}")
        if self.gains and (len(self.gains) != len(self.paths) or not all(0 <= gain <= 1 for gain in self.gains)):
            raise error(f"{where}: expected a gain from 0 to 1 for each of {len(self.paths)} paths, or none")
        known: set[tuple[int, ...]] = {()}
        for path in self.paths:
            if not 1 <= len(path) <= self.heads:
                raise error(f"{where}: path {list(path)} has {len(path)} tokens, but there are {self.heads} heads")
            if not all(0 <= rank < MOST_RANKS for rank in path):
                raise error(f"{where}: path {list(path)}: a rank is 0 to {MOST_RANKS - 1}")
            if path in known or path[:-1] not in known:
                what = "is there twice" if path in known else f"comes before {list(path[:-1])}, below which it hangs"
                raise error(f"{where}: path {list(path)} {what}")
            known.add(path)

    @property
    def depth(self) -> int:
        """Of the longest path."""
        return max(map(len, self.paths))


@dataclass(frozen=True)
class EngineHeads:
    """What an engine has besides its model. ``plan``: `HIDDEN` -> logits [heads * N, V], row k * N + n of row n.

    ``token_ids``: [V], rising, the tokens of the model that these are of; None: all.
    """

    plan: Plan
    weights: Mapping[str, Weight]
    tree: HeadTree
    token_ids: NDArray[np.int32] | None = None

    @property
    def vocabulary(self) -> int:
        """Tokens that they choose from."""
        return self.plan.value(self.plan.logits).shape[1].constant


def read_heads(
    plan: bytes,
    tree: bytes,
    own: Mapping[str, Weight],
    shared: Mapping[str, Weight],
    vocabulary: int,
    limits: Limits,
    where: str,
) -> EngineHeads:
    """Parse and check.

    Args:
        plan: content of the file.
        tree: the same.
        own: weights of the heads.
        shared: those of the model, which the plan may name too.
        vocabulary: of the model.
        limits: of the engine; the heads take as many rows as it runs sequences.
        where: the engine's path, for messages.

    Raises:
        EngineError: they contradict each other.
    """
    found = strict.load(HeadTree, strict.parse_json(tree, f"{where}/{TREE}"), f"{where}/{TREE}")
    found.check(f"{where}/{TREE}")
    weights = {**shared, **own}
    shapes = {weight.name: (weight.dtype, weight.shape) for weight in weights.values()}
    few = Limits(limits.max_seq_len, limits.max_sequences, limits.max_sequences)
    parsed = plan_file.from_bytes(plan, shapes, few, f"{where}/{PLAN}", logits=Dim(rows=found.heads))
    if parsed.kv_slots or parsed.input_width(HIDDEN, Dim(rows=1)) is None:
        raise EngineError(f"{where}/{PLAN}: heads keep no cache and have an input {HIDDEN!r}; build the engine anew")
    ids = weights.pop(TOKEN_IDS).array if TOKEN_IDS in weights else None
    count = parsed.value(parsed.logits).shape[1].constant
    if ids is None:
        fits = count == vocabulary
    else:
        fits = ids.dtype == np.int32 and ids.shape == (count,) and ids[0] >= 0 and ids[-1] < vocabulary
        fits = fits and bool((np.diff(ids) > 0).all())
    if not fits:
        raise EngineError(f"{where}/{PLAN}: its {count} logits are not those of tokens of the model; build it anew")
    if max(map(max, found.paths)) >= count:
        raise EngineError(f"{where}/{TREE}: the tree asks for more candidates than {count}; give another tree")
    used = {str(value.base) for value in parsed.values if value.storage.value == "weight"}
    return EngineHeads(parsed, {name: weight for name, weight in weights.items() if name in used}, found, ids)
