"""Formats whose calls are JSON behind an opening: ``{"name": ..., "arguments": {...}}`` or a list of such."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import ClassVar

from llmc.runtime.constraints.grammars import json_rule, literal
from llmc.runtime.tool_calls.base import (
    Nesting,
    Source,
    Steps,
    ToolDelta,
    ToolFormat,
    Tools,
    blanks,
    call_of,
    call_schema,
    known,
    more,
    parsed,
    repeated,
    skip,
    verbatim,
)

HEAD = re.compile(r'\{\s*"name"\s*:\s*"([^"\\]{1,256})"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')


class JsonFormat(ToolFormat):
    """A base of formats.

    Attributes:
        hints: texts of chat templates, each of which tells this format.
        closing: what ends a call; it may be missing.
        key: how arguments are called in what is asked for; both spellings are understood.
        lists: a list of calls is asked for.
        separator: what may stand between calls.
    """

    hints: ClassVar[tuple[str, ...]]
    closing: ClassVar[str] = ""
    key: ClassVar[str] = "arguments"
    lists: ClassVar[bool] = False
    blank: ClassVar[str] = ""
    separator: ClassVar[str] = "\n"

    def fits(self, template: str) -> bool:
        """See ToolFormat."""
        return any(hint in template for hint in self.hints)

    def read(self, source: Source, tools: Tools) -> Steps[None]:
        """See ToolFormat: arguments behind a name are given as they come, a call in another order when it ends."""
        opening = next(o for o in self.openings if source.held.startswith(o))
        begin = 0 if opening in "{[" else len(opening)
        while (begin := blanks(source.held, begin)) == len(source.held):
            if not (yield from more(source)):
                return
        listed = source.held[begin] == "["
        if not (yield from self._one(source, begin + listed, tools)):
            return
        while listed and (yield from skip(source, ",", "]")) == ",":
            if not (yield from self._one(source, 0, tools)):
                return
        if self.closing:
            yield from skip(source, self.closing)

    def _one(self, source: Source, begin: int, tools: Tools) -> Steps[bool]:
        """The call that begins there; False: there is none, and nothing is taken."""
        while (begin := blanks(source.held, begin)) == len(source.held):
            if not (yield from more(source)):
                return False
        nesting, seen, end = Nesting(), begin, None
        while end is None and source.held[begin] == "{":
            if (match := HEAD.match(source.held, begin)) and self._allows(match[1], tools):
                source.take(match.end())
                yield ToolDelta(name=match[1])
                yield from verbatim(source)
                yield from self._close(source)
                return True
            end, seen = nesting.end(source.held, seen), len(source.held)
            if end is None and not (yield from more(source)):
                return False
        call = None if end is None else call_of(parsed(source.held[begin:end]))
        if end is None or call is None or not self._allows(call.name, tools):
            return False
        source.take(end)
        yield ToolDelta(name=call.name, arguments=call.arguments)
        return True

    def _allows(self, name: str, tools: Tools) -> bool:
        return not self.at_start or known((name,), tools)

    def _close(self, source: Source) -> Steps[None]:
        """Drop what an object has behind its arguments."""
        if (yield from skip(source, "}", ",")) == ",":
            nesting = Nesting(depth=1)
            while (end := nesting.end(source.held)) is None:
                source.held = ""
                if not (yield from more(source)):
                    return
            source.take(end)

    def grammar(self, tools: Tools, token: Callable[[str], str], *, several: bool) -> str:
        """See ToolFormat."""
        schema = call_schema(tools, self.key)
        blank, opening = literal(self.blank) if self.blank else "", self.openings[0]
        opened = "" if opening in "{[" else f"{token(opening)} {blank}"
        closed = f"{blank} {token(self.closing)}" if self.closing else ""
        if self.lists:
            limit = {} if several else {"maxItems": 1}
            value = {"type": "array", "items": schema, "minItems": 1, **limit}
            return f"start: {opened} value {closed}\nvalue: {json_rule(value)}\n"
        return (
            repeated("call", literal(self.separator), several=several)
            + f"call: {opened} value {closed}\nvalue: {json_rule(schema)}\n"
        )
