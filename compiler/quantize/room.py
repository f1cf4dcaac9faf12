"""How much disk the folder takes that a quantization works in, and how much memory quantizing takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from llmc.compiler.lower import LoweredGraph
from llmc.compiler.quantize import kv_cache
from llmc.compiler.quantize.activations import MEMORY_BYTES
from llmc.compiler.quantize.coverage import predicted_sizes
from llmc.compiler.quantize.decisions import Planned
from llmc.compiler.quantize.experts import GROUP_BYTES, HELD_ROWS
from llmc.compiler.quantize.interpreter import CHUNK_TOKENS, STRETCH_BYTES, lifetimes, own_keys
from llmc.compiler.quantize.pack import PANEL_BYTES
from llmc.compiler.quantize.sensitivity import LENGTH, ROWS, WINDOWS
from llmc.compiler.quantize.sites import Site
from llmc.compiler.quantize.spend import formats_of, free_layers
from llmc.compiler.weights import numpy_dtype
from llmc.quantization.base import Method, Statistics
from llmc.quantization.calibration import MOST_SAMPLES, CalibrationSettings
from llmc.quantization.descent import BLOCK, ROWS_BYTES
from llmc.quantization.rounding import SEARCH_ROWS
from llmc.quantization.statistics import SAMPLE

COPIES = 8
"""Of the rows that a method works on, in float32: codes, errors, and what else it makes of them."""


@dataclass(frozen=True)
class Room:
    """Bytes, at most. ``memory``: above Python's imports and what every build takes."""

    disk: int = 0
    memory: int = 0


NO_ROOM = Room()


def room_for(planned: Planned | None, graph: LoweredGraph, calibration: CalibrationSettings, kv_dtype: str) -> Room:
    """What it takes to quantize weights, and to measure the keys of a quantized cache: one after the other.

    The feedback of errors of keys is found from twice as much.
    """
    feedback = kv_cache.feedback_bytes(kv_dtype, graph.kv_slots.values())
    feedback = feedback if feedback <= kv_cache.FEEDBACK_BYTES else 0
    keys = run_bytes(graph, calibration.length) + 3 * feedback if kv_cache.is_centred(kv_dtype) else 0
    if planned is None:
        return Room(0, keys)
    return Room(work_bytes(planned, calibration), max(keys, memory_bytes(planned, calibration)))


def work_bytes(planned: Planned, calibration: CalibrationSettings) -> int:
    """At most: the codes, what is known of the inputs, and the activations of a calibration that go to files."""
    layers = free_layers(planned) if planned.has_goal else {}
    free = {site.name for sites in layers.values() for site in sites}
    total = 0
    for site in planned.chosen:
        method = planned.method(site)
        kept = formats_of(method)[-1] if site.name in free else method
        total += sum(predicted_sizes(site, kept).values())
        sees = planned.has_goal or (method.needs is not Statistics.NONE and (method.folds or not method.sequential))
        if sees and site.product is not None:
            total += (SAMPLE + 2) * site.columns * 4 * (1 if site.experts is None else site.experts + 1)
    if not planned.needs_calibration:
        return total
    each = max(_between(planned.graph))
    tokens = (calibration.samples or MOST_SAMPLES) * calibration.length
    trials = (len(layers) + 1) * WINDOWS * LENGTH * each if planned.has_goal else 0
    return total + max(trials, 2 * tokens * each)  # they are saved too


def memory_bytes(planned: Planned, calibration: CalibrationSettings) -> int:
    """Memory that quantizing takes, at most: about a layer, and some of the activations."""
    sites = [_site_bytes(site, planned.method(site)) for site in planned.chosen]
    run = run_bytes(planned.graph, calibration.length) if planned.needs_calibration else 0
    logits = 3 * 4 * ROWS * planned.graph.logits.shape[-1].constant if planned.has_goal else 0
    return run + max(logits, *sites)


def run_bytes(graph: LoweredGraph, length: int) -> int:
    """Memory that running steps over calibration tokens takes: weights of a stretch, activations, and a chunk's own."""
    largest = max((tensor.nbytes for tensor in graph.weights.values()), default=0)
    tokens = max(CHUNK_TOKENS, length)
    chunk = max(_during(graph)) + max(
        (4 * slot.kv_heads * (slot.key_dim + slot.value_dim) for slot in graph.kv_slots.values()), default=0
    )
    return MEMORY_BYTES + max(STRETCH_BYTES, largest) + tokens * chunk


def _site_bytes(site: Site, method: Method) -> int:
    """A weight (or an expert's) in float32, what is known of its inputs, and rows that are being worked on."""
    numbers, columns = site.rows * site.columns, site.columns
    if method.needs is Statistics.NONE:
        return COPIES * (PANEL_BYTES if method.row_block is not None else max(PANEL_BYTES, 4 * numbers))
    sampled = 4 * 4 * HELD_ROWS * columns
    if method.needs is Statistics.INPUTS:
        kept = sampled if site.experts is None else max(GROUP_BYTES, sampled)
        return kept + 5 * numbers + COPIES * max(PANEL_BYTES, 4 * SEARCH_ROWS * columns)
    hessian = 4 * columns**2  # and twice as much for its factor
    kept = hessian if site.experts is None else max(GROUP_BYTES, hessian)
    rows = min(site.rows, ROWS_BYTES // (4 * columns) + 1)
    searched = max(8 * SAMPLE * rows, COPIES * 4 * SEARCH_ROWS * columns) if method.folds else 0
    return sampled + kept + 2 * hessian + 6 * numbers + searched + COPIES * max(ROWS_BYTES, 4 * BLOCK * columns)


def _between(graph: LoweredGraph) -> Sequence[int]:
    """Bytes for each token that are kept between steps: before each."""
    return _live(graph, 1)


def _during(graph: LoweredGraph) -> Sequence[int]:
    """The same, while each step runs: with what it writes."""
    return _live(graph, 0)


def _live(graph: LoweredGraph, later: int) -> Sequence[int]:
    first, last = lifetimes(own_keys(graph.steps))
    changes = [0] * (len(graph.steps) + 2)
    for buffer, begin in first.items():
        size = buffer.elements.tokens * numpy_dtype(buffer.dtype).itemsize
        changes[begin + later] += size
        changes[last[buffer] + 1] -= size
    found, held = [], 0
    for change in changes:
        held += change
        found.append(held)
    return found
