"""Geometry of the page's plots. A plot is WIDTH x HEIGHT units, stretched to its place; labels are HTML beside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

WIDTH, HEIGHT = 1000.0, 240.0

GAP = 0.2
"""Share of a bar's place that stays free."""


@dataclass(frozen=True)
class Bar:
    """A rectangle; ``kind`` is its colour, ``title`` is shown when it is pointed at."""

    x: float
    y: float
    width: float
    height: float
    title: str
    kind: str


@dataclass(frozen=True)
class Plot:
    """Bars over a common scale from 0 to ``largest``."""

    bars: tuple[Bar, ...]
    largest: float
    first: str
    """Label of the left end."""
    last: str
    """Label of the right end."""
    legend: tuple[tuple[str, str], ...] = ()
    """(kind, label)."""


def bars(
    values: Sequence[tuple[float, str, str]], first: str, last: str, legend: tuple[tuple[str, str], ...] = ()
) -> Plot | None:
    """Bars side by side, from (value, title, kind) with values of 0 and more; None if there is none."""
    if not values:
        return None
    largest = max(value for value, _, _ in values) or 1.0
    place = WIDTH / len(values)
    gap = GAP if len(values) <= WIDTH / 4 else 0.0
    made = []
    for i, (value, title, kind) in enumerate(values):
        height = HEIGHT * value / largest
        bar = Bar(
            round((i + gap / 2) * place, 2),
            round(HEIGHT - height, 2),
            round((1 - gap) * place, 2),
            round(height, 2),
            title,
            kind,
        )
        made.append(bar)
    return Plot(tuple(made), largest, first, last, legend)


def strip(parts: Sequence[tuple[float, str, str]]) -> Plot | None:
    """One bar in parts, from (size, label, kind); None if there is nothing."""
    total = sum(size for size, _, _ in parts)
    if total <= 0:
        return None
    made, x = [], 0.0
    for size, label, kind in parts:
        width = WIDTH * size / total
        made.append(Bar(round(x, 2), 0.0, round(width, 2), HEIGHT, label, kind))
        x += width
    return Plot(tuple(made), total, "", "", tuple((kind, label) for size, label, kind in parts if size))
