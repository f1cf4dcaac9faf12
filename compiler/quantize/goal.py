"""Chooses formats for a goal (--budget, --max-ppl-increase), quantizes, measures, and chooses again if it must."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from llmc.compiler.quantize import spend
from llmc.compiler.quantize.apply import ALL, Job, Quantization, Quantizer, inputs_name
from llmc.compiler.quantize.heldout import perplexity
from llmc.compiler.quantize.sensitivity import measure
from llmc.compiler.quantize.sites import Site
from llmc.compiler.quantize.work import FOUND, SENSITIVITY, TRIES
from llmc.errors import GateError, UsageError
from llmc.quantization.base import LayerInputs

MOST_TRIES = 4
MARGIN = 0.9
"""Of the allowed damage, where a try has done too much."""


class Chooser:
    """Does a job as a Quantizer does, with formats that are chosen for the goal of its plan."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._planned = job.planned
        self._work = job.work
        self._progress = job.progress
        self._choices = spend.Choices(job.planned.graph, job.planned, spend.free_layers(job.planned))

    def run(self) -> Quantization:
        """Choose, quantize and measure, again if it has to be.

        Raises:
            GateError: the perplexity grows by more than is allowed, whatever was tried.
            UsageError: there is no choice that is small enough.
        """
        layers = self._measured()
        front = self._choices.front(layers)
        while True:
            tries = self._tries()
            shrink = math.prod(t["next"] for t in tries)
            chosen = spend.choose(self._planned, front, shrink)
            decided = self._choices.decided(chosen.labels)
            if not decided.chosen:
                self._nothing(tries)
            made = Quantizer(replace(self._job, planned=decided)).run()
            found = self._measure(made, math.expm1(chosen.damage))
            allowed = self._planned.max_ppl_increase
            if allowed is None or found["increase"] <= allowed:
                break
            self._again(found, allowed, len(tries) + 1)
        rows = spend.table(self._planned, front, chosen)
        goal = {"budget": self._planned.budget, "max_ppl_increase": self._planned.max_ppl_increase}
        facts = {
            **{name: value for name, value in goal.items() if value is not None},
            "bits_per_weight": next(row["bits_per_weight"] for row in rows if "chosen" in row),
            "damage": "KL(model || model with the layer rounded), nats per token of the calibration text, summed",
            "held_out": found,
            "tries": tries,
            "table": rows,
            "layers": {name: {"chosen": chosen.labels[name], **layers[name]} for name in layers},
        }
        return Quantization(made.graph, made.planned, made.records, made.scales, facts)

    def _measured(self) -> dict[str, dict[str, Any]]:
        """For each layer what its narrowest format does to the model, and how the errors of the others compare."""
        record = self._work.find(SENSITIVITY)
        if record is None:
            choices, graph = self._choices, self._planned.graph
            Quantizer(self._job).see_inputs()
            trials = choices.trials()
            self._progress.step("measuring what each layer matters", len(graph.steps), "steps")
            at = 0

            def advance(position: int) -> None:
                nonlocal at
                self._progress.advance(position - at)
                at = position

            tokens = self._job.tokens().trials
            kl = measure(graph, trials, tokens, self._job.dtype, self._work, self._job.threads, advance)
            self._progress.step(
                "measuring formats", sum(s.numbers for x in choices.layers.values() for s in x), "numbers"
            )
            found = {}
            for name, sites in choices.layers.items():
                found[name] = {"kl": float(f"{kl[name]:.8g}"), "errors": choices.errors(name, self._inputs)}
                self._progress.advance(sum(site.numbers for site in sites))
            with self._work.record(SENSITIVITY, {"layers": found}):
                pass
            record = self._work.find(SENSITIVITY)
        assert record is not None, "it was just written"
        layers: dict[str, dict[str, Any]] = record.facts["layers"]
        return layers

    def _inputs(self, site: Site, expert: int | None) -> LayerInputs | None:
        record = self._work.find(inputs_name(site))
        return None if record is None else self._work.inputs(record, ALL if expert is None else str(expert))

    def _measure(self, made: Quantization, estimated: float) -> dict[str, Any]:
        """Perplexities on the text that is held out."""
        record = self._work.find(FOUND)
        if record is not None:
            return dict(record.facts)
        held = self._job.tokens().held_out
        self._progress.step("measuring on held-out text", 2 * len(made.graph.steps), "steps")
        source, own = (
            perplexity(graph, held, self._work, self._job.threads, self._progress.advance)
            for graph in (self._planned.graph, made.graph)
        )
        found = {
            "perplexity": float(f"{math.exp(own['nll']):.6g}"),
            "source": float(f"{math.exp(source['nll']):.6g}"),
            "increase": float(f"{math.expm1(own['nll'] - source['nll']):.6g}"),
            "estimated": float(f"{estimated:.6g}"),
            "tokens": own["tokens"],
        }
        with self._work.record(FOUND, dict(found)):
            pass
        return found

    def _tries(self) -> list[dict[str, Any]]:
        record = self._work.find(TRIES)
        return [] if record is None else list(record.facts["tries"])

    def _nothing(self, tries: list[dict[str, Any]]) -> None:
        """Raises GateError, or UsageError if nothing has been tried."""
        if tries:
            raise GateError(f"{self._text(tries[-1])}, and the next larger choice is to leave every weight as it is")
        raise UsageError(
            "--budget, --max-ppl-increase: every weight would stay as it is; leave --quant and the goal away"
        )

    def _text(self, found: dict[str, Any]) -> str:
        allowed = (self._planned.max_ppl_increase or 0) * 100
        return (
            f"--max-ppl-increase {allowed:g}%: on held-out text the perplexity grew by {found['increase'] * 100:.3g} % "
            f"({found['source']:g} to {found['perplexity']:g})"
        )

    def _again(self, found: dict[str, Any], allowed: float, number: int) -> None:
        """Forget what was quantized, and allow less damage. Raises GateError once that was tried often enough."""
        text = self._text(found)
        if number == MOST_TRIES or not math.isfinite(found["increase"]):
            raise GateError(
                f"{text}, after {number} choices of formats; no engine was made. Allow more, or calibrate on more text"
            )
        self._progress.note(f"{text}: choosing larger formats")
        share = MARGIN * min(1.0, math.log1p(allowed) / math.log1p(found["increase"]))
        tries = [*self._tries(), {**found, "next": float(f"{share:.6g}")}]
        for site in self._planned.chosen:
            self._work.forget(site.name)
            self._work.forget(f"scale of {site.name}")
        self._work.forget(FOUND)
        with self._work.record(TRIES, {"tries": tries}):
            pass
