"""Bars of every workload, one panel for each model and format, as shares of llmc's figure: plot.py DATA.json OUTPUT."""

import json
import statistics
import sys
from pathlib import Path
from typing import Any

import matplotlib.figure

matplotlib.rcParams["svg.fonttype"] = "none"  # text stays text: a small file

COLOURS = {"llmc": "#1b6ca8", "llama.cpp": "#e08e45", "OpenVINO": "#7fb069", "ONNX Runtime": "#b0a1ba"}


def panel(axes: Any, title: str, figures: dict[str, dict[str, list[float]]]) -> None:
    """Tokens a second relative to llmc's; higher is better."""
    workloads = [name for name, row in figures.items() if name not in ("load", "rss") and row["llmc"]]
    peers = [peer for peer in next(iter(figures.values())) if peer != "load average"]
    width = 0.8 / len(peers)
    for i, peer in enumerate(peers):
        places = [number + i * width for number in range(len(workloads))]
        medians = [statistics.median(figures[w][peer]) if figures[w][peer] else 0.0 for w in workloads]
        ours = [statistics.median(figures[w]["llmc"]) for w in workloads]
        bars = axes.bar(places, [m / o for m, o in zip(medians, ours, strict=True)], width, color=COLOURS.get(peer))
        bars.set_label(peer)
        axes.bar_label(bars, [f"{m:.0f}" for m in medians], fontsize=7)
    axes.set_xticks([number + 0.4 - width / 2 for number in range(len(workloads))], workloads, fontsize=8)
    axes.set_title(title, fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)


def main(data: str, output: str) -> None:
    """Draw the file."""
    figures = json.loads(Path(data).read_text())["figures"]
    panels = [(f"{model} {form}", rows) for model, forms in figures.items() for form, rows in forms.items()]
    figure = matplotlib.figure.Figure(figsize=(8, 0.6 + 2 * len(panels)), layout="constrained")
    grid = figure.subplots(len(panels), 1, squeeze=False)
    for axes, (title, rows) in zip(grid[:, 0], panels, strict=True):
        panel(axes, title, rows)
    figure.legend(*grid[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    figure.suptitle("tokens/s, bars relative to llmc", fontsize=9)
    figure.savefig(output)


if __name__ == "__main__":
    main(*sys.argv[1:])
