"""Options of `llmc build` that say how weights are quantized."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

Command = Callable[..., Any]


def quantization_options(command: Command) -> Command:
    """Adds them to a command, whose keyword arguments they become."""
    for option in reversed([*_weights(), *_calibration()]):
        command = option(command)
    return command


def _weights() -> list[Callable[[Command], Command]]:
    file = click.Path(path_type=Path, dir_okay=False)
    return [
        click.option(
            "--quant",
            default="none",
            show_default=True,
            metavar="METHOD",
            help="How weights are stored in fewer bits: rtn, awq, gptq (int4 or int8), smoothquant (int8 weights and "
            "inputs), fp8; with options: awq:group=64,sym=false. Short names: int4, int8, w8a8.",
        ),
        click.option(
            "--quant-help",
            is_flag=True,
            is_eager=True,
            expose_value=False,
            callback=_help,
            help="List all methods and options.",
        ),
        click.option(
            "--dequantize",
            is_flag=True,
            help="Make floats of weights that the checkpoint stores quantized (GGUF, AWQ, GPTQ, ...).",
        ),
        click.option(
            "--locked",
            type=file,
            help="The recipe.json of an engine: build it once more, or say what has changed (versions, files, texts).",
        ),
        click.option(
            "--reuse",
            type=click.Path(path_type=Path, file_okay=False),
            help="An engine whose quantized weights are taken over if they would come out the same. --force looks at "
            "the engine that it replaces.",
        ),
        click.option("--recipe", type=file, help="A YAML file with all of it, and rules for single weights."),
        click.option(
            "--compute",
            default="auto",
            show_default=True,
            help="What quantized products compute with: int8, bfloat16, float32, fp8 (fp8 weights only) or auto; on "
            "the CPU that is int8 for int4 and int8 weights and bfloat16 for fp8 weights, or what the method or the "
            "checkpoint says of the inputs.",
        ),
        click.option("--quant-lm-head", is_flag=True, help="Quantize the output layer too."),
        click.option("--quant-embedding", is_flag=True, help="Quantize the embedding too."),
        click.option(
            "--budget",
            help="Bits per weight, such as 4.3bpw: each layer gets smaller groups, 8 bits, or stays as it is, where "
            "that helps the model most (as measured by the KL divergence of its output).",
        ),
        click.option(
            "--max-ppl-increase",
            help="The most that the perplexity may grow, such as 2%: the smallest choice of formats that is estimated "
            "to stay below, measured at the end on text that is held out of the calibration.",
        ),
    ]


def _calibration() -> list[Callable[[Command], Command]]:
    return [
        click.option(
            "--calib",
            default="builtin",
            show_default=True,
            help="Text that methods look at: builtin, self (the model writes it), or a .txt or .jsonl file.",
        ),
        click.option(
            "--calib-samples",
            type=click.IntRange(0),
            default=0,
            help="How many pieces of it. [default: as many as there are, up to 128]",
        ),
        click.option(
            "--calib-length", type=click.IntRange(2), help="Tokens of a piece. [default: 512, or what the engine takes]"
        ),
        click.option(
            "--calib-seed", type=click.IntRange(0), default=0, show_default=True, help="Which pieces are taken."
        ),
    ]


def _help(context: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted and not context.resilient_parsing:
        from llmc.quantization.options import help_text

        click.echo(help_text())
        context.exit()
