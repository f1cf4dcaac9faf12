"""Makes report.html. Names of tensors, texts and warnings come from files of strangers: all of it is escaped."""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2

import llmc
from llmc.compiler.engine_writer import EngineContents
from llmc.compiler.evaluation.table import Row, figure_rows
from llmc.compiler.progress import format_bytes
from llmc.compiler.report.plots import Plot, bars, strip
from llmc.compiler.summary import GOAL_HEADS, goal_rows, goal_text

if TYPE_CHECKING:
    from llmc.compiler.evaluation.figures import Figures

TEMPLATE = "page.html.jinja"

KINDS = 6
"""Colours of plots: k0 to k5."""

HIDDEN = ("Cc", "Cf", "Cs", "Co", "Zl", "Zp")
"""Categories of characters that are shown by their number: control, direction marks, halves of pairs, ..."""

KEPT = "\n\t"


@dataclass(frozen=True)
class WeightRow:
    """One line of the table of weights. Fields are texts; ``error`` is empty for what was not quantized."""

    name: str
    source: str
    format: str
    bits: str
    group: str
    size: str
    error: str
    output_error: str
    reason: str


def render(
    contents: EngineContents, report: Mapping[str, Any], files: Mapping[str, int], figures: Figures | None
) -> bytes:
    """The page, the same bytes for the same arguments.

    Args:
        contents: of the engine.
        report: of report.json.
        files: sizes of the engine's other files.
        figures: of ``report["quality"]``, or None.
    """
    environment = jinja2.Environment(
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        finalize=lambda value: visible(value) if isinstance(value, str) else value,
    )
    coverage = _coverage(report)
    kinds = _kinds(coverage)
    page = environment.get_template(TEMPLATE).render(
        version=llmc.__version__,
        model=contents.model,
        tiles=_tiles(contents, report),
        memory=_memory(report["sizes"]),
        memory_plot=_memory_plot(report["sizes"]),
        files=[(name, format_bytes(size)) for name, size in files.items()],
        formats=_formats(coverage),
        format_plot=_format_plot(coverage, kinds),
        goal=report.get("quantization", {}).get("goal"),
        goal_heads=GOAL_HEADS,
        goal_rows=goal_rows,
        goal_text=goal_text,
        sensitivity=_sensitivity_plot(report),
        weights=[_weight(row) for row in coverage],
        errors=_error_plot(coverage, kinds, "error"),
        output_errors=_error_plot(coverage, kinds, "output_error"),
        figures=figures,
        figure_rows=_figures(figures),
        perplexities=_perplexity_plot(figures),
        gate=report.get("gate"),
        drafts=_drafts(report),
        notes=_notes(report),
        recipe=_flat(contents.recipe.get("options", {})) + _flat(contents.recipe.get("versions", {})),
    )
    return page.encode()


def visible(text: str) -> str:
    """Show characters that are invisible, change the direction of text, or must not stand in a page."""
    if type(text) is not str:  # markup of jinja itself
        return text
    if text.isascii() and text.isprintable():
        return text
    return "".join(c if c in KEPT or unicodedata.category(c) not in HIDDEN else f"\\u{{{ord(c):x}}}" for c in text)


def _tiles(contents: EngineContents, report: Mapping[str, Any]) -> list[tuple[str, str]]:
    model, sizes = contents.model, report["sizes"]
    bits = 8 * sizes["weight_bytes"] / max(1, model.parameters)
    return [
        ("parameters", f"{model.parameters / 1e6:,.1f} M" if model.parameters >= 1e6 else f"{model.parameters:,}"),
        ("weights", format_bytes(sizes["weight_bytes"])),
        ("bits per parameter", f"{bits:.2f}"),
        ("KV cache", contents.kv_cache.dtype + (", less means" if report["kv_cache"].get("centred") else "")),
        ("longest sequence", f"{contents.limits.max_seq_len:,}"),
        ("target", contents.target + ("" if contents.target == "cpu" else ", not verified on hardware")),
    ]


def _memory(sizes: Mapping[str, Any]) -> list[tuple[str, str]]:
    labels = {
        "weight_bytes": "weights, on disk and in memory",
        "largest_weight_bytes": "largest weight",
        "arena_bytes": "activations at the largest step",
        "kv_bytes_per_token": "KV cache of a token",
        "kv_bytes_per_sequence": "KV cache of a full sequence",
    }
    return [(label, format_bytes(sizes[key])) for key, label in labels.items()]


def _drafts(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What the engine can draft with, besides itself."""
    rows = []
    if medusa := report.get("medusa"):
        rows.append(("Medusa heads", medusa["shown"]))
        rows.append(("weights of the heads", format_bytes(medusa["own_bytes"])))
        rows.append(("read for a draft", format_bytes(medusa["read_bytes"])))
        if expected := medusa.get("expected"):
            measured = f"of {expected['nodes']} nodes; measured at {expected['places']:,} places"
            rows.append(("expected", f"{expected['tokens_per_step']:.2f} tokens a step {measured}"))
            rows.append(("expected speed", f"{expected['speedup']:.2f} times that without drafts"))
        for number, head in enumerate(medusa["tree"].get("accuracy", ()), 1):
            rows.append((f"head {number} right", f"{head[0]:.1%}; among five: {sum(head[:5]):.1%}"))
    if eagle := report.get("eagle"):
        rows.append(("EAGLE layer", eagle["shown"]))
        rows.append(("weights of the layer", format_bytes(eagle["own_bytes"])))
        rows.append(("what it keeps of a token", format_bytes(eagle["kv_bytes_per_token"])))
    return rows


def _memory_plot(sizes: Mapping[str, Any]) -> Plot | None:
    parts = (
        ("weights", "weight_bytes"),
        ("activations", "arena_bytes"),
        ("KV cache of one full sequence", "kv_bytes_per_sequence"),
    )
    return strip(
        [(sizes[key], f"{label}: {format_bytes(sizes[key])}", f"k{i}") for i, (label, key) in enumerate(parts)]
    )


def _coverage(report: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What is known of each weight; of an engine without quantization, how it is stored."""
    if "coverage" in report:
        return list(report["coverage"])
    if "quantization" in report:
        return [_entry(entry) for entry in report["quantization"]["weights"]]
    return [{"name": n, "format": w["dtype"], "bytes": w["bytes"]} for n, w in report["weights"].items()]


def _entry(entry: Mapping[str, Any]) -> dict[str, Any]:
    """One of a quantization's: without a ``format`` where the weight has been ``kept`` for a reason."""
    stored = entry.get("dtype") or entry.get("source_dtype") or "as it was"
    known = {"format": entry.get("format", stored), "reason": entry.get("kept", "")}
    bits = {"bits": entry["bits_per_weight"]} if "bits_per_weight" in entry else {}
    return {**entry, **known, **bits}


def _kinds(coverage: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """A colour for each format."""
    return {name: f"k{i % KINDS}" for i, name in enumerate(sorted({str(row["format"]) for row in coverage}))}


def _formats(coverage: Sequence[Mapping[str, Any]]) -> list[tuple[str, str, str]]:
    """(format, weights, bytes)."""
    result = []
    for name in sorted({str(row["format"]) for row in coverage}):
        rows = [row for row in coverage if str(row["format"]) == name]
        size = sum(row.get("bytes") or 0 for row in rows)
        result.append((name, str(len(rows)), format_bytes(size) if size else ""))
    return result


def _format_plot(coverage: Sequence[Mapping[str, Any]], kinds: Mapping[str, str]) -> Plot | None:
    sizes = dict.fromkeys(kinds, 0)
    for row in coverage:
        sizes[str(row["format"])] += row.get("bytes") or 0
    return strip([(size, f"{name}: {format_bytes(size)}", kinds[name]) for name, size in sizes.items()])


def _weight(row: Mapping[str, Any]) -> WeightRow:
    group, bits = row.get("group"), row.get("bits")
    size = row.get("bytes")
    return WeightRow(
        name=str(row["name"]),
        source=str(row.get("source_dtype") or ""),
        format=str(row["format"]),
        bits="" if bits is None else f"{bits:.4g}",
        group="" if group is None else ("row" if group == 0 else str(group)),
        size="" if size is None else format_bytes(size),
        error=_share(row.get("error")),
        output_error=_share(row.get("output_error")),
        reason=str(row.get("reason") or ""),
    )


def _share(value: float | None) -> str:
    return "" if value is None else f"{value * 100:.3g} %"


def _error_plot(coverage: Sequence[Mapping[str, Any]], kinds: Mapping[str, str], key: str) -> Plot | None:
    values = [
        (float(row[key]), f"{row['name']}: {_share(row[key])}", kinds[str(row["format"])])
        for row in coverage
        if row.get(key) is not None
    ]
    used = {kind for _, _, kind in values}
    legend = tuple((kind, name) for name, kind in kinds.items() if kind in used)
    return bars(values, "first layer", "last layer", legend)


def _sensitivity_plot(report: Mapping[str, Any]) -> Plot | None:
    layers = report.get("quantization", {}).get("goal", {}).get("layers", {})
    kinds = {label: f"k{i % KINDS}" for i, label in enumerate(sorted({layer["chosen"] for layer in layers.values()}))}
    values = [
        (layer["kl"], f"{name}: {layer['kl']:.3g}, {layer['chosen']}", kinds[layer["chosen"]])
        for name, layer in layers.items()
    ]
    return bars(values, "first layer", "last layer", tuple((kind, label) for label, kind in kinds.items()))


def _perplexity_plot(figures: Figures | None) -> Plot | None:
    if figures is None:
        return None
    held = figures.reference_window_perplexities
    values = []
    for i, own in enumerate(figures.window_perplexities):
        if held:
            values.append((held[i], f"window {i}, source: {held[i]:.5g}", "k1"))
        values.append((own, f"window {i}, engine: {own:.5g}", "k0"))
    legend = (("k1", "source"), ("k0", "engine")) if held else ()
    return bars(values, "first window", "last window", legend)


def _figures(figures: Figures | None) -> list[Row]:
    return [] if figures is None else figure_rows(figures)


def _notes(report: Mapping[str, Any]) -> list[str]:
    notes = [*report.get("warnings", ()), *(f"{name}: {text}" for name, text in report.get("notes", {}).items())]
    notes += [f"not used: {name}" for name in report.get("ignored_tensors", ())]
    return [str(note) for note in notes]


def _flat(values: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [(str(name), str(value)) for name, value in sorted(values.items()) if value not in (None, "", False)]
