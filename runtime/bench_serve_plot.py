"""Distributions of a load as one SVG, alone or in a page that needs nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

WIDTH, HEIGHT, LEFT, TOP = 300, 180, 46, 26
TITLES = {"ttft": "to the first text", "itl": "between pieces", "e2e": "whole answer"}


def page(series: Mapping[str, Sequence[float]], *, html: bool) -> str:
    """A panel for each measure: the share of requests (of pieces) that took at most so many ms."""
    panels = "".join(_panel(i, TITLES[name], values) for i, (name, values) in enumerate(series.items()))
    width, height = (WIDTH + LEFT + 14) * len(series), HEIGHT + TOP + 40
    svg = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'font-family="sans-serif" font-size="11">{panels}</svg>'
    )
    head = '<!DOCTYPE html><html lang="en"><meta charset="utf-8"><title>llmc bench serve</title>'
    return f'{head}<body style="max-width:1200px;margin:auto">{svg}</body></html>' if html else svg


def _panel(index: int, title: str, values: Sequence[float]) -> str:
    x0 = index * (WIDTH + LEFT + 14) + LEFT
    top = max(values, default=0.0) or 1.0
    shares = np.linspace(0, 100, 201)
    found = zip(shares, _quantiles(values, shares), strict=False)  # there are none of no values
    points = [(x0 + WIDTH * v / top, TOP + HEIGHT * (1 - s / 100)) for s, v in found]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    grid = "".join(
        f'<path d="M{x0} {TOP + HEIGHT * (1 - s / 100):.1f}h{WIDTH}" stroke="#ddd"/>'
        f'<text x="{x0 - 4}" y="{TOP + HEIGHT * (1 - s / 100) + 4:.1f}" text-anchor="end">{s} %</text>'
        for s in (0, 25, 50, 75, 100)
    )
    ticks = "".join(
        f'<text x="{x0 + WIDTH * f:.1f}" y="{TOP + HEIGHT + 15}" text-anchor="middle">{top * f:,.6g}</text>'
        for f in (0, 0.5, 1)
    )
    curve = f'<polyline points="{line}" fill="none" stroke="#1f6feb" stroke-width="2"/>' if values else ""
    return f'{grid}<text x="{x0}" y="14" font-weight="bold">{title}, ms</text>{ticks}{curve}'


def _quantiles(values: Sequence[float], shares: NDArray[np.float64]) -> list[float]:
    return [float(v) for v in np.percentile(values, shares)] if values else []
