"""`llmc medusa train`: heads for speculative decoding, for a model that has none."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import click

SHOWN: dict[str, Any] = {"show_default": True}


@click.command(name="train")
@click.argument("model", type=click.Path(path_type=Path))
@click.option("-o", "--output", "target", required=True, type=click.Path(path_type=Path), help="The directory to make.")
@click.option("--heads", type=int, default=3, **SHOWN, help="How many tokens are guessed beyond the next one.")
@click.option("--layers", type=int, default=1, **SHOWN, help="Residual blocks of a head.")
@click.option(
    "--no-token",
    "token",
    flag_value=False,
    default=True,
    help="Heads that don't see the model's own next token: right less often, but other tools can read them.",
)
@click.option(
    "--prompts",
    type=click.Path(path_type=Path),
    help="That the model answers: lines, or JSONL. [default: ours and its own]",
)
@click.option("--texts", type=int, default=512, **SHOWN, help="Answers that the model writes.")
@click.option("--length", type=int, default=384, **SHOWN, help="Tokens of a prompt and its answer at most.")
@click.option("--temperature", type=float, default=0.3, **SHOWN, help="That answers are drawn with; 0: greedy.")
@click.option("--quant", "quantization", default="none", **SHOWN, help="Of the model that writes, as of `llmc build`.")
@click.option("--epochs", type=int, default=6, **SHOWN, help="How often each token is learnt from.")
@click.option("--batch", type=int, default=512, **SHOWN, help="Tokens of a step.")
@click.option("--learning-rate", type=float, default=2e-3, **SHOWN, help="At its highest.")
@click.option(
    "--decay", type=float, default=0.8, **SHOWN, help="What each head's loss counts less than the last one's."
)
@click.option("--candidates", type=int, default=8192, **SHOWN, help="Tokens that the loss looks at; 0: all.")
@click.option(
    "--held-out", type=float, default=0.05, **SHOWN, help="Share of the answers that accuracy is measured on."
)
@click.option("--seed", type=int, default=0, **SHOWN)
@click.option("--minutes", type=float, help="In all, at most 60 % of it for answers. [default: no limit]")
@click.option("--work", type=click.Path(path_type=Path), help="A folder for answers and state that stays.")
@click.option("--threads", type=click.IntRange(1), help="[default: the physical cores available]")
@click.option("--allow-hard-links", is_flag=True, help="Accept model files that have a second name elsewhere.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
@click.option("--quiet", is_flag=True, help="No progress.")
def train(
    model: Path,
    target: Path,
    work: Path | None,
    threads: int | None,
    allow_hard_links: bool,
    as_json: bool,
    quiet: bool,
    **given: Any,
) -> None:
    """Train Medusa heads on what the model itself writes; no data set is needed.

    \b
    llmc medusa train model/ -o heads/
    llmc medusa train model/ -o heads/ --prompts prompts.jsonl --minutes 60
    llmc build model/ -o engine/ --medusa heads/

    A run that was ended goes on where it was. Without --minutes the result is the same again on the same machine.
    """  # noqa: D301 - click's mark for lines that it must not wrap
    from llmc.compiler.cli import _interrupt
    from llmc.compiler.medusa.distill import train_medusa
    from llmc.compiler.medusa.settings import HeadTraining
    from llmc.compiler.progress import progress_for

    settings = HeadTraining(**given)
    signal.signal(signal.SIGTERM, _interrupt)
    with progress_for(quiet) as progress:
        found = train_medusa(
            model, target, settings, work=work, threads=threads, allow_hard_links=allow_hard_links, progress=progress
        )
    if as_json:
        result = {**vars(found), "heads": str(found.path), "seconds": progress.seconds}
        result.pop("path")
        click.echo(json.dumps(result, indent=1))
        return
    click.echo(f"heads     {found.path}")
    click.echo(f"texts     {found.texts}, {found.tokens} tokens")
    click.echo(f"training  {found.steps} steps, loss {found.loss:.3f}")
    for number, head in enumerate(found.accuracy, 1):
        click.echo(f"head {number}    " + ", ".join(f"{name} {share:.1%}" for name, share in head.items()))
