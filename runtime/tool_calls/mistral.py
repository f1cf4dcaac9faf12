"""Mistral: [TOOL_CALLS] and a list of objects, or since 2025 [TOOL_CALLS]name[ARGS]{...} for each call."""

from __future__ import annotations

import re
from collections.abc import Callable

from llmc.runtime.constraints.grammars import json_rule, literal
from llmc.runtime.tool_calls.base import Source, Steps, ToolDelta, Tools, function, more, repeated, verbatim
from llmc.runtime.tool_calls.json_format import JsonFormat

NAMED = re.compile(r"\[TOOL_CALLS\]\s*([\w.-]+)(?:\[CALL_ID\][\w-]*)?(?:\[ARGS\])?\s*(?=\{)")
MAYBE = re.compile(r"\[TOOL_CALLS\]\s*[\w.-]*(?:\[[A-Z_]*\]?[\w-]*){0,2}\s*\Z")


class Mistral(JsonFormat):
    """See the module."""

    name = "mistral"
    openings = ("[TOOL_CALLS]",)
    hints = ("[TOOL_CALLS]",)
    lists = True

    def read(self, source: Source, tools: Tools) -> Steps[None]:
        """See ToolFormat."""
        while (match := NAMED.match(source.held)) is None:
            if not MAYBE.match(source.held):
                yield from super().read(source, tools)
                return
            if not (yield from more(source)):
                return
        source.take(match.end())
        yield ToolDelta(name=match[1])
        yield from verbatim(source)

    def grammar(self, tools: Tools, token: Callable[[str], str], *, several: bool) -> str:
        """See ToolFormat: named calls if the model has [ARGS] as a control token, else a list."""
        separator = token("[ARGS]")
        if separator == literal("[ARGS]"):
            return super().grammar(tools, token, several=several)
        each = [f"{literal(name)} {separator} {json_rule(schema)}" for name, schema in map(function, tools)]
        rules = "".join(f"call{i}: {token('[TOOL_CALLS]')} {rule}\n" for i, rule in enumerate(each))
        return (
            repeated("call", "", several=several) + f"call: {' | '.join(f'call{i}' for i in range(len(each)))}\n{rules}"
        )


FORMAT = Mistral()
