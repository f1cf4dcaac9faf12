"""Quantization as a part of a build: from options to a quantized graph, and what recipe.json and report.json say."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import llmc
from llmc.compiler.lower import LoweredGraph, LoweredModel
from llmc.compiler.progress import Progress
from llmc.compiler.quantize import coverage
from llmc.compiler.quantize.apply import Job, Quantization, Quantizer, Tokens
from llmc.compiler.quantize.decisions import Planned, compute_of, method_text, x_group_of
from llmc.compiler.quantize.goal import Chooser
from llmc.compiler.quantize.heldout import hold_out
from llmc.compiler.quantize.interpreter import make_chunks
from llmc.compiler.quantize.locked import check_calibration
from llmc.compiler.quantize.replace import QuantizedWeight, replace_weights
from llmc.compiler.quantize.reuse import take_over
from llmc.compiler.quantize.work import key_digest, open_work
from llmc.plugins import kernels
from llmc.plugins.quantized_linear import packing
from llmc.quantization.calibration import Calibration, CalibrationSettings
from llmc.quantization.recipe import Recipe
from llmc.runtime import resources

PACKAGES = ("numpy", "torch", "transformers", "onnx-ir", "tokenizers")
"""Those whose version may change the codes."""


@dataclass(frozen=True)
class Result:
    """The quantized graph; sections for report.json (once the tensors are known) and for recipe.json."""

    quantization: Quantization
    recipe: Mapping[str, Any]

    @property
    def text(self) -> str:
        """A line for people."""
        return quantization_text(self.quantization.planned)

    def report(self, lowered: LoweredModel, steps: LoweredGraph) -> dict[str, Any]:
        """The coverage manifest of the model as it was lowered from its steps.

        Raises:
            CompileError: something was skipped, or has another size than the recipe implies.
        """
        q = self.quantization
        coverage.check(q.planned, q.graph)
        found = coverage.manifest(q.planned, steps, lowered.weights, q.records, q.scales.touched)
        goal = {} if q.goal is None else {"goal": q.goal}
        return {"compute": q.planned.compute, **found, **goal, "recipe": self.recipe}


def quantization_text(planned: Planned) -> str:
    """A line for people: ``awq: int4 in groups of 128, computes with int8``."""
    found = []
    for method in dict.fromkeys(planned.method(site) for site in planned.chosen):
        scheme = method.weights
        group = f"groups of {scheme.group}" if scheme.group else "rows"
        found.append(
            f"{method_text(method)}: {scheme.format} in {group}, computes with {compute_of(method, planned.compute)}"
        )
    return "; ".join(found)


def predicted(planned: Planned) -> LoweredGraph:
    """The graph as it will be, with tensors of the right sizes but without numbers."""
    made = {}
    for site in planned.chosen:
        method = planned.method(site)
        scheme, lead = method.weights, () if site.experts is None else (site.experts,)
        scale = (*lead, *packing.scale_shape(site.rows, site.columns, scheme.group))
        codes = (*lead, *packing.packed_shape(scheme.format, site.rows, site.columns, scheme.group))
        shapes = {
            coverage.CODES: ("uint8", codes),
            coverage.SCALE: ("float16", scale),
            coverage.ZERO: ("uint8", scale),
            coverage.X_SCALE: ("float32", (1,)),
        }
        tensors = {
            suffix: coverage.Predicted(site.name + suffix, *shapes[suffix], nbytes)
            for suffix, nbytes in coverage.predicted_sizes(site, method).items()
        }
        compute = compute_of(method, planned.compute)
        made[site.name] = QuantizedWeight(
            scheme.format, scheme.group, compute, x_group_of(method, compute), tensors, site.columns
        )
    return replace_weights(planned.graph, made)


@contextmanager
def quantized(
    planned: Planned,
    recipe: Recipe,
    target: Path,
    *,
    dtype: str,
    inputs: Mapping[str, Any],
    notes: Mapping[str, str],
    calibration: Callable[[], Calibration],
    engines: Sequence[Path],
    locked: Mapping[str, Any] | None,
    progress: Progress,
) -> Iterator[Result]:
    """Quantize; the tensors of the result are in the work folder of the target while the context is open.

    Args:
        planned: what to do.
        recipe: where that comes from.
        target: the engine that is being built.
        dtype: of the weights that stay.
        inputs: hashes of the files of the model.
        notes: what the tracer says of the model (the regime of its rope).
        calibration: makes the tokens, if they are needed.
        engines: where quantized weights are looked for that can be taken over.
        locked: the section of the recipe.json that has to be repeated, or None.
        progress: is told how far it is.
    """
    tokens = None
    if planned.needs_calibration:
        progress.step("preparing calibration")
        tokens = calibration()
    described = _described(recipe, tokens)
    isa = None if tokens is None else kernels.best_isa()
    if locked is not None:
        check_calibration(locked, described, isa)
        if tokens is not None:
            described["calibration"]["source"] = locked["calibration"]["source"]  # whatever the file is called now
    key = {
        "recipe": described,
        "dtype": dtype,
        "inputs": dict(inputs),
        "notes": dict(notes),
        "versions": {"llmc": llmc.__version__} | {name: version(name) for name in PACKAGES},
        "weights": [[site.name, list(site.source.shape)] for site in planned.chosen],
    }
    if isa is not None:
        key["isa"] = isa
    with open_work(target, key, progress) as work:
        digest = key_digest(key)
        take_over(work, planned, digest, engines, progress)
        job = Job(planned, lambda: _tokens(planned, tokens), dtype, work, thread_count(), progress)
        found = (Chooser if planned.has_goal else Quantizer)(job).run()
        section = described | {"compute": planned.compute, "key": digest}
        if isa is not None:
            section["isa"] = isa
        yield Result(found, section)


def _tokens(planned: Planned, calibration: Calibration | None) -> Tokens:
    assert calibration is not None, "it was asked for"
    kept = held = calibration.tokens
    if planned.has_goal:
        kept, held = hold_out(calibration.tokens)
    return Tokens(make_chunks(list(kept)), kept, held)


def thread_count() -> int:
    """Of the kernels that run the calibration; it changes no bit."""
    return resources.physical_cores()


def _described(recipe: Recipe, tokens: Calibration | None) -> dict[str, Any]:
    """The recipe without paths, and with the hash of the tokens that were used."""
    return recipe.to_json() | {"calibration": None if tokens is None else describe(tokens, recipe.calibration)}


def describe(tokens: Calibration, settings: CalibrationSettings) -> dict[str, Any]:
    """Tokens without paths, and with their hash."""
    named = replace(settings, source=Path(settings.source).name, samples=len(tokens.tokens))
    return asdict(named) | {"sha256": tokens.sha256}
