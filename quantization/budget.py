"""Mixed precision: which format for which layer, so that the sum of their damage is least within a size."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from llmc.errors import UsageError

_MOST_POINTS = 20_000  # of the front while layers are added; beyond it, only the best of each interval of sizes is kept
_BUDGET = re.compile(r"(\d+(?:\.\d+)?)\s*bpw")
_INCREASE = re.compile(r"\+?(\d+(?:\.\d+)?)\s*%")


@dataclass(frozen=True)
class Candidate:
    """A way to store a layer: its label, its size in bits with scales and all, and the damage that was measured."""

    label: str
    bits: int
    damage: float


@dataclass(frozen=True)
class Assignment:
    """A candidate's label for each layer, and the sums of sizes (bits) and damage."""

    labels: dict[str, str]
    bits: int
    damage: float


@dataclass(frozen=True, eq=False)
class Front:
    """All assignments that no other beats in both size and damage, by size; exact up to 20000 of them.

    Sums of damage are what is compared: that of a layer is taken not to depend on the other layers.
    """

    bits: npt.NDArray[np.int64]
    damage: npt.NDArray[np.float64]
    layers: Mapping[str, Sequence[Candidate]]
    _steps: list[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]]

    def __len__(self) -> int:
        return len(self.bits)

    def at(self, index: int) -> Assignment:
        """An assignment of the front."""
        labels: dict[str, str] = {}
        place = index
        for (name, candidates), (parents, choices) in zip(
            reversed(list(self.layers.items())), reversed(self._steps), strict=True
        ):
            labels[name] = candidates[int(choices[place])].label
            place = int(parents[place])
        ordered = {name: labels[name] for name in self.layers}
        return Assignment(ordered, int(self.bits[index]), float(self.damage[index]))

    def within_size(self, bits: float) -> Assignment:
        """The least damage within a size. Raises UsageError if nothing is small enough."""
        index = int(np.searchsorted(self.bits, bits, side="right")) - 1
        if index < 0:
            raise UsageError(f"--budget: {bits:.0f} bits are too few; the smallest assignment takes {self.bits[0]}")
        return self.at(index)

    def within_damage(self, damage: float) -> Assignment:
        """The least size within a sum of damage. Raises UsageError if nothing is good enough."""
        found = np.flatnonzero(self.damage <= damage)
        if not len(found):
            raise UsageError(f"damage of {damage:.6g} at most: the best assignment does {self.damage[-1]:.6g}")
        return self.at(int(found[0]))

    def table(self, rows: int = 40) -> list[Assignment]:
        """Assignments from the smallest to the best, evenly over the sizes, for a report."""
        targets = np.linspace(self.bits[0], self.bits[-1], rows)
        places = np.searchsorted(self.bits, targets, side="right") - 1
        return [self.at(int(place)) for place in np.unique(places)]


def pareto_front(layers: Mapping[str, Sequence[Candidate]]) -> Front:
    """Adds layer after layer to the front of those before, and keeps what is not beaten."""
    bits, damage = np.zeros(1, np.int64), np.zeros(1, np.float64)
    steps: list[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]] = []
    for name, candidates in layers.items():
        assert candidates, f"{name}: no candidates"
        sizes = np.add.outer([candidate.bits for candidate in candidates], bits).ravel()
        sums = np.add.outer([candidate.damage for candidate in candidates], damage).ravel()
        kept = _unbeaten(sizes, sums)
        steps.append((kept % len(bits), kept // len(bits)))
        bits, damage = sizes[kept], sums[kept]
    return Front(bits, damage, dict(layers), steps)


def parse_budget(text: str) -> float:
    """``4.3bpw`` -> bits per weight. Raises UsageError."""
    match = _BUDGET.fullmatch(text.strip())
    if not match or not 0 < float(match[1]) <= 32:
        raise UsageError(f"--budget {text}: expected bits per weight, such as 4.3bpw")
    return float(match[1])


def parse_increase(text: str) -> float:
    """``2%`` -> 0.02. Raises UsageError."""
    match = _INCREASE.fullmatch(text.strip())
    if not match or not 0 < float(match[1]) < 10_000:
        raise UsageError(f"--max-ppl-increase {text}: expected a share of the perplexity, such as 2%")
    return float(match[1]) / 100


def _unbeaten(sizes: npt.NDArray[np.int64], sums: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    """The places of the points that none beats, by size; of equal ones the first."""
    order = np.lexsort((sums, sizes))
    lowest = np.minimum.accumulate(sums[order])
    better = np.ones(len(order), bool)
    better[1:] = lowest[1:] < lowest[:-1]
    kept = order[better]
    if len(kept) > _MOST_POINTS:
        low, high = int(sizes[kept[0]]), int(sizes[kept[-1]])
        interval = (sizes[kept] - low) * _MOST_POINTS // (high - low + 1)
        last = np.append(interval[1:] != interval[:-1], True)
        last[0] = True  # the smallest, whatever it costs
        kept = kept[last]
    return np.asarray(kept, np.int64)
