"""The quality gate: conditions such as ``ppl<=+2%,top1>=0.95,kl<=0.05`` that an engine must meet to be published."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmc.compiler.evaluation.figures import Figures
from llmc.errors import CompileError, GateError, UsageError

if TYPE_CHECKING:
    from llmc.compiler.checkpoint import Checkpoint
    from llmc.compiler.evaluation.evaluate import Evaluation, Inputs
    from llmc.compiler.progress import Progress

Reader = Callable[[Figures], float]

CONDITION = re.compile(r"\s*([a-z_0-9]+)\s*(<=|>=)\s*([+-]?)(\d+(?:\.\d+)?(?:e[-+]?\d+)?|\.\d+)(%?)\s*")


@dataclass(frozen=True)
class Metric:
    """A figure that can be asked for."""

    what: str
    better: str
    """``<=``: the smaller the better; ``>=``: the larger."""
    read: Reader
    source: Reader | None = None
    """The same of the source model, for limits relative to it."""
    generated: bool = False
    """Whether it comes from free generation."""
    compared: bool = True
    """Whether it needs a source model even where the limit is absolute."""
    is_share: bool = False
    """From 0 to 1."""


METRICS: Mapping[str, Metric] = {
    "ppl": Metric(
        "perplexity; +2% and +0.5 are relative to the source model's",
        "<=",
        lambda f: f.perplexity,
        lambda f: _compared(f).perplexity,
        compared=False,
    ),
    "kl": Metric("mean KL(source || engine), nats", "<=", lambda f: _compared(f).kl),
    "kl_p99": Metric("its 99th percentile", "<=", lambda f: _compared(f).kl_p99),
    "kl_max": Metric("its largest value", "<=", lambda f: _compared(f).kl_max),
    "top1": Metric("share of tokens with the same best successor", ">=", lambda f: _compared(f).top1, is_share=True),
    "repetition": Metric(
        "share of repeated pieces of 4 tokens in free generation; +0.1 and +50% are relative to the source model's",
        "<=",
        lambda f: _generated(f).repetition,
        lambda f: _generated(f).reference_repetition or 0.0,
        generated=True,
        compared=False,
        is_share=True,
    ),
    "divergence": Metric(
        "tokens of free generation before the texts part, mean",
        ">=",
        lambda f: _generated(f).divergence or 0.0,
        generated=True,
    ),
    "prefix": Metric(
        "share of a free generation that is equal from its start, mean",
        ">=",
        lambda f: _generated(f).prefix or 0.0,
        generated=True,
        is_share=True,
    ),
}


@dataclass(frozen=True)
class Condition:
    """One of a gate. ``relative``: "" (``limit`` is the number itself), "+" (more than the source), "%" (the same)."""

    metric: str
    limit: float
    relative: str = ""

    @property
    def wanted(self) -> str:
        """As it is written."""
        sign = "+" if self.relative and self.limit >= 0 else ""
        number = repr(self.limit).removesuffix(".0")  # all digits: the text is parsed again to repeat a build
        return f"{METRICS[self.metric].better}{sign}{number}{'%' if self.relative == '%' else ''}"


@dataclass(frozen=True)
class Result:
    """A condition and what was found; ``found`` is what the limit is compared with, in its unit."""

    condition: Condition
    found: float

    @property
    def passed(self) -> bool:
        """A number that is not one fails."""
        limit = self.condition.limit
        return self.found <= limit if METRICS[self.condition.metric].better == "<=" else self.found >= limit

    @property
    def shown(self) -> str:
        """``found`` with its unit."""
        sign = "+" if self.condition.relative and self.found >= 0 else ""
        return f"{sign}{self.found:.4g}{'%' if self.condition.relative == '%' else ''}"

    def to_json(self) -> dict[str, Any]:
        """For report.json."""
        return {
            "metric": self.condition.metric,
            "wanted": self.condition.wanted,
            "found": float(f"{self.found:.4g}"),
            "shown": self.shown,
            "passed": self.passed,
        }


@dataclass(frozen=True)
class Gate:
    """Conditions that must all hold."""

    conditions: tuple[Condition, ...]

    @property
    def text(self) -> str:
        """As it is written."""
        return ",".join(c.metric + c.wanted for c in self.conditions)

    @property
    def needs_source(self) -> bool:
        """Whether figures of a source model are asked for."""
        return any(c.relative or METRICS[c.metric].compared for c in self.conditions)

    def check_request(self, evaluation: Evaluation, *, compared: bool) -> None:
        """Before time is spent.

        Raises:
            UsageError: a figure is asked for that the evaluation will not have.
        """
        for c in self.conditions:
            if METRICS[c.metric].generated and evaluation.tokens == 0:
                raise UsageError(f"--gate {c.metric}: needs free generation, but no tokens are to be generated")
        if self.needs_source and not compared:
            raise UsageError(f"--gate {self.text}: needs a source model; say which: --against MODEL")

    def check(self, figures: Figures) -> list[Result]:
        """Each condition with what was found."""
        return [Result(c, _found(c, figures)) for c in self.conditions]

    def require(self, figures: Figures, consequence: str) -> None:
        """Check.

        Raises:
            GateError: not all conditions hold; the message has a table of them, and says what follows from that.
        """
        results = self.check(figures)
        if failed := sum(not result.passed for result in results):
            lines = [f"{failed} of {len(results)} conditions of the gate failed:", *table(results), consequence]
            raise GateError("\n".join(lines), Quality(figures, self).to_json())


@dataclass(frozen=True)
class Quality:
    """What a build has measured, and the gate that it has passed, if there was one."""

    figures: Figures
    gate: Gate | None = None

    def to_json(self) -> dict[str, Any]:
        """For report.json, rounded."""
        result = {"quality": self.figures.recorded().to_json()}
        if self.gate is not None:
            conditions = [r.to_json() for r in self.gate.check(self.figures)]
            result["gate"] = {"text": self.gate.text, "conditions": conditions}
        return result


@dataclass(frozen=True)
class QualityRequest:
    """What a build is to measure before it publishes, and perhaps a gate."""

    evaluation: Evaluation
    gate: Gate | None = None
    repeats: Mapping[str, Any] | None = None
    """What the recipe.json says whose build is repeated."""

    def read(self) -> Wanted:
        """Read the files and check the request.

        Raises:
            CompileError: another build is to be repeated, but the texts are others.
            UsageError: it makes no sense.
        """
        if self.gate is not None:
            self.gate.check_request(self.evaluation, compared=True)
        inputs = self.evaluation.read()
        if self.repeats is not None:
            _check_same(self.repeats, inputs.described())
            inputs = replace(inputs, text=replace(inputs.text, name=self.repeats["text"]))
        return Wanted(self, inputs)


@dataclass(frozen=True)
class Wanted:
    """A request whose files have been read."""

    request: QualityRequest
    inputs: Inputs

    def recipe(self) -> dict[str, Any]:
        """What is needed to measure the same again, without paths."""
        gate = self.request.gate
        return {"gate": "" if gate is None else gate.text, **self.inputs.described()}

    def check_memory(self, checkpoint: Checkpoint) -> None:
        """Before time is spent.

        Raises:
            ResourceError: there is no memory for the source model.
        """
        from llmc.compiler.evaluation import source_model

        source_model.check_memory(checkpoint)

    def measure(self, engine_dir: Path, checkpoint: Checkpoint, progress: Progress) -> Quality:
        """The figures of a finished engine against its model, which transformers runs in float32.

        Raises:
            GateError: the gate has failed, or the engine's numbers are not finite.
            ResourceError: there is no memory for the model.
            UsageError: the text does not suit the model.
        """
        from llmc.compiler.evaluation.evaluate import evaluate, tokens_for
        from llmc.compiler.evaluation.source_model import SourceModel
        from llmc.compiler.evaluation.subject import EngineSubject
        from llmc.runtime.engine import load_engine

        engine = load_engine(engine_dir)
        tokens = tokens_for(engine, self.inputs)
        progress.step("loading the source model")
        source = SourceModel(checkpoint)
        figures = evaluate(EngineSubject(engine, tokens.room), source, self.inputs, tokens, progress)
        if self.request.gate is not None:
            self.request.gate.require(figures, "no engine was published")
        return Quality(figures, self.request.gate)


def repeated(section: Mapping[str, Any], text: Path | None, prompts: Path | None) -> QualityRequest:
    """What the section ``quality`` of a recipe.json asks for, with the files that it does not hold.

    Raises:
        UsageError: it is no such section.
    """
    from llmc.compiler.evaluation.evaluate import Evaluation

    numbers = [section.get(name) for name in ("windows", "context", "tokens")]
    names = [section.get(name) for name in ("gate", "text", "text_sha256")]
    if not all(n is None or type(n) is int for n in numbers) or not all(isinstance(n, str) for n in names):
        raise UsageError("recipe.json: its section quality is damaged")
    windows, context, tokens = numbers
    evaluation = Evaluation(text, windows or 0, context, tokens, prompts)
    return QualityRequest(evaluation, parse_gate(section["gate"]) if section["gate"] else None, section)


def parse_gate(text: str) -> Gate:
    """Parse conditions that are separated by commas.

    Raises:
        UsageError: a condition is not understood; an unknown figure is answered with the known ones.
    """
    conditions: dict[str, Condition] = {}
    for part in text.split(","):
        condition = _parse_condition(part, text)
        if condition.metric in conditions:
            raise UsageError(f"--gate {text}: {condition.metric} is there twice")
        conditions[condition.metric] = condition
    return Gate(tuple(conditions.values()))


def table(results: Sequence[Result]) -> list[str]:
    """A line for each condition, the failing ones marked."""
    rows = [("", "figure", "wanted", "found")]
    rows += [("ok" if r.passed else "FAILED", r.condition.metric, r.condition.wanted, r.shown) for r in results]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  " + "  ".join(f"{cell:<{w}}" for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]


def _check_same(before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    for name, option in (("text_sha256", "--eval"), ("prompts_sha256", "--eval-prompts")):
        if before.get(name) != now[name]:
            raise CompileError(
                f"--locked: that build measured on a file with SHA-256 {before.get(name)}, found {now[name]}; give the "
                f"same one ({before['text']}) with {option}"
            )


def _parse_condition(part: str, text: str) -> Condition:
    known = ", ".join(METRICS)
    match = CONDITION.fullmatch(part)
    if match is None:
        raise UsageError(
            f"--gate {text}: {part.strip()!r} is not understood; write FIGURE<=NUMBER or FIGURE>=NUMBER, separated by "
            f"commas, such as ppl<=+2%,top1>=0.95,kl<=0.05; figures: {known}"
        )
    name, operator, sign, number, unit = match.groups()
    if name not in METRICS:
        raise UsageError(f"--gate {text}: unknown figure {name!r}; known: {known}")
    metric = METRICS[name]
    if operator != metric.better:
        which = "smaller" if metric.better == "<=" else "larger"
        raise UsageError(f"--gate {text}: {name} is the better the {which} it is; use {name}{metric.better}{number}")
    if unit and not sign:
        raise UsageError(f"--gate {text}: {part.strip()} is relative to the source model; write +{number}%")
    if sign and metric.source is None:
        raise UsageError(f"--gate {text}: {name} has no relative limits; write {name}{operator}NUMBER")
    if metric.is_share and not sign and float(number) > 1:
        raise UsageError(f"--gate {text}: {name} is a share from 0 to 1, not {number}")
    limit = float(sign + number)
    if math.isinf(limit):
        raise UsageError(f"--gate {text}: {part.strip()} is met by everything; leave it away")
    return Condition(name, limit, ("%" if unit else "+") if sign else "")


def _found(condition: Condition, figures: Figures) -> float:
    metric = METRICS[condition.metric]
    value = metric.read(figures)
    if not condition.relative:
        return value
    assert metric.source is not None, "the grammar allows relative limits only where there is a source"
    source = metric.source(figures)
    if condition.relative == "+":
        return value - source
    return (value / source - 1) * 100 if source else (0.0 if value == 0 else float("inf"))


def _compared(figures: Figures) -> Any:
    assert figures.comparison is not None, "check_request has seen that there is a source model"
    return figures.comparison


def _generated(figures: Figures) -> Any:
    assert figures.generation is not None, "check_request has seen that text is generated"
    return figures.generation
