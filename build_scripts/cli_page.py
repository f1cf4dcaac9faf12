"""Writes docs/cli.md: every command and option of llmc, and every environment variable, as the code has them.

Usage: python build_scripts/cli_page.py           (tests/test_cli_page.py says when it is due)
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import click

from llmc import debug
from llmc.__main__ import COMMANDS, EPILOG, cli

PAGE = Path(__file__).parents[1] / "docs/cli.md"

OTHER_VARIABLES = {
    "LLMC_MODELS": "folder of real models, for tests and for build_scripts/demo.sh; llmc itself does not read it",
}
"""Variables of tests and scripts."""


def page() -> str:
    """The text of the page."""
    lines = ["# Commands, options, environment variables", ""]
    lines += ["Made by `build_scripts/cli_page.py` from the code; a test compares them.", "", EPILOG, ""]
    context = click.Context(cli, info_name="llmc")
    for name, (_, help_text) in COMMANDS.items():
        command = cli.get_command(context, name)
        assert command is not None, f"{name} is in COMMANDS"
        arguments = [p.make_metavar(context) for p in command.params if isinstance(p, click.Argument)]
        lines += [f"## llmc {' '.join([name, *arguments])}", "", help_text, ""]
        lines += ["| option | what |", "|---|---|"]
        lines += [f"| {_names(option, context)} | {_help(option, context)} |" for option in _options(command)]
        lines.append("")
    lines += ["## Environment variables", "", "| variable | what |", "|---|---|"]
    lines += [f"| `{name}` | {_cell(text)} |" for name, text in (debug.VARIABLES | OTHER_VARIABLES).items()]
    return "\n".join(lines) + "\n"


def _options(command: click.Command) -> Iterator[click.Option]:
    yield from (p for p in command.params if isinstance(p, click.Option))


def _names(option: click.Option, context: click.Context) -> str:
    names = ", ".join(f"`{name}`" for name in sorted(option.opts, key=len))
    return names if option.is_flag else f"{names} {_cell(option.make_metavar(context))}"


def _help(option: click.Option, context: click.Context) -> str:
    text = _cell(" ".join((option.help or "").split()))
    has_default = option.show_default and option.default is not None
    return f"{text} [default: {_cell(str(option.default))}]" if has_default else text


def _cell(text: str) -> str:
    """What a table of Markdown takes for text."""
    for character in "\\|<>*":
        text = text.replace(character, "\\" + character)
    return text


if __name__ == "__main__":
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page(), encoding="utf-8")
