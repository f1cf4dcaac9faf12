"""The commands that look at models and make engines. What is heavy is imported by the command that needs it."""

from __future__ import annotations

import json
import resource
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from llmc.compiler.cli_options import quantization_options
from llmc.errors import GateError, UsageError
from llmc.runtime.cli import options

if TYPE_CHECKING:
    from llmc.compiler.config import BuildConfig
    from llmc.compiler.gate import QualityRequest


QUALITY = (
    click.option("--gate", help="Publish only if, for example, ppl<=+2%,top1>=0.95,kl<=0.05; else exit status 3."),
    click.option("--eval", type=click.Path(path_type=Path), help="Measure on a text file. [default for --gate: ours]"),
    click.option("--eval-windows", type=click.IntRange(0), help="Windows of the text; 0: all. [default: 8]"),
    click.option("--eval-context", type=click.IntRange(2), help="Tokens of a window. [default: 2048, or 512]"),
    click.option("--eval-tokens", type=click.IntRange(0), help="Tokens written freely; 0: none. [default: 256]"),
    click.option("--eval-prompts", type=click.Path(path_type=Path), help="To continue freely. [default: ours]"),
)
"""Options of build: what to measure before the engine is published."""


@click.command()
@click.argument("model", type=click.Path(path_type=Path))
@click.option("-o", "--output", "engine", type=click.Path(path_type=Path), help="The engine directory to make.")
@click.option(
    "--dtype", default="auto", show_default=True, help="Of the weights: auto (the checkpoint's), float32, ..."
)
@click.option(
    "--kv-dtype", default="auto", show_default=True, help="Of the KV cache: auto (that of the weights), fp8, int8, ..."
)
@click.option("--max-seq-len", type=click.IntRange(1), help="Tokens of a sequence. [default: the model's, up to 32768]")
@click.option("--max-batch-tokens", type=click.IntRange(1), default=512, show_default=True, help="Tokens of a step.")
@click.option("--max-sequences", type=click.IntRange(1), default=64, show_default=True, help="That run at one time.")
@click.option("--lora", type=click.Path(path_type=Path), help="A LoRA adapter (PEFT) to merge into the weights.")
@click.option(
    "--medusa", type=click.Path(path_type=Path), help="Medusa heads (`llmc medusa train`) to put into the engine."
)
@click.option(
    "--medusa-tree",
    default="auto",
    show_default=True,
    metavar="TREE",
    help="Guesses that are tried: auto (measured on the calibration text; in chats, on prompts of the model "
    "itself unless a text is named), chain:N, or a .json file of paths.",
)
@click.option(
    "--medusa-cost",
    type=click.Choice(["default", "measure"]),
    default="default",
    show_default=True,
    help="What auto weighs gains against: a table of the target, or times of steps on this machine.",
)
@click.option(
    "--medusa-vocab",
    default="auto",
    show_default=True,
    metavar="TOKENS",
    help="Tokens that heads choose from, the most frequent ones: a number, all, or auto (8192 where it is known).",
)
@click.option("--eagle", type=click.Path(path_type=Path), help="An EAGLE-1 or EAGLE-3 layer to put into the engine.")
@click.option("--target", default="cpu", show_default=True, help="What the engine runs on; see `llmc targets`.")
@quantization_options
@options(QUALITY)
@click.option("--allow-hard-links", is_flag=True, help="Accept model files that have a second name elsewhere.")
@click.option("--dry-run", is_flag=True, help="Compile without writing; print sizes, memory and disk needed.")
@click.option("--force", is_flag=True, help="Replace an engine that is there.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
@click.option("--quiet", is_flag=True, help="No progress.")
def build(
    model: Path, engine: Path | None, quant: str, dry_run: bool, force: bool, as_json: bool, quiet: bool, **given: Any
) -> None:
    """Compile a model directory or GGUF file into an engine directory.

    \b
    llmc build model/ -o engine/
    llmc build model.gguf -o engine/ --dtype float32 --max-seq-len 4096
    llmc build --quant awq model/ -o engine/                  int4 weights, calibrated
    llmc build --quant int8 model/ -o engine/                 int8 weights, in seconds
    llmc build --quant w8a8 --calib texts.jsonl model/ -o engine/
    """  # noqa: D301 - click's mark for lines that it must not wrap
    from llmc.compiler.api import build_engine, compile_model, open_checkpoint
    from llmc.compiler.config import BuildConfig
    from llmc.compiler.cuda.sizes import with_drafts
    from llmc.compiler.eagle.build import eagle_bytes
    from llmc.compiler.medusa.build import open_heads
    from llmc.compiler.progress import progress_for
    from llmc.compiler.summary import built, planned

    quality = _quality(given)
    config = _locked(given) if given["locked"] else BuildConfig(quantization=quant, **given)
    if engine is None and not dry_run:
        raise UsageError("say where the engine goes: -o ENGINE (or --dry-run to write nothing)")
    signal.signal(signal.SIGTERM, _interrupt)
    with progress_for(quiet) as progress:
        if engine is None or dry_run:
            if quality is not None:
                quality.read()  # refuses what the build would refuse
            compiled = compile_model(open_checkpoint(model, config, progress), config, progress)
            heads = open_heads(config, compiled.steps, compiled.target.name)  # refuses the same
            result = planned(with_drafts(compiled, heads, config), heads, eagle_bytes(compiled, config))
        else:
            try:
                result = built(build_engine(model, engine, config, quality=quality, force=force, progress=progress))
            except GateError as failure:
                if as_json and failure.figures is not None:
                    _print({"engine": None, **failure.figures}, as_json)
                raise
    result |= {"seconds": progress.seconds, "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}
    _print(result, as_json)


@click.command()
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
def inspect(path: Path, as_json: bool) -> None:
    """Show what is in a model directory, a GGUF file or an engine: sizes, memory, plan.

    Files of an engine are verified. A CUDA engine holds machine code: load one only if you trust who built it.
    """
    from llmc.runtime import manifest

    if (path / manifest.NAME).exists():
        from llmc.compiler.inspect_engine import describe
        from llmc.runtime.engine import load_engine

        _print(describe(load_engine(path)), as_json)
        return
    from llmc.compiler.inspect_model import describe_model

    _print(describe_model(path), as_json)


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print as JSON.")
def passes(as_json: bool) -> None:
    """List the graph passes in the order in which they run."""
    from llmc.passes import ordered_passes
    from llmc.passes.fx import ordered_fx_passes

    rows = [{"stage": "fx", "name": p.__name__, "what": _first_line(p)} for p in ordered_fx_passes()]
    rows += [{"stage": p.stage.name.lower(), "name": p.__name__, "what": _first_line(p)} for p in ordered_passes()]
    _print_rows(rows, as_json)


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print as JSON.")
def ops(as_json: bool) -> None:
    """List the ops, their inputs and attributes, and the kernels of this build."""
    from llmc.plugins import all_ops, kernels

    available, isas = set(kernels.ops()), ", ".join(kernels.isas())
    kernel = f"cpu ({isas})" if as_json else "cpu"
    rows = [
        {
            "op": op.name,
            "inputs": ", ".join(op.inputs),
            "outputs": ", ".join(op.outputs),
            "attributes": ", ".join(f"{name}: {kind.__name__}" for name, kind in op.attributes.items()),
            "kernels": kernel if op.name in available else "none",
        }
        for op in all_ops().values()
    ]
    _print_rows(rows, as_json)
    if not as_json:
        click.echo(f"instruction sets of this machine: {isas}", err=True)


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print as JSON.")
def targets(as_json: bool) -> None:
    """List the targets that an engine can be built for, and the size of what those for GPUs take beside llmc."""
    from llmc.compiler.cuda import packages
    from llmc.compiler.targets.base import all_targets

    _print_rows([{"target": t.name, "device": t.device, "what": t.summary} for t in all_targets().values()], as_json)
    if not as_json:
        for line in packages.lines():
            click.echo(line, err=True)


def _quality(given: dict[str, Any]) -> QualityRequest | None:
    """Take the options of QUALITY out of those given; None if nothing is to be measured."""
    gate, text = given.pop("gate"), given.pop("eval")
    values = {name: given.pop(f"eval_{name}") for name in ("windows", "context", "tokens", "prompts")}
    values = {name: value for name, value in values.items() if value is not None}
    if given["locked"]:
        return _locked_quality(given["locked"], text, values.get("prompts"))
    if gate is None and text is None:
        if values:
            raise UsageError(f"--eval-{next(iter(values))} belongs to --eval or --gate")
        return None
    from llmc.compiler.evaluation.evaluate import Evaluation
    from llmc.compiler.gate import QualityRequest, parse_gate

    return QualityRequest(Evaluation(text, **values), None if gate is None else parse_gate(gate))


FREE_OF_LOCK = (
    "model",
    "engine",
    "locked",
    "calib",
    "reuse",
    "medusa",
    "eagle",
    "eval",
    "eval_prompts",
    "allow_hard_links",
    "force",
    "as_json",
    "quiet",
    "dry_run",
)
"""Options that may stand beside --locked: they change no byte, or say where something is."""


def _locked(given: dict[str, Any]) -> BuildConfig:
    """The options that recipe.json names. Raises UsageError for others that are given too."""
    from llmc.compiler.config import BuildConfig
    from llmc.compiler.quantize import locked

    context = click.get_current_context()
    for name in context.params:
        if name not in FREE_OF_LOCK and context.get_parameter_source(name) is not ParameterSource.DEFAULT:
            option = next((o.opts[-1] for o in context.command.params if o.name == name), name)
            raise UsageError(f"{option}: --locked repeats a build as it was; leave the option away")
    kept = {name: given[name] for name in ("locked", "calib", "reuse", "allow_hard_links", "lora", "medusa", "eagle")}
    return BuildConfig(**(locked.options_of(given["locked"]) | kept))


def _locked_quality(path: Path, text: Path | None, prompts: Path | None) -> QualityRequest | None:
    """What recipe.json says was measured, on texts that are given once more."""
    from llmc.compiler.gate import repeated
    from llmc.compiler.quantize import locked

    section = locked.read(path).get("quality")
    if isinstance(section, dict):
        return repeated(section, text, prompts)
    if text is not None or prompts is not None:
        raise UsageError(f"--locked {path}: that build measured nothing; leave the text away")
    return None


def _interrupt(number: int, frame: Any) -> None:
    """End as with Ctrl-C, so that what was written is removed."""
    raise KeyboardInterrupt


def _first_line(thing: Any) -> str:
    return (thing.__doc__ or "").strip().partition("\n")[0]


def _print(result: dict[str, Any], as_json: bool) -> None:
    """A result of several sections; ``_table`` names those that only people read."""
    if as_json:
        click.echo(json.dumps(result, indent=1, ensure_ascii=False))
        return
    from llmc.compiler.summary import rows_for_people

    _print_pairs(rows_for_people(result))


def _print_pairs(rows: list[tuple[str, str]]) -> None:
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        click.echo(f"{name:<{width}}  " + value.replace("\n", "\n" + " " * (width + 2)))


def _print_rows(rows: list[dict[str, str]], as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(rows, indent=1, ensure_ascii=False))
        return
    if not sys.stdout.isatty():  # whole lines for other programs
        for row in rows:
            click.echo("\t".join(row.values()))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, header_style="bold")
    for name in rows[0] if rows else ():
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*row.values())
    Console().print(table)
