"""Chooses the factors of inputs (awq, smoothquant), and folds them into what makes the inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmc.compiler.lower import LoweredGraph
from llmc.compiler.lowering.builder import LoweredStep, PackedWeight
from llmc.compiler.lowering.values import View
from llmc.compiler.progress import Progress
from llmc.compiler.quantize.decisions import Planned
from llmc.compiler.quantize.folding import Factors, Folding, Producer
from llmc.compiler.quantize.sites import DOWN, GATE_UP, Site, unrounded
from llmc.compiler.quantize.work import Record, Work
from llmc.quantization.base import Method
from llmc.quantization.rounding import IntegerMethod

MAX_ROWS = 1 << 14
"""Of the experts that share an input, so many rows are looked at, evenly spread."""

ALL = "all"


@dataclass(frozen=True)
class Scales:
    """The folded graph; the factors of each weight's columns, by its name; and what the report says of them."""

    graph: LoweredGraph
    of: Mapping[str, Factors]
    facts: Mapping[str, dict[str, Any]]
    touched: frozenset[str]
    """Weights that stay floats, but are not those of the checkpoint."""
    columns: Mapping[str, Factors]
    """What the columns of weights are multiplied by, and in ``rows`` what their rows are divided by; also of others."""
    rows: Mapping[str, Factors]


def choose_scales(
    graph: LoweredGraph, sites: Sequence[Site], planned: Planned, work: Work, progress: Progress
) -> Scales:
    """For the weights of methods that fold; what arrives at them is in the work folder."""
    return _Choice(graph, planned, work, progress).run(sites)


class _Choice:
    def __init__(self, graph: LoweredGraph, planned: Planned, work: Work, progress: Progress) -> None:
        self._graph = graph
        self._planned = planned
        self._work = work
        self._progress = progress
        self._folding = Folding(graph)
        self._of: dict[str, Factors] = {}
        self._facts: dict[str, dict[str, Any]] = {}
        self._readers: dict[str, int] = {}
        for step in graph.steps:
            for view in step.inputs:
                if view is not None:
                    self._readers[view.buffer.name] = self._readers.get(view.buffer.name, 0) + 1

    def run(self, sites: Sequence[Site]) -> Scales:
        if sites:
            self._progress.step("choosing scales", sum(site.numbers for site in sites), "numbers")
        done: set[str] = set()
        for site in sites:
            assert site.product is not None, "it has inputs"
            number, index = site.product
            if index == DOWN:
                self._scale_down(site, number)
            elif site.name not in done:
                x = self._graph.steps[number].inputs[0]
                assert x is not None, "products have an input"
                members = self._members(x, sites)
                done |= {member.name for member in members}
                self._scale_input(x, members)
            self._progress.advance(site.numbers)
        graph = self._folding.apply() if self._of else self._graph
        quantized = {site.name for site in self._planned.chosen}
        touched = frozenset(self._folding.touched - quantized)
        return Scales(graph, self._of, self._facts, touched, self._folding.columns, self._folding.rows)

    def _members(self, x: View, sites: Sequence[Site]) -> list[Site]:
        """The weights that read the same input."""
        steps = set(self._folding.readers_of(x))
        return [s for s in sites if s.product is not None and s.product[0] in steps and s.product[1] in (1, GATE_UP)]

    # ------------------------------------------------------------------------------------------------ inputs
    def _scale_input(self, x: View, members: Sequence[Site]) -> None:
        producer = self._producer(x, members)
        if isinstance(producer, str):
            for member in members:
                self._facts[member.name] = {"scaled": f"no: {producer}"}
            return
        scale = self._found(members, producer)
        if scale is None:
            for member in members:
                self._facts[member.name] = {"scaled": "no: no factors are better than none"}
            return
        self._folding.divide(producer, scale)
        step = self._graph.steps[producer.step]
        for name in self._weights_of(x):
            self._folding.multiply(name, scale)
        for member in members:
            self._of[member.name] = scale
            self._facts[member.name] = {
                "scaled": f"into {producer.kind} {step.module}".rstrip(),
                "scales": [float(f"{value:.4g}") for value in (scale.min(), scale.max())],
            }

    def _producer(self, x: View, members: Sequence[Site]) -> Producer | str:
        if len({_family(self._planned.method(site)) for site in members}) > 1:
            return "the weights that read it have different methods"
        chosen = {site.name for site in self._planned.chosen}
        if others := [name for name in self._weights_of(x) if name in chosen - {m.name for m in members}]:
            return f"{others[0]}, which reads it too, has another method"
        if shared := [name for name in self._weights_of(x) if self._readers[name] > 1]:
            return f"{shared[0]} is read at several places"
        return self._folding.find(x)

    def _weights_of(self, x: View) -> list[str]:
        found = []
        for number in self._folding.readers_of(x):
            step = self._graph.steps[number]
            view = step.inputs[GATE_UP if step.op == "moe" else 1]
            assert view is not None, "products have a weight"
            found.append(view.buffer.name)
        return found

    def _found(self, members: Sequence[Site], producer: Producer) -> Factors | None:
        name = f"scale of {members[0].name}"
        record = self._work.find(name)
        if record is None:
            rows = [self._rows(member) for member in members]
            stacked = rows[0] if len(rows) == 1 else np.concatenate(rows)
            inputs = self._work.inputs(self._inputs(members[0]), ALL)
            label = " + ".join(member.label for member in members)
            scale = self._planned.method(members[0]).input_scale(stacked, inputs, name=label, tie=producer.tie)
            record = self._keep(name, scale)
        return self._read(record)

    def _rows(self, site: Site) -> NDArray[np.float32]:
        source = unrounded(_packed(self._graph, site.name).source)
        if site.experts is None:
            return source.rows(0, site.rows).astype(np.float32)
        stride = -(-site.experts * site.rows // MAX_ROWS)
        rows = [source.rows(e, e + 1)[0][e % stride :: stride].astype(np.float32) for e in range(site.experts)]
        return np.concatenate(rows)

    # ------------------------------------------------------------------------------------------------ experts
    def _scale_down(self, site: Site, number: int) -> None:
        """Factors of each expert, folded into the rows of its up."""
        step = self._graph.steps[number]
        reason = _no_fold(
            step, [self._readers[v.buffer.name] for v in step.inputs[GATE_UP : DOWN + 1] if v is not None]
        )
        if reason:
            self._facts[site.name] = {"scaled": f"no: {reason}"}
            return
        assert site.experts is not None, "down of experts"
        name = f"scale of {site.name}"
        record = self._work.find(name)
        if record is None:
            source = unrounded(_packed(self._graph, site.name).source)
            found = np.ones((site.experts, site.columns), np.float32)
            for expert in range(site.experts):
                weight = source.rows(expert, expert + 1)[0].astype(np.float32)
                inputs = self._work.inputs(self._inputs(site), str(expert))
                label = f"{site.label}, expert {expert}"
                scale = self._planned.method(site).input_scale(weight, inputs, name=label) if inputs.count else None
                if scale is not None:
                    found[expert] = scale
            record = self._keep(name, found)
        scales = self._read(record)
        assert scales is not None, "one for each expert"
        divisors = np.ones((site.experts, site.columns * 2), np.float32)
        divisors[:, slice(1, None, 2) if step.attributes["interleaved"] else slice(site.columns, None)] = scales
        self._folding.divide_expert_rows(number, divisors)
        self._folding.multiply(site.name, scales)
        self._of[site.name] = scales
        self._facts[site.name] = {"scaled": "into up of the experts"}

    # ------------------------------------------------------------------------------------------------ kept
    def _inputs(self, site: Site) -> Record:
        record = self._work.find(f"inputs of {site.name}")
        assert record is not None, "calibration has seen it"
        return record

    def _keep(self, name: str, scale: Factors | None) -> Record:
        with self._work.record(name, {}) as writer:
            if scale is not None:
                writer.tensor("", "float32", scale.shape, iter([scale]))
        record = self._work.find(name)
        assert record is not None, "it was just written"
        return record

    def _read(self, record: Record) -> Factors | None:
        tensors = self._work.tensors(record)
        return tensors[""].read() if tensors else None


def _family(method: Method) -> Method:
    """Methods that differ in bits and groups alone choose factors together."""
    return replace(method, bits=4, group=0) if isinstance(method, IntegerMethod) else method


def _no_fold(step: LoweredStep, readers: Sequence[int]) -> str:
    """Why factors of the experts' inner units can't be folded, or ''."""
    if not step.attributes["gated"]:
        return "it is made by an activation"
    if step.attributes["function"] == "gpt_oss" or float(step.attributes["limit"]) > 0:
        return "the experts limit what it is made of"
    return "the experts' weights are read at several places" if max(readers) > 1 else ""


def _packed(graph: LoweredGraph, name: str) -> PackedWeight:
    weight = graph.weights[name]
    assert isinstance(weight, PackedWeight), "a weight of the checkpoint"
    return weight
