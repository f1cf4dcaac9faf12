"""Chooses the tree of guesses: what gains most for what its rows cost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmc.errors import UsageError
from llmc.runtime import strict
from llmc.runtime.heads import HeadTree

AUTO, CHAIN = "auto", "chain:"
NODES = 64
"""Of a tree that is chosen, at most."""

RANKS = 10
"""Candidates of a head that are looked at."""

Cost = tuple[tuple[int, float], ...]
"""(rows, time of a step with so many rows, as a multiple of the time with one), rising."""

COSTS: Mapping[str, Cost] = {
    "cpu": ((1, 1.0), (2, 1.03), (4, 1.08), (8, 1.2), (16, 1.7), (32, 3.8), (64, 7.0)),
    "cuda": ((1, 1.0), (16, 1.02), (64, 1.1), (256, 1.6)),
}
"""What a device is taken to cost, if nothing is measured: an estimate for a small model on two cores with AVX-512; and
for GPUs, where nothing was ever measured, for steps that take as long as it takes to read the weights."""


@dataclass(frozen=True)
class Choice:
    """A tree, and of its best size: nodes, tokens that a step is expected to give (1: no guesses), the speedup."""

    tree: HeadTree
    nodes: int
    tokens_per_step: float
    speedup: float


def given_tree(text: str, heads: int) -> HeadTree | None:
    """The tree of ``chain:4`` or of a file; None for auto.

    Raises:
        UsageError: it is none, or is not for so many heads.
    """
    where = f"--medusa-tree {text}"
    if text == AUTO:
        return None
    if text.startswith(CHAIN):
        count = text.removeprefix(CHAIN)
        if not count.isdecimal() or not 1 <= int(count[:9]) <= heads:
            raise UsageError(f"{where}: expected a number from 1 to {heads}, the number of heads")
        paths: Any = [[0] * depth for depth in range(1, int(count) + 1)]
    else:
        path = Path(text)
        if path.suffix != ".json":
            raise UsageError(f"{where}: expected auto, chain:N or a .json file of paths, [[0], [0, 0], [1]]")
        try:
            paths = strict.parse_json(path.read_bytes(), text, UsageError)
        except OSError as problem:
            raise UsageError(f"{where}: can't be read ({problem.strerror})") from None
        if isinstance(paths, dict):
            paths = paths.get("paths")
        rows = paths if isinstance(paths, list) else [None]
        if not all(isinstance(row, list) and all(type(rank) is int for rank in row) for row in rows):
            raise UsageError(f"{where}: expected a list of paths, [[0], [0, 0], [1]]")
    tree = HeadTree(heads, tuple(tuple(path) for path in paths))
    tree.check(where, UsageError)
    return tree


def choose(ranks: NDArray[np.int64], cost: Cost, heads_cost: float) -> Choice:
    """The most valuable nodes, and of how many of them tokens per time are expected to be highest.

    The first n nodes are the best tree of n. So the tree has more than that: a step takes as many as pay, by what is
    measured then, which can be more than was expected, but never more than there are.

    The nodes are added in the order of what they gain, as in section 2.3.3 of the paper; but a path's gain is not the
    product of the accuracies of its heads: it is the share of places where all of them were right together.

    Args:
        ranks: [places, heads], which candidate of each head was right; RANKS or more: none that counts.
        cost: of the rows of a step.
        heads_cost: of the heads, as a multiple of a step with one row.
    """
    places, heads = ranks.shape
    counts: Counter[tuple[int, ...]] = Counter()
    for row in ranks.tolist():
        for depth, rank in enumerate(row, 1):
            if rank >= RANKS:
                break
            counts[tuple(row[:depth])] += 1
    if not counts:
        raise UsageError("--medusa: no head was right at any place of the calibration; are these heads of this model?")
    order = sorted(counts, key=lambda path: (-counts[path], len(path), path))[:NODES]
    best, tokens, found = 0, 1.0, (0.0, 1.0)
    for number, path in enumerate(order, 1):
        tokens += counts[path] / places
        speedup = tokens / (step_cost(cost, 1 + number) + heads_cost)
        if speedup > found[0]:
            best, found = number, (speedup, tokens)
    accuracy = tuple(
        tuple(round(float((ranks[:, head] == rank).mean()), 4) for rank in range(RANKS)) for head in range(heads)
    )
    tree = HeadTree(heads, tuple(order), accuracy, tuple(round(counts[path] / places, 4) for path in order))
    return Choice(tree, best, round(found[1], 4), round(found[0], 4))


def step_cost(cost: Cost, rows: int) -> float:
    """Between two rows that are known, a straight line; beyond the last one, its slope."""
    known, times = np.array([r for r, _ in cost], float), np.array([t for _, t in cost], float)
    if rows > known[-1]:
        slope = (times[-1] - times[-2]) / (known[-1] - known[-2])
        return float(times[-1] + slope * (rows - known[-1]))
    return float(np.interp(rows, known, times))


def read_cost(value: Any, where: str) -> Cost:
    """A table of a recipe.json.

    Raises:
        UsageError: it is none.
    """
    fits = isinstance(value, list) and len(value) > 1 and all(isinstance(p, list) and len(p) == 2 for p in value)
    if fits and all(type(r) is int and isinstance(t, int | float) and r > 0 and t > 0 for r, t in value):
        return tuple((rows, float(time)) for rows, time in value)
    raise UsageError(f"{where}: the table of costs is damaged")


def shown(tree: HeadTree, vocabulary: int) -> str:
    """For people: 12 nodes, 5, 4, 3 at depth 1 to 3; 3 heads, which choose from so many tokens."""
    widths = [sum(len(path) == depth for path in tree.paths) for depth in range(1, tree.depth + 1)]
    nodes = f"{len(tree.paths)} nodes, {', '.join(map(str, widths))} at depth 1 to {tree.depth}"
    return f"{nodes}; {tree.heads} heads of {vocabulary} tokens"
