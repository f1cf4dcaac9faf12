"""Quantizes one weight, piece by piece where the method allows it, and keeps it packed in the work folder."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmc.compiler.quantize.decisions import method_text
from llmc.compiler.quantize.sites import Site
from llmc.compiler.quantize.work import Record, Work, Writer
from llmc.compiler.weights import WeightSource
from llmc.plugins.quantized_linear import packing
from llmc.quantization.base import LayerInputs, Method, Quantized
from llmc.quantization.deterministic import single_threaded

PANEL_BYTES = 8 << 20
"""Float32 numbers that are quantized at a time, where rows don't depend on each other."""

CODES, SCALE, ZERO, X_SCALE = "", ".scale", ".zero", ".x_scale"
"""What the names of the tensors have after that of the weight."""

Inputs = Callable[[int | None], LayerInputs | None]
"""What arrives at an expert, or (None) at the only matrix."""


@dataclass
class _Errors:
    """Squared sums over a weight, in float64."""

    weight: float = 0.0
    error: float = 0.0
    output: float = 0.0
    output_error: float = 0.0
    worst_expert: float = 0.0
    notes: list[dict[str, Any]] = field(default_factory=list)

    def add(self, weight: NDArray[np.float32], rounded: NDArray[np.float32]) -> None:
        self.weight += float(np.sum(np.square(weight, dtype=np.float64)))
        self.error += float(np.sum(np.square(rounded.astype(np.float64) - weight)))

    def add_outputs(self, weight: NDArray[np.float32], rounded: NDArray[np.float32], rows: NDArray[np.float32]) -> None:
        with single_threaded():
            self.output += float(np.sum(np.square(rows @ weight.T, dtype=np.float64)))
            self.output_error += float(np.sum(np.square(rows @ (rounded - weight).T, dtype=np.float64)))


def quantize_site(
    site: Site,
    source: WeightSource,
    method: Method,
    work: Work,
    inputs: Inputs | None = None,
    facts: dict[str, Any] | None = None,
    advance: Callable[[int], None] = lambda _: None,
) -> Record:
    """Quantize a weight, unless it has been done.

    Args:
        site: the weight.
        source: its numbers, with the factors that were folded into it.
        method: how.
        work: where the result is kept.
        inputs: what arrives there, for methods that ask for it.
        facts: more for the report.
        advance: is told the numbers that are done.

    Raises:
        CompileError: numbers that are not finite.
        ResourceError: the disk is full.
    """
    # long: one pass over the weight makes codes, scales and the errors of the report
    found = work.find(site.name)
    if found is not None:
        advance(site.numbers)
        return found
    scheme, experts = method.weights, site.experts
    errors, static = _Errors(), _static(method, inputs, experts)
    facts = dict(facts or {})
    scales: list[NDArray[Any]] = []
    zeros: list[NDArray[Any]] = []

    def codes() -> Iterator[NDArray[np.uint8]]:
        for expert in range(experts or 1):
            given = inputs(None if experts is None else expert) if inputs is not None else None
            before = errors.error, errors.weight
            parts: tuple[list[NDArray[Any]], list[NDArray[Any]]] = ([], [])
            for weight, quantized, notes in pieces(site, source, method, given, None if experts is None else expert):
                errors.notes += [notes] if notes else []
                for begin, end in row_ranges(*weight.shape):
                    rounded = quantized.rows(begin, end).dequantize()
                    errors.add(weight[begin:end], rounded)
                    if given is not None and len(given.rows):
                        errors.add_outputs(weight[begin:end], rounded, given.rows)
                parts[0].append(quantized.scale)
                if quantized.zero is not None:
                    parts[1].append(quantized.zero)
                advance(weight.size)
                yield packing.pack(scheme.format, scheme.group, quantized.codes)
            scales.append(np.concatenate(parts[0]))
            if parts[1]:
                zeros.append(np.concatenate(parts[1]))
            share = _ratio(errors.error - before[0], errors.weight - before[1])
            errors.worst_expert = max(errors.worst_expert, share)

    lead = () if experts is None else (experts,)
    shape = packing.packed_shape(scheme.format, site.rows, site.columns, scheme.group)
    with work.record(site.name, facts) as writer:
        writer.tensor(CODES, "uint8", (*lead, *shape), codes())
        _write_scales(writer, SCALE, scales, packing.scale_dtype(np.concatenate(scales)), lead)
        if zeros:
            _write_scales(writer, ZERO, zeros, zeros[0].dtype.name, lead)
        if static is not None:
            writer.tensor(X_SCALE, "float32", (1,), iter([np.array([static], np.float32)]))
        facts |= _facts(site, method, errors)
    record = work.find(site.name)
    assert record is not None, "it was just written"
    return record


def dequantized(site: Site, record: Record, work: Work, expert: int | None = None) -> Iterator[NDArray[np.float32]]:
    """The numbers [rows, columns] that a weight, or one of its experts, stands for: some rows after the other."""
    tensors, facts = work.tensors(record), record.facts

    def matrix(suffix: str) -> NDArray[Any]:
        return tensors[suffix].read() if expert is None else tensors[suffix].read(expert, expert + 1)[0]

    packed = {suffix: matrix(suffix) for suffix in (CODES, SCALE, ZERO) if suffix in tensors}
    for begin, end in row_ranges(site.rows, site.columns):
        panels = slice(begin // packing.PANEL, -(-end // packing.PANEL))
        codes = packing.unpack(facts["format"], facts["group"], packed[CODES][panels], end - begin, site.columns)
        scale = packing.unpack_scales(packed[SCALE][panels], end - begin)
        zero = packing.unpack_scales(packed[ZERO][panels], end - begin) if ZERO in packed else None
        yield packing.dequantize(facts["format"], facts["group"], codes, scale, zero)


def row_ranges(rows: int, columns: int) -> Iterator[tuple[int, int]]:
    """Whole panels of rows that are looked at together: so many bytes of float32 numbers, not all of a weight."""
    step = max(1, PANEL_BYTES // (4 * packing.PANEL * columns)) * packing.PANEL
    return ((begin, min(rows, begin + step)) for begin in range(0, rows, step))


def pieces(
    site: Site, source: WeightSource, method: Method, inputs: LayerInputs | None, expert: int | None
) -> Iterator[tuple[NDArray[np.float32], Quantized, dict[str, Any]]]:
    """Rows of a matrix, what they become, and notes: all of them, unless each row is quantized by itself."""
    name = site.label if expert is None else f"{site.label}, expert {expert}"
    step = site.rows
    if method.row_block is not None:
        unit = math.lcm(packing.PANEL, method.row_block)
        step = max(1, PANEL_BYTES // (4 * unit * site.columns)) * unit
    matrix = None if expert is None else source.rows(expert, expert + 1)[0].astype(np.float32)
    for start in range(0, site.rows, step):
        stop = min(site.rows, start + step)
        weight = source.rows(start, stop).astype(np.float32) if matrix is None else matrix[start:stop]
        quantized, notes = method.quantize(weight, inputs, name=name)
        yield weight, quantized, dict(notes)


def _write_scales(
    writer: Writer, suffix: str, matrices: Sequence[NDArray[Any]], dtype: str, lead: tuple[int, ...]
) -> None:
    packed = [packing.pack_scales(values, dtype) for values in matrices]
    writer.tensor(suffix, dtype, (*lead, *packed[0].shape), iter(packed))


def _static(method: Method, inputs: Inputs | None, experts: int | None) -> float | None:
    """The scale of static activations."""
    given = inputs(None) if inputs is not None and experts is None else None
    return None if given is None else method.activation_scale(given)


def _facts(site: Site, method: Method, errors: _Errors) -> dict[str, Any]:
    scheme = method.weights
    found: dict[str, Any] = {
        "method": method_text(method),
        "format": scheme.format,
        "group": scheme.group,
        "symmetric": scheme.symmetric,
        "error": _ratio(errors.error, errors.weight),
    }
    if errors.output:
        found["output_error"] = _ratio(errors.output_error, errors.output)
    if site.experts is not None:
        found["worst_expert_error"] = errors.worst_expert
    notes = _summary(errors.notes)
    return found | ({"notes": notes} if notes else {})


def _summary(notes: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One note, or the ranges of several: of pieces, or experts."""
    if len(notes) <= 1:
        return dict(notes[0]) if notes else {}
    found: dict[str, Any] = {}
    for key in sorted({key for note in notes for key in note}):
        values = [note[key] for note in notes if key in note]
        if all(isinstance(value, int | float) for value in values):
            found[key] = values[0] if min(values) == max(values) else {"least": min(values), "most": max(values)}
        else:
            texts = list(map(str, values))
            found[key] = {text: texts.count(text) for text in sorted(set(texts))}
    return found


def _ratio(error: float, whole: float) -> float:
    """The relative error in the Frobenius norm, with as many digits as mean something."""
    return float(f"{(error / whole) ** 0.5:.6g}") if whole > 0 else 0.0
