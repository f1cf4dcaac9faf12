"""DeepSeek V3, R1 (function, name and a block of JSON) and V3.1 (name and JSON), between control tokens."""

# ruff: noqa: RUF001

from __future__ import annotations

import json
import re
from collections.abc import Callable

from llmc.runtime.constraints.grammars import json_rule, literal
from llmc.runtime.tool_calls.base import Call, Taken, ToolFormat, Tools, balanced, blanks, function, parsed

BEGIN, END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, SEPARATOR, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
HEAD = re.compile(rf"{CALL}(?:function{SEPARATOR})?([\w.-]+)(?:{SEPARATOR}|\s*(?=```))\s*(?:```json\s*)?(?=\{{)")
NAMES = re.compile(rf"{CALL}([\w.-]*)")


class DeepSeek(ToolFormat):
    """See the module."""

    name = "deepseek"
    openings = (BEGIN, CALL)
    ends = "}>"

    def fits(self, template: str) -> bool:
        """See ToolFormat."""
        return BEGIN in template

    def take(self, text: str, tools: Tools, *, final: bool) -> Taken | None:
        """See ToolFormat: all calls up to the end of the list, or one that stands alone."""
        if not text.startswith(BEGIN):
            return self._one(text, 0)
        calls: list[Call] = []
        at = blanks(text, len(BEGIN))
        while True:
            if text.startswith(END, at):
                return Taken(at + len(END) if calls else len(BEGIN), tuple(calls))
            if END.startswith(text[at:]) or CALL.startswith(text[at:]):
                return None
            one = self._one(text, at)
            if one is None:
                return None
            if not one.calls:
                return Taken(at, tuple(calls)) if calls else Taken(len(BEGIN))
            calls += one.calls
            at = blanks(text, at + one.length)

    def _one(self, text: str, at: int) -> Taken | None:
        if not text.startswith(CALL, at):
            return Taken(1)
        match = HEAD.match(text, at)
        if match is None:
            rest = text[at:]
            return Taken(len(CALL)) if "{" in rest or CALL_END in rest or rest.count("\n") > 4 else None
        end = balanced(text, match.end())
        if end is None:
            return None
        arguments = parsed(text[match.end() : end])
        if not isinstance(arguments, dict):
            return Taken(len(CALL))
        close = blanks(text, end)
        if "```".startswith(text[close : close + 3]) and len(text) < close + 3:
            return None
        close = blanks(text, close + 3) if text.startswith("```", close) else close
        if text.startswith(CALL_END, close):
            call = Call(match[1], json.dumps(arguments, ensure_ascii=False))
            return Taken(close + len(CALL_END) - at, (call,))
        return None if CALL_END.startswith(text[close:]) else Taken(len(CALL))

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
