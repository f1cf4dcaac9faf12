"""The manifest of all weights of an engine: what was quantized how and with which error, and why the rest was not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llmc.compiler.lower import LoweredGraph
from llmc.compiler.quantize.decisions import Planned, method_text
from llmc.compiler.quantize.sites import WEIGHT_INPUTS, Site
from llmc.compiler.quantize.work import Record
from llmc.compiler.safetensors_writer import Tensor
from llmc.errors import CompileError
from llmc.plugins import all_ops
from llmc.quantization.base import Activations, Method

CODES, SCALE, ZERO, X_SCALE = "", ".scale", ".zero", ".x_scale"

BASE_KEYS = frozenset(
    [
        "name",
        "tensor",
        "role",
        "rows",
        "columns",
        "source_dtype",
        "bytes",
        "experts",
        "chosen_by",
        "bits",
        "bits_per_weight",
    ]
)
"""Keys of an entry that don't come from the result of a method."""

PANEL = 16
LINE_COLUMNS = {"int4": 8, "int8": 4, "fp8": 2}
LINE_BYTES = {"int4": 64, "int8": 64, "fp8": 32}
"""Columns of a line of a panel, and the bytes that it takes: said here once more, to check what was written."""


@dataclass(frozen=True)
class Predicted:
    """A tensor that will be made: its size is known, its numbers are not."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int

    def chunks(self) -> Any:
        """There are none."""
        raise AssertionError(f"{self.name} has not been quantized")

    def part(self, name: str, count: int) -> Predicted:
        """One of so many along the first dimension."""
        return Predicted(name, self.dtype, (count, *self.shape[1:]), self.nbytes * count // self.shape[0])


def predicted_sizes(site: Site, method: Method) -> dict[str, int]:
    """The bytes of the tensors of a quantized weight, by suffix, as its method implies; scales as float16."""
    scheme = method.weights
    rows = (site.experts or 1) * -(-site.rows // PANEL)
    widths = [scheme.group] * (site.columns // scheme.group) if scheme.group else []
    widths += [site.columns - sum(widths)] if site.columns > sum(widths) else []
    lines = sum(-(-width // LINE_COLUMNS[scheme.format]) for width in widths)
    sizes = {CODES: rows * lines * LINE_BYTES[scheme.format], SCALE: rows * len(widths) * PANEL * 2}
    if not scheme.symmetric:
        sizes[ZERO] = rows * len(widths) * PANEL
    if method.activations is Activations.STATIC and site.product is not None and site.experts is None:
        sizes[X_SCALE] = 4
    return sizes


def check(planned: Planned, graph: LoweredGraph) -> None:
    """Everything that was to be quantized is, and takes the bytes that the recipe implies.

    Raises:
        CompileError: names what was skipped, or both sizes.
    """
    for step in graph.steps:
        for index in WEIGHT_INPUTS.get(step.op, ()):
            view = step.inputs[index]
            name = "" if view is None else view.buffer.name
            decision = planned.decisions.get(name)
            if decision and decision.method and view is not None and view.dtype != "uint8":
                raise CompileError(f"{name}: was to be quantized by {method_text(decision.method)}, but was skipped")
    for site in planned.chosen:
        for suffix, expected in predicted_sizes(site, planned.method(site)).items():
            tensor = graph.weights.get(site.name + suffix)
            found = 0 if tensor is None else tensor.nbytes
            wide = suffix == SCALE and tensor is not None and tensor.dtype == "float32"
            if found != expected * (2 if wide else 1):
                raise CompileError(f"{site.name}{suffix}: takes {found} bytes, but the recipe implies {expected}")


def manifest(
    planned: Planned,
    graph: LoweredGraph,
    stored: Mapping[str, Tensor],
    records: Mapping[str, Record],
    touched: frozenset[str],
) -> dict[str, Any]:
    """For report.json: a summary, and an entry for each weight.

    Args:
        planned: what was asked for.
        graph: the quantized one.
        stored: the tensors of the engine, by name.
        records: results by the names of the weights.
        touched: weights that stay floats, but have factors folded into them.
    """
    entries = []
    seen: set[str] = set()
    for site in planned.sites:
        names = [site.name + suffix for suffix in (CODES, SCALE, ZERO, X_SCALE) if site.name + suffix in stored]
        if not names:
            continue  # nothing reads it
        seen.update(names)
        entries.append(_site_entry(site, planned, records.get(site.name), sum(stored[name].nbytes for name in names)))
        if site.name in touched:
            entries[-1]["scaled"] = "columns, with those of the others that read the same input"
    uses = _uses(graph)
    for name, tensor in stored.items():
        if name not in seen:
            what = uses.get(name, "constant")
            entry = {"name": name, "dtype": tensor.dtype, "bytes": tensor.nbytes, "kept": what}
            entries.append(entry | ({"scaled": "divided by factors of the inputs"} if name in touched else {}))
    return {"summary": _summary(planned, entries), "weights": entries}


def _site_entry(site: Site, planned: Planned, record: Record | None, nbytes: int) -> dict[str, Any]:
    decision = planned.decisions[site.name]
    entry: dict[str, Any] = {
        "name": site.label,
        "tensor": site.name,
        "role": site.role,
        "rows": site.rows,
        "columns": site.columns,
        "source_dtype": site.source.dtype,
        "bytes": nbytes,
    }
    if site.experts is not None:
        entry["experts"] = site.experts
    if decision.method is None:
        return entry | {"kept": decision.reason}
    assert record is not None, f"{site.name} was quantized"
    rule = {"chosen_by": decision.reason} if decision.reason else {}
    bits = {"bits": decision.method.weights.bits, "bits_per_weight": round(8 * nbytes / site.numbers, 4)}
    return entry | rule | dict(record.facts) | bits


def _summary(planned: Planned, entries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    quantized = [entry for entry in entries if "format" in entry]
    numbers = sum(site.numbers for site in planned.chosen)
    nbytes = sum(entry["bytes"] for entry in quantized)
    formats = sorted({entry["format"] for entry in quantized})
    return {
        "formats": formats,
        "quantized": len(quantized),
        "kept": len(entries) - len(quantized),
        "numbers": numbers,
        "bytes": nbytes,
        "kept_bytes": sum(entry["bytes"] for entry in entries if "format" not in entry),
        "bits_per_weight": round(8 * nbytes / numbers, 4),
        "worst": [entry["name"] for entry in sorted(quantized, key=lambda e: -e["error"])[:5]],
    }


def _uses(graph: LoweredGraph) -> dict[str, str]:
    """What each weight is an input of: ``weight of norm``."""
    found: dict[str, str] = {}
    for step in graph.steps:
        inputs = all_ops()[step.op].plan_inputs
        for index, view in enumerate(step.inputs):
            if view is not None:
                found.setdefault(view.buffer.name, f"{inputs[index].rstrip('?')} of {step.op}")
    return found
