"""DeepSeek V3, R1 (function, name and a block of JSON) and V3.1 (name and JSON), between control tokens."""

# ruff: noqa: RUF001

from __future__ import annotations

import re
from collections.abc import Callable

from llmc.runtime.constraints.grammars import json_rule, literal
from llmc.runtime.tool_calls.base import (
    Source,
    Steps,
    ToolDelta,
    ToolFormat,
    Tools,
    blanks,
    function,
    more,
    skip,
    verbatim,
)

BEGIN, END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, SEPARATOR, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
HEAD = re.compile(rf"{CALL}(?:function{SEPARATOR})?([\w.-]+)(?:{SEPARATOR}|\s*(?=```))\s*(?:```json\s*)?(?=\{{)")
NAMES = re.compile(rf"{CALL}([\w.-]*)")


class DeepSeek(ToolFormat):
    """See the module."""

    name = "deepseek"
    openings = (BEGIN, CALL)

    def fits(self, template: str) -> bool:
        """See ToolFormat."""
        return BEGIN in template

    def read(self, source: Source, tools: Tools) -> Steps[None]:
        """See ToolFormat: all calls up to the end of the list, or one that stands alone."""
        listed = source.held.startswith(BEGIN)
        if not (yield from self._one(source, len(BEGIN) if listed else 0)):
            return
        while listed and (yield from self._one(source, 0)):
            pass
        if listed:
            yield from skip(source, END)

    def _one(self, source: Source, at: int) -> Steps[bool]:
        """The call that begins there; False: there is none, and nothing is taken."""
        while (match := HEAD.match(source.held, begin := blanks(source.held, at))) is None:
            rest = source.held[begin:]
            maybe = rest.startswith(CALL) and "{" not in rest and CALL_END not in rest
            if not (maybe or CALL.startswith(rest)) or not (yield from more(source)):
                return False
        source.take(match.end())
        yield ToolDelta(name=match[1])
        yield from verbatim(source)
        yield from skip(source, "```")
        yield from skip(source, CALL_END)
        return True

    def grammar(self, tools: Tools, token: Callable[[str], str], *, several: bool) -> str:
        """See ToolFormat."""
        each = [
            f"call{i}: {token(CALL)} {literal('function')} {token(SEPARATOR)} {literal(name)} {literal(chr(10))} "
            f"{literal('```json')} {literal(chr(10))} {json_rule(schema)} {literal(chr(10) + '```')} "
            f"{token(CALL_END)}\n"
            for i, (name, schema) in enumerate(map(function, tools))
        ]
        calls = " | ".join(f"call{i}" for i in range(len(each)))
        more = f"({literal(chr(10))} call)*" if several else ""
        return f"start: {token(BEGIN)} call {more} {token(END)}\ncall: {calls}\n{''.join(each)}"


FORMAT = DeepSeek()
