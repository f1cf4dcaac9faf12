"""`llmc run --chat`: a conversation in the terminal."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING

import click

from llmc.errors import RequestError
from llmc.runtime.terminal import show, watched_interrupt

if TYPE_CHECKING:
    from llmc.runtime.llm import LLM
    from llmc.runtime.request import SamplingParams

HELP = "Ctrl-C stops an answer, Ctrl-D or /exit ends, /reset forgets what was said."


def converse(llm: LLM, params: SamplingParams, system: str | None, adapter: str | None = None) -> int:
    """Read turns from stdin, a line each, and answer them, perhaps with an adapter; returns the exit code."""
    if llm.tokenizer is None or llm.tokenizer.chat_template is None:
        raise RequestError("the model has no chat template; use -p")
    terminal = sys.stdin.isatty()
    if terminal:
        _enable_editing()
        click.echo(HELP, err=True)
    beginning = [] if system is None else [{"role": "system", "content": system}]
    messages = list(beginning)
    while (line := _read(terminal)) is not None:
        if line == "/exit":
            break
        if line == "/reset":
            messages = list(beginning)
        elif line in ("/help", "/?"):
            click.echo(HELP, err=True)
        elif line:
            messages.append({"role": "user", "content": line})
            answer = _answer(llm, params, messages, adapter)
            if answer is None:
                messages.pop()
            else:
                messages.append({"role": "assistant", "content": answer})
    return 0


def _answer(llm: LLM, params: SamplingParams, messages: list[dict[str, str]], adapter: str | None) -> str | None:
    """Print the answer as it comes; what there is of it if it was interrupted, None if there can be none."""
    answer = ""
    try:
        stream = llm.stream(messages, params, adapter=adapter)
    except RequestError as problem:
        hint = "; /reset starts anew" if problem.field == "prompt" else ""
        click.echo(f"llmc: error: {problem}{hint}", err=True)
        return None
    with watched_interrupt() as interrupt:
        for delta in stream:
            answer += delta.text
            show(delta.text)
            if delta.error is not None:
                click.echo(f"\nllmc: error: {delta.error}", err=True)
                return None
            if interrupt.pressed:
                break
    stream.close()
    click.echo()
    return answer


def _read(terminal: bool) -> str | None:
    """The next line, without blanks around it; None at the end."""
    try:
        return input("> " if terminal else "").strip()
    except EOFError:
        if terminal:
            click.echo()
        return None
    except KeyboardInterrupt:
        click.echo()
        return None


def _enable_editing() -> None:
    """Arrow keys and history for input(), where Python has readline."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401
