"""The process that renders chat templates: python -m llmc.runtime.template_worker, started by chat_template.py.

A template is a program from the model's author, so it runs where it can do nothing: in Jinja's immutable sandbox,
without a loader, in a process whose memory, processor time and output are limited.
"""

from __future__ import annotations

import json
import sys
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from llmc.runtime.limited_process import limit_memory, read, start_clock, write

MAX_MEMORY = 256 << 20
"""Bytes of address space beyond what the process has when it starts to work."""
MAX_OUTPUT = 4 << 20
"""Bytes of rendered text."""


class GenerationTag(Extension):
    """``{% generation %}``: marks what the model says, for training; here just its content."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The body between the tags."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def environment() -> ImmutableSandboxedEnvironment:
    """Jinja as transformers sets it up for chat templates: whitespace, tags, filters and functions."""
    result = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols], autoescape=False
    )
    result.globals.pop("lipsum", None)
    result.globals["raise_exception"] = raise_exception
    result.globals["strftime_now"] = strftime_now
    result.filters["tojson"] = tojson
    return result


def raise_exception(message: str) -> NoReturn:
    """For templates: refuse the messages."""
    raise jinja2.TemplateError(message)


def strftime_now(format: str) -> str:
    """For templates: the local time."""
    return datetime.now().strftime(format)


def tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """For templates: JSON as it is, not escaped for HTML as Jinja's own filter does."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def render(template: jinja2.Template, variables: dict[str, Any]) -> dict[str, str]:
    """The text, or what went wrong."""
    parts, size = [], 0
    try:
        for part in template.generate(variables):
            size += len(part)
            if size > MAX_OUTPUT:
                return {"error": f"the chat template wrote more than {MAX_OUTPUT >> 20} MiB"}
            parts.append(part)
        return {"text": "".join(parts)}
    except MemoryError:
        parts.clear()
        return {"error": f"the chat template needed more than {MAX_MEMORY >> 20} MiB of memory"}
    except jinja2.TemplateError as problem:
        return {"error": str(problem.message or problem)}
    except Exception as problem:  # whatever a template does wrong is its own or the messages' fault
        return {"error": f"the chat template failed: {type(problem).__name__}: {problem}"[:1000]}


def main() -> None:
    """Serve: first the template, then sets of variables, one answer each."""
    source = read(sys.stdin.buffer)
    if source is None:
        return
    limit_memory(MAX_MEMORY)
    start_clock()
    try:
        template = environment().from_string(source)
        write(sys.stdout.buffer, {"text": ""})
    except Exception as problem:
        write(
            sys.stdout.buffer, {"error": f"the chat template is not valid: {type(problem).__name__}: {problem}"[:1000]}
        )
        return
    while (variables := read(sys.stdin.buffer)) is not None:
        start_clock()
        write(sys.stdout.buffer, render(template, variables))


if __name__ == "__main__":
    main()
