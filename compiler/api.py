"""What the compiler does, in order: a model directory (or GGUF file) becomes an engine directory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import onnx_ir as ir

from llmc.compiler import facts, graph_file
from llmc.compiler.checkpoint import Checkpoint
from llmc.compiler.config import BLOCK_SIZE, BuildConfig, Limits
from llmc.compiler.cuda.build import CudaModel, check_dtypes, cuda_model, images
from llmc.compiler.cuda.sizes import device_facts
from llmc.compiler.eagle.build import EagleToBuild, add_eagle, check_model, eagle_bytes, open_eagle
from llmc.compiler.engine_writer import EngineContents, write_files, write_manifest, write_selftest
from llmc.compiler.estimate import Estimate, check_disk, estimate
from llmc.compiler.gate import QualityRequest
from llmc.compiler.golden import record_goldens
from llmc.compiler.lora import linears_of, merge
from llmc.compiler.lower import LoweredGraph, LoweredModel, lower_steps, plan_steps
from llmc.compiler.medusa.build import add_heads, check_heads, open_heads
from llmc.compiler.pipeline import make_graph
from llmc.compiler.progress import Progress
from llmc.compiler.quantize import kv_cache, locked
from llmc.compiler.quantize.build import Result as Quantized
from llmc.compiler.quantize.build import predicted, quantized
from llmc.compiler.quantize.decisions import Planned
from llmc.compiler.quantize.decisions import plan as plan_quantization
from llmc.compiler.quantize.imported import Imported, keep_quantized
from llmc.compiler.quantize.room import NO_ROOM, Room, room_for
from llmc.compiler.quantize.samples import calibration_tokens
from llmc.compiler.quantize.sites import find_sites
from llmc.compiler.quantize.spend import check_goal
from llmc.compiler.quantize.work import work_path
from llmc.compiler.report import write_report
from llmc.compiler.staging import Staging, stage
from llmc.compiler.targets.base import Target, find_target
from llmc.compiler.tokenizer import FrozenTokenizer
from llmc.compiler.trace import TracedProgram, trace
from llmc.errors import UsageError
from llmc.quantization.calibration import BUILT_IN, SELF, Calibration, CalibrationSettings
from llmc.runtime import manifest
from llmc.runtime.adapter_file import read_adapter
from llmc.runtime.lora import Linears
from llmc.runtime.manifest import KvCacheSpec, ModelFacts


@dataclass(frozen=True)
class Compiled:
    """A compiled model before it is written. The weights are still in the checkpoint."""

    checkpoint: Checkpoint
    program: TracedProgram
    graph: ir.Model
    steps: LoweredGraph
    lowered: LoweredModel
    target: Target
    limits: Limits
    dtype: str
    kv_dtype: str
    planned: Planned | None = None
    """What is to be quantized; ``lowered`` then has tensors of the right sizes, without numbers."""
    imported: Imported | None = None
    """Weights that the checkpoint stores quantized."""

    centred: kv_cache.Centred | None = None
    """What a quantized cache holds keys and values without; ``steps`` have it."""

    room: Room = NO_ROOM
    """What quantizing takes at most, be it of weights or of the KV cache."""

    eagle: EagleToBuild | None = None
    """A draft layer; ``steps`` also give what it goes on with."""

    cuda: CudaModel | None = None
    """For the target cuda: what the engine becomes at the end. All before is for the CPU, which runs it then."""

    @property
    def estimate(self) -> Estimate:
        """Sizes of the engine, and the memory to run it."""
        lowered = self.lowered if self.cuda is None else self.cuda.lowered
        return estimate(lowered, self.limits, KvCacheSpec(self.kv_dtype, BLOCK_SIZE), self.room)


@dataclass(frozen=True)
class BuildResult:
    """What was built. ``digest`` is the SHA-256 of engine.json, which holds those of the other files."""

    path: Path
    model: ModelFacts
    target: str
    limits: Limits
    kv_dtype: str
    estimate: Estimate
    engine_bytes: int
    digest: str
    report: Mapping[str, Any]
    """The content of report.json."""


def build_engine(
    model: Path | str,
    engine: Path | str,
    config: BuildConfig | None = None,
    *,
    quality: QualityRequest | None = None,
    force: bool = False,
    progress: Progress | None = None,
) -> BuildResult:
    """Compile a model and publish the engine: at its place there is a complete engine afterwards, or what was before.

    Args:
        model: a Hugging Face model directory, or a GGUF file.
        engine: the directory to make.
        config: options.
        quality: what to measure before the engine is published, and the conditions for that. None: nothing.
        force: replace an engine that is there.
        progress: told what is being done.

    Raises:
        LlmcError: by its kind; nothing is left behind.
    """
    # long: the whole build, step by step
    config, progress = config or BuildConfig(), progress or Progress()
    wanted = None if quality is None else quality.read()
    check_heads(config)
    with stage(Path(engine), force) as staging:
        checkpoint = open_checkpoint(model, config, progress)
        if wanted is not None:
            wanted.check_memory(checkpoint)
        tokenizer = checkpoint.tokenizer()
        with facts.InputHashes(checkpoint) as inputs:  # reads the files while Python traces
            compiled = compile_model(checkpoint, config, progress)
            heads = open_heads(config, compiled.steps, compiled.target.name)
            more = 0 if heads is None else heads.heads.nbytes(compiled.dtype)
            more += eagle_bytes(compiled, config)[0]
            check_disk(compiled.estimate, staging.path, work_path(Path(engine)), more)
            progress.step("hashing the model")
            hashes = inputs.result() | facts.added_files(config, heads, compiled.eagle)
        if config.locked is not None:
            locked.check(config.locked, hashes, facts.versions())
        with _quantized(compiled, config, tokenizer, Path(engine), hashes, progress) as (compiled, quantization, text):
            compiled = _with_kv_constants(compiled, config, tokenizer, text, staging.path, progress)
            contents = _contents(compiled, config, tokenizer, hashes, quantization)
            if wanted is not None:
                contents = replace(contents, recipe={**contents.recipe, "quality": wanted.recipe()})
            progress.step("writing weights", compiled.estimate.weight_bytes)
            write_files(staging, contents, progress)
            write_manifest(staging, contents)
            progress.step("recording golden prompts")
            write_selftest(staging, record_goldens(staging.path, contents.model.parameters))
            if heads is not None:
                contents = add_heads(heads, staging, contents, compiled, config, text, progress)
            if compiled.eagle is not None:
                contents = add_eagle(compiled.eagle, staging, contents, compiled, config, progress)
            found = None if wanted is None else wanted.measure(staging.path, checkpoint, progress)
            if compiled.cuda is not None:
                contents = _for_cuda(contents, compiled, staging, progress)
            report = write_report(staging, contents, found)
            write_manifest(staging, contents)
            progress.step("publishing")
    return BuildResult(
        path=Path(engine),
        model=contents.model,
        target=compiled.target.name,
        limits=compiled.limits,
        kv_dtype=compiled.kv_dtype,
        estimate=compiled.estimate,
        engine_bytes=sum(entry.size for entry in staging.files.values()),
        digest=staging.files[manifest.NAME].sha256,
        report=report,
    )


def open_checkpoint(model: Path | str, config: BuildConfig, progress: Progress) -> Checkpoint:
    """Open the model and pass on its warnings."""
    progress.step("reading the model")
    dequantize = config.dequantize or config.quantization_recipe is not None
    checkpoint = Checkpoint.open(model, allow_hard_links=config.allow_hard_links, dequantize=dequantize)
    if config.dequantize and not checkpoint.is_quantized:
        raise UsageError(f"--dequantize: the weights of {model} are not quantized; leave the option away")
    for warning in checkpoint.warnings:
        progress.note(warning)
    return checkpoint if config.lora is None else merge(checkpoint, read_adapter(config.lora))


def compile_model(checkpoint: Checkpoint, config: BuildConfig, progress: Progress) -> Compiled:
    """All stages up to the plan. No weight is read."""
    if config.reuse is not None and not (config.reuse / manifest.NAME).exists():
        raise UsageError(f"--reuse {config.reuse}: there is no engine")
    target, eagle = find_target(config.target), open_eagle(config)
    limits = facts.limits(checkpoint.config, config)
    dtype = checkpoint.dtype if config.dtype == "auto" else config.dtype
    kv_dtype = dtype if config.kv_dtype == "auto" else config.kv_dtype
    check_dtypes(target, dtype, kv_dtype)
    for note in facts.notes(checkpoint, limits, dtype, kv_dtype):
        progress.note(note)
    progress.step("tracing")
    program = trace(checkpoint.config, max_seq_len=limits.max_seq_len)
    for note in program.notes.values():
        progress.note(note)
    progress.step("fusing")
    graph = make_graph(program, checkpoint.weight, None if eagle is None else eagle.add_outputs)
    progress.step("lowering")
    steps = lower_steps(graph, target, dtype)
    if eagle is not None:
        check_model(eagle, steps)
    recipe, planned, imported = config.quantization_recipe, None, None
    parameters = {name: checkpoint.weight(name) for name in checkpoint.names}
    if recipe is not None:
        planned = plan_quantization(steps, parameters, recipe, config.compute)
        if planned.has_goal:
            check_goal(planned)
        unused = not planned.needs_calibration and not kv_cache.is_centred(kv_dtype)
        if unused and recipe.calibration != CalibrationSettings():
            progress.note("the text for calibration is not looked at: what is quantized here needs none")
    else:
        imported = keep_quantized(steps, parameters, config.compute)
        steps = steps if imported is None else imported.graph
        _note_floats(config, imported, progress)
    last = steps if planned is None else predicted(planned)
    lowered = plan_steps(last, target, limits)
    if target.device == "cuda":
        progress.step("looking for kernels")
    cuda = cuda_model(last, target, limits, dtype, kv_dtype) if target.device == "cuda" else None
    return Compiled(
        checkpoint,
        program,
        graph,
        steps,
        lowered,
        target,
        limits,
        dtype,
        kv_dtype,
        planned,
        imported,
        room=room_for(planned, last, config.calibration, kv_dtype),
        eagle=eagle,
        cuda=cuda,
    )


def _note_floats(config: BuildConfig, imported: Imported | None, progress: Progress) -> None:
    """Say what of a quantized checkpoint became floats. Raises UsageError for a --compute that nothing follows."""
    if (imported is None or not imported.kept) and config.compute != "auto":
        raise UsageError(f"--compute {config.compute}: no weights are quantized; --quant METHOD does that")
    lost = [] if imported is None else imported.lost
    if lost:
        names = ", ".join(site.label for site in lost[:3]) + (", ..." if len(lost) > 3 else "")
        progress.note(f"{len(lost)} weights are dequantized, since their parts are quantized in several ways: {names}")
    if imported is not None and (experts := imported.rescaled):
        progress.note(
            f"the scales that the checkpoint has for inputs are not used for the experts ({len(experts)} weights): "
            "their inputs are scaled by row"
        )


@contextmanager
def _quantized(
    compiled: Compiled,
    config: BuildConfig,
    tokenizer: FrozenTokenizer | None,
    engine: Path,
    inputs: Mapping[str, Any],
    progress: Progress,
) -> Iterator[tuple[Compiled, Quantized | None, Callable[[], Calibration]]]:
    """The model with the weights quantized, if that is asked for; while the context is open they can be read.

    Gives the tokens for calibration besides, which are made when they are first asked for.
    """

    def unquantized() -> EngineContents:
        lowered = plan_steps(compiled.steps, compiled.target, compiled.limits)
        return _contents(replace(compiled, lowered=lowered, planned=None), config, tokenizer, inputs, None)

    @cache
    def text() -> Calibration:
        settings = config.calibration
        if settings.source == SELF and (compiled.planned is None or not compiled.planned.needs_calibration):
            settings = replace(settings, samples=settings.samples or kv_cache.SAMPLES)
        return calibration_tokens(settings, config, compiled, tokenizer, unquantized, engine, progress)

    recipe = config.quantization_recipe
    if compiled.planned is None or recipe is None:
        yield compiled, None, text
        return
    with quantized(
        compiled.planned,
        recipe,
        engine,
        dtype=compiled.dtype,
        inputs=inputs,
        notes=compiled.program.notes,
        calibration=text,
        engines=[path for path in (config.reuse, engine) if path is not None and (path / manifest.NAME).exists()],
        locked=None if config.locked is None else locked.section_of(config.locked),
        progress=progress,
    ) as result:
        steps = result.quantization.graph
        yield replace(compiled, steps=steps, lowered=plan_steps(steps, compiled.target, compiled.limits)), result, text


def _with_kv_constants(
    compiled: Compiled,
    config: BuildConfig,
    tokenizer: FrozenTokenizer | None,
    text: Callable[[], Calibration],
    folder: Path,
    progress: Progress,
) -> Compiled:
    """The model with what a quantized cache holds keys and values without, if it is to have one."""
    if not kv_cache.is_centred(compiled.kv_dtype) or not compiled.steps.kv_slots:
        return compiled
    settings, longest = config.calibration, compiled.limits.max_seq_len
    silent = settings.source == BUILT_IN and (tokenizer is None or "tokenizer.json" not in tokenizer.files)
    tokens, kv_dtype = None if silent else text(), compiled.kv_dtype
    centred = kv_cache.centre(
        compiled.steps, tokens, settings, kv_dtype=kv_dtype, longest=longest, folder=folder, progress=progress
    )
    if config.locked is not None:
        centred = replace(centred, recipe=locked.checked_kv_cache(config.locked, centred.recipe))
    lowered = plan_steps(centred.graph, compiled.target, compiled.limits)
    return replace(compiled, steps=centred.graph, lowered=lowered, centred=centred)


def _for_cuda(contents: EngineContents, compiled: Compiled, staging: Staging, progress: Progress) -> EngineContents:
    """Replace plan and weights, which the CPU has run, by those for the device, and add its kernels."""
    sizes = compiled.limits, compiled.dtype, compiled.kv_dtype
    model = cuda_model(compiled.steps, compiled.target, *sizes, contents.parts)
    progress.step("compiling kernels")
    for name, content in images(model).items():
        staging.write(name, content)
    contents = replace(
        contents,
        target=compiled.target.name,
        plan=model.lowered.plan,
        weights=list(model.lowered.weights.values()),
        report={**contents.report, **device_facts(compiled, model)},
    )
    progress.step("writing weights for the device", compiled.estimate.weight_bytes)
    for part, form in model.parts:
        _, found = part.write(staging, compiled.target, model.lowered.weights, form)
        section = {**contents.report[part.name], **found}
        contents = replace(contents, report={**contents.report, part.name: section})
    write_files(staging, contents, progress)
    return contents


def _contents(
    compiled: Compiled,
    config: BuildConfig,
    tokenizer: FrozenTokenizer | None,
    inputs: Mapping[str, Any],
    quantization: Quantized | None,
) -> EngineContents:
    notes, plan = compiled.program.notes, compiled.lowered.plan
    model = facts.model_facts(compiled.checkpoint, notes, plan, tokenizer, compiled.dtype)
    recipe = facts.recipe(config, compiled.limits, inputs)
    report = facts.report(compiled.checkpoint, compiled.lowered, compiled.estimate, tokenizer, notes)
    if quantization is not None:
        model = replace(model, quantization=quantization.text)
        recipe["quantization"] = quantization.recipe
        report["quantization"] = quantization.report(compiled.lowered, compiled.steps)
    elif compiled.imported is not None and compiled.imported.kept:
        model = replace(model, quantization=compiled.imported.text)
        report["coverage"] = compiled.imported.coverage(compiled.lowered.weights)
    report["kv_cache"] = {"dtype": compiled.kv_dtype}
    if compiled.centred is not None:
        recipe["kv_cache"] = compiled.centred.recipe
        report["kv_cache"] |= compiled.centred.report
    return EngineContents(
        target="cpu",  # which runs it at the end of every build
        limits=manifest.Limits(**vars(compiled.limits)),
        model=model,
        kv_cache=KvCacheSpec(compiled.kv_dtype, BLOCK_SIZE),
        plan=plan,
        weights=list(compiled.lowered.weights.values()),
        graph=graph_file.to_bytes(compiled.graph, set(compiled.checkpoint.names)),
        tokenizer=tokenizer,
        generation_config=facts.generation_config(compiled.checkpoint),
        recipe=recipe,
        report=report,
        linears=_linears(compiled, quantization),
    )


def _linears(compiled: Compiled, quantization: Quantized | None) -> Linears:
    """What the products of the engine are made of, for adapters."""
    parameters = {name: compiled.checkpoint.weight(name) for name in compiled.checkpoint.names}
    if quantization is not None:
        scales = quantization.quantization.scales
        return linears_of(quantization.quantization.planned.sites, parameters, scales.columns, scales.rows)
    sites = find_sites(compiled.steps, parameters) if compiled.imported is None else compiled.imported.sites
    return linears_of(sites, parameters, {}, {})
