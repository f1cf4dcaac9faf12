"""The llmc command. Subcommands are imported when they are used, so that `llmc --help` is quick."""

import importlib
import sys
from collections.abc import Sequence
from typing import NoReturn

import click

from llmc import debug
from llmc.errors import LlmcError

COMMANDS = {
    "build": ("llmc.compiler.cli:build", "Compile a model directory or GGUF file into an engine directory."),
    "run": ("llmc.runtime.cli:run", "Generate text with an engine: one prompt, a chat, or a JSONL file."),
    "serve": ("llmc.runtime.server.cli:serve", "Serve engines over HTTP, with OpenAI's API."),
    "eval": ("llmc.compiler.evaluation.cli:evaluate_engine", "Measure an engine's quality; compare it with its model."),
    "bench": ("llmc.runtime.bench:bench", "Measure prefill, decode and mixed batches of an engine."),
    "bench serve": ("llmc.runtime.bench_serve:serve", "Send load to a server of OpenAI's API; latencies, goodput."),
    "verify": ("llmc.runtime.cli:verify", "Check an engine's files, and replay the golden prompts recorded at build."),
    "inspect": ("llmc.compiler.cli:inspect", "Show what is in a model directory or an engine: sizes, memory, plan."),
    "diff": ("llmc.compiler.diff:diff", "Compare an engine with its model or another engine, layer by layer."),
    "medusa train": ("llmc.compiler.medusa.cli:train", "Train heads for speculative decoding on what a model writes."),
    "passes": ("llmc.compiler.cli:passes", "List the graph passes in the order in which they run."),
    "ops": ("llmc.compiler.cli:ops", "List the ops, their inputs and attributes, and the kernels of this build."),
    "targets": ("llmc.compiler.cli:targets", "List the targets that an engine can be built for."),
}
"""name: (module:function, one line of help)"""

EPILOG = (
    "Exit codes: 0 ok, 1 user error, 2 usage, 3 gate failed, 4 corrupt or incompatible artifact, 5 out of resources, "
    "130 interrupted."
)


INTERRUPTED = 130
"""Exit code after Ctrl-C or SIGTERM, as shells have it."""


class LazyGroup(click.Group):
    """A group whose commands are imported on first use."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """All names, in the order of COMMANDS."""
        return list(COMMANDS)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Names of two words go before those of one."""
        if (name := " ".join(args[:2])) in COMMANDS:
            return name, self.get_command(ctx, name), args[2:]
        return super().resolve_command(ctx, args)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the command."""
        if cmd_name not in COMMANDS:
            return None
        module, function = COMMANDS[cmd_name][0].split(":")
        command: click.Command = getattr(importlib.import_module(module), function)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The list of commands, without importing any of them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])


@click.group(cls=LazyGroup, epilog=EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="llmc-engine", prog_name="llmc")
def cli() -> None:
    r"""Compile Hugging Face language models into self-contained engines, and run them.

    \b
    llmc build model/ -o engine/                         compile
    llmc run engine/ -p "The capital of France is"       generate
    """


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command and exit; errors of llmc end it with their exit code and without a traceback."""
    try:
        code = cli.main(args=arguments, prog_name="llmc", standalone_mode=False)
        sys.exit(code if isinstance(code, int) else 0)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except click.Abort:  # Ctrl-C, SIGTERM
        click.echo("llmc: interrupted", err=True)
        sys.exit(INTERRUPTED)
    except LlmcError as error:
        if debug.enabled("LLMC_DEBUG"):
            raise
        click.echo(f"llmc: error: {error}", err=True)
        sys.exit(error.exit_code)
    except MemoryError:
        if debug.enabled("LLMC_DEBUG"):
            raise
        click.echo("llmc: error: out of memory; use smaller limits (--max-batch-tokens, --max-sequences)", err=True)
        sys.exit(5)


if __name__ == "__main__":
    main()
