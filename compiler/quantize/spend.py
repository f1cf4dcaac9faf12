"""--budget and --max-ppl-increase: which format for which weight, as measured.

The damage of a format to a layer is the divergence (KL, nats per token) of the model's next-token distributions. It is
measured with the narrowest format (sensitivity.py); that of others is taken to grow as the squared error of the layer's
outputs on the inputs that calibration sampled, with the inputs rounded too where the products do that. Weights are
rounded to nearest for that. The damage of a model is taken to be the sum, and exp(sum) the growth of its perplexity.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmc.compiler.lower import LoweredGraph
from llmc.compiler.lowering.builder import PackedWeight
from llmc.compiler.quantize.coverage import predicted_sizes
from llmc.compiler.quantize.decisions import Decision, Planned, compute_of, method_text, x_group_of
from llmc.compiler.quantize.pack import pieces
from llmc.compiler.quantize.sensitivity import Layer
from llmc.compiler.quantize.sites import Site, unrounded
from llmc.errors import UsageError
from llmc.quantization.base import LayerInputs, Method, Statistics
from llmc.quantization.budget import Assignment, Candidate, Front, pareto_front, parse_budget
from llmc.quantization.deterministic import single_threaded
from llmc.quantization.rounding import IntegerMethod, round_inputs
from llmc.quantization.rtn import Rtn

REASON = "budget"

GROUPS = (128, 64, 32)
"""Of int4, besides that of the method, which is the largest; int8 has the smallest."""

Inputs = Callable[[Site, int | None], LayerInputs | None]
"""What arrives at a weight, or at one of its experts."""


def formats_of(method: Method) -> list[Method]:
    """What a weight may become in place of a method, the narrowest first; unquantized is not among them.

    Raises:
        UsageError: the method rounds inputs in a way of its own, whose damage rounding to nearest doesn't tell.
    """
    if not (isinstance(method, IntegerMethod) or (method.needs is Statistics.NONE and method.x_group)):
        raise UsageError(
            f"--budget, --max-ppl-increase: not for {method_text(method)}, whose inputs are rounded in a way of "
            "its own; choose among rtn, awq, gptq and fp8"
        )
    if not isinstance(method, IntegerMethod):
        return [method]
    largest = method.group or 1 << 30
    groups = list(dict.fromkeys([method.group, *(group for group in GROUPS if group < largest)]))
    narrow = [replace(method, bits=4, group=group) for group in groups] if method.bits == 4 else []
    return [*narrow, replace(method, bits=8, group=groups[-1])]


def label_of(method: Method | None, dtype: str) -> str:
    """``int4 in groups of 64``, or the dtype of what stays as it is."""
    if method is None:
        return dtype
    scheme = method.weights
    return f"{scheme.format} in groups of {scheme.group}" if scheme.group else f"{scheme.format} in rows"


def check_goal(planned: Planned) -> None:
    """Before time is spent.

    Raises:
        UsageError: there is nothing to choose from, rules have chosen already, or the fewest bits are too many.
    """
    option = "--budget" if planned.budget is not None else "--max-ppl-increase"
    if all(planned.decisions[site.name].reason for site in planned.chosen):
        raise UsageError(f"{option}: rules name the method of every weight, so there is nothing to choose")
    least = 0
    for site in planned.chosen:
        is_free = not planned.decisions[site.name].reason
        method = planned.method(site)
        least += bits_of(site, formats_of(method)[0] if is_free else method)
    numbers = sum(site.numbers for site in planned.chosen)
    if planned.budget is not None and least > parse_budget(planned.budget) * numbers:
        raise UsageError(
            f"--budget {planned.budget}: is too small, with as few bits as there may be a weight takes "
            f"{least / numbers:.3f} with its scales; give more, or larger groups"
        )


@dataclass(frozen=True, eq=False)
class Choices:
    """What can be chosen for each layer, by the name of its first weight, and what each choice costs."""

    graph: LoweredGraph
    planned: Planned
    layers: Mapping[str, Sequence[Site]]

    def formats(self, name: str) -> dict[str, list[Method | None]]:
        """By label, the methods of the weights of a layer; the last one leaves them as they are."""
        sites = self.layers[name]
        found: dict[str, list[Method | None]] = {}
        for methods in zip(*(formats_of(self.planned.method(site)) for site in sites), strict=True):
            found[label_of(methods[0], "")] = list(methods)
        return found | {label_of(None, self._dtype(sites[0])): [None] * len(sites)}

    def trials(self) -> dict[str, Layer]:
        """Each layer in its narrowest format, rounded to nearest."""
        return {
            name: Layer([(site, nearest(formats_of(self.planned.method(site))[0])) for site in sites])
            for name, sites in self.layers.items()
        }

    def errors(self, name: str, inputs: Inputs) -> dict[str, float]:
        """By label, the squared error of a layer's outputs as a share of that which its trial has."""
        formats = self.formats(name)
        quantized = [label for label, methods in formats.items() if methods[0] is not None]
        sums = np.zeros(len(quantized) + 1)
        for number, site in enumerate(self.layers[name]):
            methods = [method for label in quantized if (method := formats[label][number]) is not None]
            sums += _errors(self.graph, site, methods, self.planned.compute, inputs)
        shares = sums[1:] / sums[0] if sums[0] > 0 else np.zeros(len(quantized))
        return {label: float(f"{share:.8g}") for label, share in zip(quantized, shares, strict=True)}

    def front(self, measured: Mapping[str, Mapping[str, Any]]) -> Front:
        """``measured``: for each layer the divergence of its trial, and the errors of each format."""
        return pareto_front({name: self._candidates(name, measured[name]) for name in self.layers})

    def decided(self, chosen: Mapping[str, str]) -> Planned:
        """The plan with these formats: a label for each layer."""
        decisions = dict(self.planned.decisions)
        for name, sites in self.layers.items():
            for site, method in zip(sites, self.formats(name)[chosen[name]], strict=True):
                decisions[site.name] = Decision(method, REASON)
        return replace(self.planned, decisions=decisions)

    def _candidates(self, name: str, measured: Mapping[str, Any]) -> list[Candidate]:
        found = []
        for label, methods in self.formats(name).items():
            sizes = [self._bits(s, m) for s, m in zip(self.layers[name], methods, strict=True)]
            damage = measured["kl"] * measured["errors"][label] if methods[0] is not None else 0.0
            found.append(Candidate(label, sum(sizes), damage))
        return found

    def _bits(self, site: Site, method: Method | None) -> int:
        return 8 * self.graph.weights[site.name].nbytes if method is None else bits_of(site, method)

    def _dtype(self, site: Site) -> str:
        return self.graph.weights[site.name].dtype


def free_layers(planned: Planned) -> dict[str, list[Site]]:
    """What is chosen for together, where no rule has chosen: a weight, or both matrices of the experts of a step."""
    layers: dict[Any, list[Site]] = {}
    for site in planned.chosen:
        if not planned.decisions[site.name].reason:
            key = site.name if site.experts is None or site.product is None else site.product[0]
            layers.setdefault(key, []).append(site)
    return {sites[0].name: sites for sites in layers.values()}


def choose(planned: Planned, front: Front, shrink: float) -> Assignment:
    """The best of a front within the goal of a plan, or within a part of the allowed damage.

    Raises:
        UsageError: nothing is small enough.
    """
    if planned.budget is not None:
        free = {site.name for sites in free_layers(planned).values() for site in sites}
        numbers = sum(site.numbers for site in planned.chosen)
        taken = sum(bits_of(site, planned.method(site)) for site in planned.chosen if site.name not in free)
        return front.within_size(parse_budget(planned.budget) * numbers - taken)
    assert planned.max_ppl_increase is not None, "there is a goal"
    return front.within_damage(math.log1p(planned.max_ppl_increase) * shrink)


def table(planned: Planned, front: Front, chosen: Assignment) -> list[dict[str, Any]]:
    """Sizes and damages for the report, from the smallest to the best; the one that was chosen is among them."""
    free = {site.name for sites in free_layers(planned).values() for site in sites}
    numbers = sum(site.numbers for site in planned.chosen)
    taken = sum(bits_of(site, planned.method(site)) for site in planned.chosen if site.name not in free)
    points = {point.bits: point for point in [*front.table(16), chosen]}
    rows = []
    for bits, point in sorted(points.items()):
        labels = list(point.labels.values())
        row = {
            "bits_per_weight": round((bits + taken) / numbers, 4),
            "bytes": (bits + taken) // 8,
            "kl": float(f"{point.damage:.6g}"),
            "ppl_increase": float(f"{math.expm1(point.damage):.6g}"),
            "layers": {label: labels.count(label) for label in sorted(set(labels))},
        }
        rows.append(row | ({"chosen": True} if bits == chosen.bits else {}))
    return rows


def bits_of(site: Site, method: Method) -> int:
    """Of a quantized weight, with all that belongs to it."""
    return 8 * sum(predicted_sizes(site, method).values())


def nearest(method: Method) -> Method:
    """The method that stores weights as another one does, and needs no calibration."""
    return Rtn(method.bits, method.group, method.sym) if isinstance(method, IntegerMethod) else method


def _errors(
    graph: LoweredGraph, site: Site, methods: Sequence[Method], compute: str, inputs: Inputs
) -> NDArray[np.float64]:
    """Squared errors as a share of the squared outputs: of the narrowest with exact inputs, then of each of them."""
    weight = graph.weights[site.name]
    assert isinstance(weight, PackedWeight), "a weight of the checkpoint"
    source = unrounded(weight.source)
    experts: Sequence[int | None] = [None] if site.experts is None else range(site.experts)
    errors, whole = np.zeros(len(methods) + 1), 0.0
    for expert in experts:
        given = inputs(site, expert)
        rows = given.rows if given is not None and len(given.rows) else None  # a table that nothing multiplies has none
        for number, method in enumerate(methods):
            with single_threaded():
                rounded = None if rows is None else _rounded_rows(rows, method, compute)
                for matrix, quantized, _ in pieces(site, source, nearest(method), None, expert):
                    wrong = quantized.dequantize() - matrix
                    right = matrix if rows is None else rows @ matrix.T
                    exact = wrong if rows is None else rows @ wrong.T
                    error = exact
                    if rounded is not None:
                        error = rounded @ (wrong + matrix).T - right
                    errors[number + 1] += _square(error)
                    if not number:
                        errors[0] += _square(exact)
                        whole += _square(right)
    return errors / max(whole, 1e-300)


def _rounded_rows(rows: NDArray[np.float32], method: Method, compute: str) -> NDArray[np.float32] | None:
    """What the product sees of the inputs; None: all."""
    chosen = compute_of(method, compute)
    return round_inputs(rows, x_group_of(method, chosen)) if chosen == "int8" else None


def _square(values: NDArray[np.float32]) -> float:
    return float(np.sum(np.square(values, dtype=np.float64)))
