"""`llmc eval`: perplexity of an engine, its distance from a source model, and what it writes freely."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from llmc.errors import UsageError

if TYPE_CHECKING:
    from llmc.compiler.evaluation.figures import Figures
    from llmc.compiler.evaluation.subject import Subject
    from llmc.compiler.gate import Result
    from llmc.runtime.engine import Engine

F = TypeVar("F", bound=Callable[..., Any])

GATE_HELP = "Conditions that must hold, such as ppl<=+2%,top1>=0.95,kl<=0.05; exit status 3 if one does not."


@click.command(name="eval")
@click.argument("engine_dir", metavar="ENGINE", type=click.Path(path_type=Path))
@click.option("--against", type=click.Path(path_type=Path), help="What it is held to: its source model, or an engine.")
@click.option("--eval", "text", type=click.Path(path_type=Path), help="A text file. [default: ours]")
@click.option("--windows", type=click.IntRange(0), default=8, show_default=True, help="Of the text; 0: all.")
@click.option("--context", type=click.IntRange(2), help="Tokens of a window. [default: 2048, or 512]")
@click.option("--tokens", type=click.IntRange(0), help="Of free generation; 0: none. [default: 256 or what fits]")
@click.option("--prompts", type=click.Path(path_type=Path), help="To continue freely: lines, or JSONL. [default: ours]")
@click.option("--gate", "gate_text", help=GATE_HELP)
@click.option("--threads", type=click.IntRange(1), help="[default: the physical cores available]")
@click.option("--isa", help="Instruction set. [default: the best of this machine]")
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON.")
@click.option("--quiet", is_flag=True, help="No progress.")
def evaluate_engine(
    engine_dir: Path,
    against: Path | None,
    text: Path | None,
    windows: int,
    context: int | None,
    tokens: int | None,
    prompts: Path | None,
    gate_text: str | None,
    threads: int | None,
    isa: str | None,
    as_json: bool,
    quiet: bool,
) -> None:  # long: one parameter for each option
    """Measure the quality of an engine on a text.

    \b
    llmc eval engine/ --eval text.txt
    llmc eval engine/ --eval text.txt --against model/            by transformers in float32; needs the extra [build]
    llmc eval engine/ --eval text.txt --against bf16-engine/

    The text is cut into windows that do not overlap; every token but the first of a window is predicted from the true
    ones before it. Then prompts are continued greedily, and the texts compared.
    """  # noqa: D301 - click's mark for lines that it must not wrap
    from llmc.compiler.evaluation.evaluate import Evaluation, evaluate, tokens_for
    from llmc.compiler.evaluation.subject import EngineSubject
    from llmc.compiler.gate import parse_gate
    from llmc.compiler.progress import progress_for
    from llmc.runtime.engine import load_engine

    evaluation = Evaluation(text, windows, context, tokens, prompts)
    gate = None if gate_text is None else parse_gate(gate_text)
    if gate is not None:
        gate.check_request(evaluation, compared=against is not None)
    inputs = evaluation.read()
    with progress_for(quiet) as progress:
        progress.step("loading")
        engine = load_engine(engine_dir)
        ids = tokens_for(engine, inputs)
        subject = EngineSubject(engine, ids.room, threads, isa)
        reference = None if against is None else _reference(engine, against, ids, inputs, threads, isa)
        figures = evaluate(subject, reference, inputs, ids, progress)
    results = [] if gate is None else gate.check(figures)
    if as_json:
        result = {"engine": str(engine_dir), "digest": f"sha256:{engine.digest}", **figures.to_json()}
        if gate is not None:
            result["gate"] = [r.to_json() for r in results]
        json.dump(result, sys.stdout, indent=1, ensure_ascii=False)
        click.echo()
    else:
        print_figures(figures, results)
    if gate is not None:
        gate.require(figures, "the engine is not as good as asked for")


def _reference(engine: Engine, against: Path, ids: Any, inputs: Any, threads: int | None, isa: str | None) -> Subject:
    from llmc.compiler.evaluation.evaluate import tokens_for
    from llmc.compiler.evaluation.subject import EngineSubject
    from llmc.runtime import manifest
    from llmc.runtime.engine import load_engine

    if (against / manifest.NAME).exists():
        other = load_engine(against)
        if other.model.vocab_size == engine.model.vocab_size and tokens_for(other, inputs).windows != ids.windows:
            raise UsageError(f"{against}: its tokenizer cuts the text into other tokens; they are not the same model")
        return EngineSubject(other, ids.room, threads, isa)
    try:
        from llmc.compiler.checkpoint import Checkpoint
        from llmc.compiler.evaluation.source_model import SourceModel
    except ImportError as problem:
        raise UsageError(
            f"--against {against}: a model is run by transformers, which needs the extra [build] ({problem}); an "
            "engine can be compared with without it"
        ) from problem
    return SourceModel(Checkpoint.open(against), threads)


def print_figures(figures: Figures, results: list[Result]) -> None:
    """Tables for people. Texts of models are shown as Python strings, so that nothing in them reaches the terminal."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from llmc.compiler.evaluation.table import figure_rows
    from llmc.compiler.gate import table

    console = Console()
    c, g = figures.comparison, figures.generation
    grid = Table(box=None, header_style="bold")
    for heading in ("figure", "engine", *(() if c is None else (f"source {c.reference}", "difference"))):
        grid.add_column(heading, justify="left" if heading == "figure" else "right")
    for row in figure_rows(figures):
        grid.add_row(*row[: len(grid.columns)])
    console.print(grid)
    console.print(
        f"{escape(figures.text)}: {figures.windows} of {figures.windows_of} windows of {figures.context} tokens, "
        f"{figures.scored} scored{', each after a begin token' if figures.bos else ''}"
        + (f"; {len(g.continuations)} free texts of up to {g.limit} tokens" if g else ""),
        highlight=False,
    )
    worst = Table(title="where it is worst", title_justify="left", box=None, header_style="bold")
    for heading in (
        "window",
        "token",
        "KL" if c else "nll",
        "after",
        "comes",
        "engine says",
        *(("source says",) if c else ()),
    ):
        worst.add_column(heading, overflow="fold")
    for p in figures.worst:
        number = p.nll if p.divergence is None else p.divergence
        texts = [repr(p.before[-24:]), repr(p.token), repr(p.top), *([repr(p.reference_top)] if c else [])]
        worst.add_row(str(p.window), str(p.position), f"{number:.3g}", *map(escape, texts))
    console.print(worst)
    for line in table(results) if results else ():
        console.print(line, highlight=False, markup=False)
