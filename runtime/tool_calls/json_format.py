"""Formats whose calls are JSON behind an opening: ``{"name": ..., "arguments": {...}}`` or a list of such."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from llmc.runtime.constraints.grammars import json_rule, literal
from llmc.runtime.tool_calls.base import (
    Taken,
    ToolFormat,
    Tools,
    balanced,
    blanks,
    call_of,
    call_schema,
    known,
    parsed,
    repeated,
)


class JsonFormat(ToolFormat):
    """A base of formats.

    Attributes:
        hints: texts of chat templates, each of which tells this format.
        closing: what ends a call; ``closing_needed``: without it there is none.
        key: how arguments are called in what is asked for; both spellings are understood.
        lists: a list of calls is asked for.
        separator: what may stand between calls.
    """

    hints: ClassVar[tuple[str, ...]]
    closing: ClassVar[str] = ""
    closing_needed: ClassVar[bool] = False
    key: ClassVar[str] = "arguments"
    lists: ClassVar[bool] = False
    blank: ClassVar[str] = ""
    separator: ClassVar[str] = "\n"

    def fits(self, template: str) -> bool:
        """See ToolFormat."""
        return any(hint in template for hint in self.hints)

    def take(self, text: str, tools: Tools, *, final: bool) -> Taken | None:
        """See ToolFormat."""
        opening = next(o for o in self.openings if text.startswith(o))
        first = len(opening) if opening not in "{[" else 0
        begin = blanks(text, first)
        if begin == len(text):
            return None
        if text[begin] not in "{[":
            return Taken(len(opening))
        end = balanced(text, begin)
        if end is None:
            return None
        value = parsed(text[begin:end])
        calls = [call_of(item) for item in (value if isinstance(value, list) else [value])]
        if not calls or None in calls or (self.at_start and not known(calls, tools)):
            return Taken(len(opening))
        close = blanks(text, end)
        if self.closing and not text.startswith(self.closing, close):
            if not final and self.closing.startswith(text[close:]):
                return None
            if self.closing_needed:
                return Taken(len(opening))
        elif self.closing:
            end = close + len(self.closing)
        return Taken(end, tuple(call for call in calls if call is not None))

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
