"""How much disk the folder takes that a quantization works in."""

from __future__ import annotations

from llmc.compiler.lower import LoweredGraph
from llmc.compiler.quantize.activations import MEMORY_BYTES
from llmc.compiler.quantize.coverage import predicted_sizes
from llmc.compiler.quantize.decisions import Planned
from llmc.compiler.quantize.interpreter import lifetimes, own_keys
from llmc.compiler.quantize.sensitivity import LENGTH, WINDOWS
from llmc.compiler.quantize.spend import formats_of, free_layers
from llmc.compiler.weights import numpy_dtype
from llmc.quantization.base import Statistics
from llmc.quantization.calibration import MOST_SAMPLES, CalibrationSettings
from llmc.quantization.statistics import SAMPLE


def work_bytes(planned: Planned, calibration: CalibrationSettings) -> int:
    """At most: the codes, what is known of the inputs, and the activations of a calibration that go to files."""
    layers = free_layers(planned) if planned.has_goal else {}
    free = {site.name for sites in layers.values() for site in sites}
    total = 0
    for site in planned.chosen:
        method = planned.method(site)
        kept = formats_of(method)[-1] if site.name in free else method
        total += sum(predicted_sizes(site, kept).values())
        sees = planned.has_goal or (method.needs is not Statistics.NONE and not method.sequential)
        if sees and site.product is not None:
            total += (SAMPLE + 2) * site.columns * 4 * (1 if site.experts is None else site.experts + 1)
    if not planned.needs_calibration:
        return total
    each = _bytes_per_token(planned.graph)
    tokens = (calibration.samples or MOST_SAMPLES) * calibration.length
    trials = max(0, (len(layers) + 1) * WINDOWS * LENGTH * each - MEMORY_BYTES) if planned.has_goal else 0
    return total + max(
        trials, tokens * each + max(0, tokens * each - MEMORY_BYTES)
    )  # they are saved, and beyond memory


def _bytes_per_token(graph: LoweredGraph) -> int:
    """The most that is kept between two steps."""
    first, last = lifetimes(own_keys(graph.steps))
    changes = [0] * (len(graph.steps) + 2)
    for buffer, begin in first.items():
        size = buffer.elements.tokens * numpy_dtype(buffer.dtype).itemsize
        changes[begin + 1] += size
        changes[last[buffer] + 1] -= size
    most = held = 0
    for change in changes:
        held += change
        most = max(most, held)
    return most
