"""Quantizes the weights of a lowered model, as a recipe says.

    calibrate   one interpretation with the weights as they are: what arrives at each product (awq, smoothquant)
    fold        factors of inputs are chosen, and folded into what makes the inputs
    round       weights whose method needs no more than that
    follow      a second interpretation, in which each layer sees the outputs of the quantized ones before (awq, gptq)

Every result is kept in the work folder as soon as it is made, and taken from there by the next build.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmc.compiler.lower import LoweredGraph
from llmc.compiler.lowering.builder import PackedWeight
from llmc.compiler.progress import Progress
from llmc.compiler.quantize.activations import Activations
from llmc.compiler.quantize.choose import Scales, choose_scales
from llmc.compiler.quantize.decisions import Planned, compute_of, x_group_of
from llmc.compiler.quantize.experts import ExpertInputs, Routing
from llmc.compiler.quantize.interpreter import Interpreter
from llmc.compiler.quantize.loader import Loader
from llmc.compiler.quantize.pack import Inputs, quantize_site
from llmc.compiler.quantize.replace import QuantizedWeight, replace_weights
from llmc.compiler.quantize.sites import DOWN, GATE_UP, Site, unrounded
from llmc.compiler.quantize.work import FOLDED, Record, Work
from llmc.quantization.base import LayerInputs, Statistics
from llmc.quantization.statistics import InputCollector
from llmc.runtime.batch import Batch

SAVE_SECONDS = 30.0
"""The state of an interpretation is saved about so often."""

SAVE_SHARE = 10
"""Saving takes at most one part of so many of the time."""

ALL = "all"
"""The key of what arrives at a layer as a whole."""


@dataclass(frozen=True)
class Quantization:
    """A quantized graph, and what is known of it."""

    graph: LoweredGraph
    planned: Planned
    records: Mapping[str, Record]
    scales: Scales
    goal: Mapping[str, Any] | None = None
    """How formats were chosen, where there was a goal."""


@dataclass(frozen=True, eq=False)
class Tokens:
    """What is run: chunks of the calibration; and where formats are to be chosen, tokens for trials and held-out ones.

    ``trials``, ``held_out``: int32 [samples, length].
    """

    calibration: Sequence[Batch]
    trials: NDArray[np.int32]
    held_out: NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class Job:
    """Weights to be quantized.

    ``planned``: what to do; ``tokens`` gives those of calibration, if they are needed; ``dtype``: that of the weights
    that stay; ``work`` keeps results; ``threads`` change no bit; ``progress`` is told how far it is.
    """

    planned: Planned
    tokens: Callable[[], Tokens]
    dtype: str
    work: Work
    threads: int
    progress: Progress


class Quantizer:
    """Does a job."""

    def __init__(self, job: Job) -> None:
        self._planned = job.planned
        self._tokens = job.tokens
        self._dtype = job.dtype
        self._work = job.work
        self._threads = job.threads
        self._progress = job.progress
        self._by_position: dict[int, list[Site]] = {}
        for site in job.planned.chosen:
            if site.product is not None:
                self._by_position.setdefault(site.product[0], []).append(site)

    def run(self) -> Quantization:
        """Quantize all of it.

        Raises:
            CompileError: numbers that are not finite.
            ResourceError: the disk is full.
        """
        planned = self._planned
        seen = [s for s in planned.chosen if self._is_seen(s)]
        missing = [site for site in seen if self._work.find(site.name) is None]
        if any(self._work.find(inputs_name(site)) is None for site in missing):
            self._calibrate(seen)
        scales = choose_scales(
            planned.graph, [site for site in seen if planned.method(site).folds], planned, self._work, self._progress
        )
        graph = scales.graph
        self._progress.step(
            "quantizing", sum(site.numbers for site in planned.chosen if not self._follows(site)), "numbers"
        )
        for site in planned.chosen:
            if not self._follows(site):
                self._round(graph, site, scales)
        following = [site for site in planned.chosen if self._follows(site)]
        if any(self._work.find(site.name) is None for site in following):
            self._follow(scales, following)
        records: dict[str, Record] = {}
        for site in planned.chosen:
            record = self._work.find(site.name)
            assert record is not None, f"{site.name} was quantized"
            records[site.name] = record
        made = {site.name: self._quantized(site, records[site.name]) for site in planned.chosen}
        graph = self._with_folded(replace_weights(graph, made), scales.touched)
        return Quantization(graph, planned, records, scales)

    def see_inputs(self) -> None:
        """Calibrate every product of the plan, whether its method asks for that or not."""
        seen = [site for site in self._planned.chosen if site.product is not None]
        if any(self._work.find(inputs_name(site)) is None for site in seen):
            self._calibrate(seen)

    def _with_folded(self, graph: LoweredGraph, names: Collection[str]) -> LoweredGraph:
        """Floats with folded factors that were taken over from another engine."""
        found = {name: self._work.find(FOLDED + name) for name in names}
        taken = {
            name: dataclasses.replace(self._work.tensors(record)[""], name=name)
            for name, record in found.items()
            if record is not None
        }
        return dataclasses.replace(graph, weights={**graph.weights, **taken})

    def _needs(self, site: Site) -> Statistics:
        """What has to be known of its inputs; a table that nothing multiplies has none."""
        return self._planned.method(site).needs if site.product is not None else Statistics.NONE

    def _is_seen(self, site: Site) -> bool:
        """Whether what arrives at it with weights as they are matters."""
        return self._needs(site) is not Statistics.NONE and (
            self._planned.method(site).folds or not self._follows(site)
        )

    def _follows(self, site: Site) -> bool:
        return self._planned.method(site).sequential and site.product is not None

    # ------------------------------------------------------------------------------------------------ calibrating
    def _calibrate(self, sites: Sequence[Site]) -> None:
        """Collect what arrives at each of these weights."""
        loader = Loader(self._planned.graph, {}, self._work, self._dtype)
        self._interpret(self._planned.graph, loader, sites, "calibrating", self._keep)

    def _keep(self, interpreter: Interpreter, position: int, sites: Sequence[Site], loader: Loader) -> None:
        whole = [site for site in sites if site.experts is None]
        for site in whole:
            if self._work.find(inputs_name(site)) is None:
                self._work.keep_inputs(
                    inputs_name(site), {ALL: self._collect(interpreter, position, site, Statistics.INPUTS)}, {}
                )
        missing = [s for s in sites if s.experts is not None and self._work.find(inputs_name(s)) is None]
        if missing:
            routing = Routing(interpreter, position, missing[0].experts or 0)
            for site in missing:
                given = self._expert_inputs(routing, site, loader, Statistics.INPUTS)
                found = {str(expert): given(expert) for expert in range(site.experts or 0)}
                if _input_of(site) == GATE_UP:
                    found[ALL] = self._collect(interpreter, position, site, Statistics.INPUTS)
                self._work.keep_inputs(inputs_name(site), found, routing.facts())

    def _collect(
        self, interpreter: Interpreter, position: int, site: Site, needs: Statistics | None = None
    ) -> LayerInputs:
        collector = InputCollector(site.columns, needs or self._needs(site), name=site.label, threads=self._threads)

        def add(_: int, inputs: Sequence[NDArray[Any] | None]) -> None:
            assert inputs[0] is not None, "products have an input"
            collector.add(inputs[0].reshape(-1, site.columns))

        interpreter.visit(position, add)
        return collector.finish()

    def _expert_inputs(
        self, routing: Routing, site: Site, loader: Loader, needs: Statistics | None = None
    ) -> ExpertInputs:
        step = routing.step
        inner, bias = None, None
        if _input_of(site) == DOWN:
            gate_up = step.inputs[GATE_UP]
            assert gate_up is not None, "moe has gate_up"
            name = gate_up.buffer.name
            inner = lambda expert: loader.expert(name, expert)  # noqa: E731
            view = step.inputs[5] if len(step.inputs) > 5 else None
            bias = None if view is None else loader.load(view.buffer.name)
        return ExpertInputs(
            routing,
            site.columns,
            needs or self._needs(site),
            inner=inner,
            bias=bias,
            threads=self._threads,
            name=site.label,
        )

    # ------------------------------------------------------------------------------------------------ rounding
    def _round(self, graph: LoweredGraph, site: Site, scales: Scales) -> None:
        weight = graph.weights[site.name]
        assert isinstance(weight, PackedWeight), "a weight of the checkpoint"
        method, inputs, facts = self._planned.method(site), None, dict(scales.facts.get(site.name, {}))
        record = self._work.find(inputs_name(site))
        if record is not None:
            inputs = self._kept_inputs(record, scales.of.get(site.name))
            facts |= {key: value for key, value in record.facts.items() if key != "counts"}
            if ALL in record.facts["counts"] and site.experts is None:
                facts["tokens"] = record.facts["counts"][ALL]
        source = unrounded(weight.source)
        quantize_site(site, source, method, self._work, inputs, facts, self._progress.advance)

    def _kept_inputs(self, record: Record, scale: NDArray[np.float32] | None) -> Inputs:
        def given(expert: int | None) -> LayerInputs:
            found = self._work.inputs(record, ALL if expert is None else str(expert))
            if scale is None:
                return found
            return found.divided(scale[expert] if scale.ndim == 2 and expert is not None else scale)

        return given

    # ------------------------------------------------------------------------------------------------ following
    def _follow(self, scales: Scales, sites: Sequence[Site]) -> None:
        """Quantize these weights in order, each after what comes before it."""
        quantized = {site.name: site for site in self._planned.chosen}
        loader = Loader(scales.graph, quantized, self._work, self._dtype)
        here = partial(self._quantize_here, scales)
        self._interpret(scales.graph, loader, sites, "quantizing layer by layer", here)

    def _quantize_here(
        self, scales: Scales, interpreter: Interpreter, position: int, sites: Sequence[Site], loader: Loader
    ) -> None:
        routing: Routing | None = None
        for site in sorted(sites, key=_input_of):
            if self._work.find(site.name) is not None:
                continue
            weight = loader.graph.weights[site.name]
            assert isinstance(weight, PackedWeight), "a weight of the checkpoint"
            given: Inputs
            if site.experts is None:
                collected = self._collect(interpreter, position, site)
                given, facts = _only(collected), {"tokens": collected.count}
            else:
                routing = routing or Routing(interpreter, position, site.experts)
                given, facts = self._expert_inputs(routing, site, loader), routing.facts()
            facts = {**scales.facts.get(site.name, {}), **facts}
            quantize_site(site, unrounded(weight.source), self._planned.method(site), self._work, given, facts)

    # ------------------------------------------------------------------------------------------------ both
    def _interpret(
        self,
        graph: LoweredGraph,
        loader: Loader,
        sites: Sequence[Site],
        name: str,
        at: Callable[[Interpreter, int, Sequence[Site], Loader], None],
    ) -> None:
        """Run the steps up to each of these weights in turn, and do there what is to be done."""
        wanted = {site.name for site in sites}
        positions = sorted({site.product[0] for site in sites if site.product is not None})
        chunks = self._tokens().calibration
        folder = self._work.path / name.split()[0]
        folder.mkdir(exist_ok=True)
        activations = Activations(folder, len(chunks))
        begin = activations.load(folder) or 0
        interpreter = Interpreter(graph, chunks, loader, activations, self._threads)
        self._progress.step(name, positions[-1], "steps")
        self._progress.advance(begin)
        saved, pause = time.monotonic(), SAVE_SECONDS
        for position in positions:
            if position < begin:
                continue
            if position > begin:
                interpreter.run(begin, position)
                self._progress.advance(position - begin)
                begin = position
            here = [site for site in self._by_position[position] if site.name in wanted]
            at(interpreter, position, here, loader)
            if position != positions[-1] and time.monotonic() - saved > pause:
                started = time.monotonic()
                activations.save(folder, position)
                saved = time.monotonic()
                pause = max(SAVE_SECONDS, SAVE_SHARE * (saved - started))
        activations.clear()
        activations.forget(folder)

    def _quantized(self, site: Site, record: Record) -> QuantizedWeight:
        method, facts = self._planned.method(site), record.facts
        compute = compute_of(method, self._planned.compute)
        tensors = self._work.tensors(record)
        return QuantizedWeight(
            facts["format"], facts["group"], compute, x_group_of(method, compute), tensors, site.columns
        )


def _input_of(site: Site) -> int:
    """Which input of its product it is."""
    assert site.product is not None, f"{site.name} is multiplied"
    return site.product[1]


def _only(inputs: LayerInputs) -> Inputs:
    return lambda _: inputs


def inputs_name(site: Site) -> str:
    """The record of what arrives at a weight."""
    return f"inputs of {site.name}"
