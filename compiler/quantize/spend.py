"""--budget: gives 8 bits to the weights that 4 bits damage most, as many as fit into a number of bits per weight.

The damage of a weight is the squared error of its outputs on the sampled inputs of the calibration, rounded to nearest,
as a share of the outputs; that of a model is taken to be the sum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from llmc.compiler.lower import LoweredGraph
from llmc.compiler.lowering.builder import PackedWeight
from llmc.compiler.progress import Progress
from llmc.compiler.quantize.coverage import predicted_sizes
from llmc.compiler.quantize.decisions import Decision, Planned, method_text
from llmc.compiler.quantize.sites import Site, unrounded
from llmc.compiler.quantize.work import Work
from llmc.errors import UsageError
from llmc.quantization.base import LayerInputs, Method
from llmc.quantization.budget import Candidate, pareto_front, parse_budget
from llmc.quantization.deterministic import single_threaded
from llmc.quantization.rounding import IntegerMethod, round_to_nearest

NARROW, WIDE = 4, 8
REASON = "budget"
RECORD = "budget"


def check_budget(planned: Planned) -> None:
    """Before time is spent.

    Raises:
        UsageError: a method has no 4 and 8 bits to choose from, rules have chosen already, or 4 bits are too many.
    """
    if all(planned.decisions[site.name].reason for site in planned.chosen):
        raise UsageError("--budget: rules name the method of every weight, so there is nothing to choose")
    for site in planned.chosen:
        method = planned.method(site)
        if not planned.decisions[site.name].reason and not (
            isinstance(method, IntegerMethod) and method.bits == NARROW
        ):
            raise UsageError(f"--budget: chooses between 4 and 8 bits, but {method_text(method)} has no 4 bits")
    least = sum(_bits(site, planned.method(site)) for site in planned.chosen)
    numbers = sum(site.numbers for site in planned.chosen)
    if planned.budget is not None and least > parse_budget(planned.budget) * numbers:
        raise UsageError(
            f"--budget {planned.budget}: is too small, with as few bits as there may be a weight takes "
            f"{least / numbers:.3f} with its scales; give more, or larger groups"
        )


def spend(
    graph: LoweredGraph,
    planned: Planned,
    budget: str,
    work: Work,
    inputs: Callable[[Site, int | None], LayerInputs | None],
    progress: Progress,
) -> tuple[Planned, dict[str, Any]]:
    """Choose bits for every weight that no rule names; also the table of sizes and damages, for the report.

    Args:
        graph: the model.
        planned: what becomes of it with 4 bits everywhere.
        budget: bits per weight of all that is quantized.
        work: keeps the measurements.
        inputs: what arrives at a weight, or at one of its experts.
        progress: told how far it is.

    Raises:
        UsageError: the budget is too small.
    """
    layers = _layers(planned)
    damages = _measured(graph, planned, layers, work, inputs, progress)
    fixed = [site for site in planned.chosen if planned.decisions[site.name].reason]
    front = pareto_front(
        {
            sites[0].name: [
                Candidate(str(bits), sum(_bits(site, _with(planned.method(site), bits)) for site in sites), damage)
                for bits, damage in zip((NARROW, WIDE), damages[sites[0].name], strict=True)
            ]
            for sites in layers
        }
    )
    numbers = sum(site.numbers for site in planned.chosen)
    taken = sum(_bits(site, planned.method(site)) for site in fixed)
    chosen = front.within_size(parse_budget(budget) * numbers - taken)
    decisions = dict(planned.decisions)
    for sites in layers:
        for site in sites:
            bits = int(chosen.labels[sites[0].name])
            decisions[site.name] = Decision(_with(planned.method(site), bits), REASON)
    table = [
        {
            "bits_per_weight": round((point.bits + taken) / numbers, 3),
            "damage": float(f"{point.damage:.4g}"),
            "wide": sum(label == str(WIDE) for label in point.labels.values()),
        }
        for point in front.table(20)
    ]
    facts = {"budget": budget, "bits_per_weight": round((chosen.bits + taken) / numbers, 4), "table": table}
    return replace(planned, decisions=decisions), facts


def _measured(
    graph: LoweredGraph,
    planned: Planned,
    layers: Sequence[Sequence[Site]],
    work: Work,
    inputs: Callable[[Site, int | None], LayerInputs | None],
    progress: Progress,
) -> dict[str, list[float]]:
    """The damage of each layer, by the name of its first weight, with few bits and with more."""
    record = work.find(RECORD)
    if record is None:
        progress.step("measuring what few bits do", sum(s.numbers for sites in layers for s in sites), "numbers")
        measured = {}
        for sites in layers:
            found = [sum(_damage(graph, site, planned, bits, inputs) for site in sites) for bits in (NARROW, WIDE)]
            measured[sites[0].name] = [float(f"{value:.8g}") for value in found]
            progress.advance(sum(site.numbers for site in sites))
        with work.record(RECORD, {"damages": measured}):
            pass
        record = work.find(RECORD)
    assert record is not None, "it was just written"
    damages: dict[str, list[float]] = record.facts["damages"]
    return damages


def _layers(planned: Planned) -> list[list[Site]]:
    """What is chosen for together: a weight, or both matrices of the experts of a step."""
    layers: dict[Any, list[Site]] = {}
    for site in planned.chosen:
        if not planned.decisions[site.name].reason:
            key = site.name if site.experts is None or site.product is None else site.product[0]
            layers.setdefault(key, []).append(site)
    return list(layers.values())


def _with(method: Method, bits: int) -> Method:
    assert isinstance(method, IntegerMethod), "checked before"
    return replace(method, bits=bits)


def _bits(site: Site, method: Method) -> int:
    return 8 * sum(predicted_sizes(site, method).values())


def _damage(
    graph: LoweredGraph,
    site: Site,
    planned: Planned,
    bits: int,
    inputs: Callable[[Site, int | None], LayerInputs | None],
) -> float:
    weight = graph.weights[site.name]
    assert isinstance(weight, PackedWeight), "a weight of the checkpoint"
    source, scheme = unrounded(weight.source), _with(planned.method(site), bits).weights
    experts: Sequence[int | None] = [None] if site.experts is None else range(site.experts)
    error = whole = 0.0
    for expert in experts:
        matrix = source.rows(0, site.rows) if expert is None else source.rows(expert, expert + 1)[0]
        matrix = matrix.astype(np.float32)
        rounded = round_to_nearest(matrix, scheme).dequantize()
        given = inputs(site, expert)
        with single_threaded():
            wrong, right = rounded - matrix, matrix
            if given is not None and len(given.rows):  # a table that nothing multiplies is taken as it is
                wrong, right = given.rows @ wrong.T, given.rows @ right.T
            error += float(np.sum(np.square(wrong, dtype=np.float64)))
            whole += float(np.sum(np.square(right, dtype=np.float64)))
    return error / max(whole, 1e-300)
