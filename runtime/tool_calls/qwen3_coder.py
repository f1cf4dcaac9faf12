"""Qwen 3 Coder: <tool_call>, <function=name>, <parameter=key>, the value as it is."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from llmc.runtime.constraints.grammars import json_rule, literal
from llmc.runtime.tool_calls.base import (
    Source,
    Steps,
    ToolDelta,
    ToolFormat,
    Tools,
    cut_off,
    function,
    more,
    parsed,
    repeated,
    skip,
)

END, FUNCTION_END = "</tool_call>", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
HEAD = re.compile(rf"<tool_call>\s*<function=([^<>\n]+)>\s*(?={PARAMETER}|{FUNCTION_END})")
MAYBE = re.compile(r"<tool_call>\s*(?:<[^<>\n]*(?:>\s*(?:<[^<>\n]*)?)?)?\Z")
KEY = re.compile(r"([^>\n]+)>(?:\n|(?=[^\n]))")
MAYBE_KEY = re.compile(r"[^>\n]*>?\Z")


class Qwen3Coder(ToolFormat):
    """See the module."""

    name = "qwen3_coder"
    openings = ("<tool_call>",)

    def fits(self, template: str) -> bool:
        """See ToolFormat."""
        return "<function=" in template and "<parameter=" in template

    def read(self, source: Source, tools: Tools) -> Steps[None]:
        """See ToolFormat: texts are given as they come, other values when they end."""
        while (match := HEAD.match(source.held)) is None:
            if not MAYBE.match(source.held) or not (yield from more(source)):
                return
        source.take(match.end())
        yield ToolDelta(name=match[1], arguments="{")
        schema = next((schema for name, schema in map(function, tools) if name == match[1]), {})
        comma = ""
        while (mark := (yield from skip(source, PARAMETER, FUNCTION_END))) == PARAMETER:
            while (key := KEY.match(source.held)) is None:
                if not MAYBE_KEY.match(source.held) or not (yield from more(source)):
                    return
            source.take(key.end())
            yield ToolDelta(arguments=f"{comma}{_json(key[1])}: ")
            if not (yield from _value(source, schema.get("properties", {}).get(key[1]))):
                return
            comma = ", "
        if mark == FUNCTION_END:
            yield ToolDelta(arguments="}")
            yield from skip(source, END)

    def grammar(self, tools: Tools, token: Callable[[str], str], *, several: bool) -> str:
        """See ToolFormat."""
        rules = []
        for i, (name, schema) in enumerate(map(function, tools)):
            parts = [f"call{i}: {token('<tool_call>')} {literal(f'{chr(10)}<function={name}>{chr(10)}')}"]
            for key, value in schema.get("properties", {}).items():
                text = literal(f"<parameter={key}>\n")
                end = literal("\n</parameter>\n")
                inner = f"{text} {'TEXT' if _is_text(value) else json_rule(value)} {end}"
                parts.append(inner if key in schema.get("required", ()) else f"({inner})?")
            rules.append(" ".join([*parts, literal("</function>\n"), token(END)]) + "\n")
        calls = " | ".join(f"call{i}" for i in range(len(rules)))
        text = "TEXT: /[^<]*/\n"  # markup in a value could end it
        return repeated("call", literal("\n"), several=several) + f"call: {calls}\n{''.join(rules)}{text}"


def _is_text(schema: Any) -> bool:
    return isinstance(schema, Mapping) and schema.get("type") == "string" and "enum" not in schema


def _value(source: Source, schema: Any) -> Steps[bool]:
    """Give a value: strings are written as they are, anything else as JSON; False: it does not end."""
    is_string = isinstance(schema, Mapping) and schema.get("type") == "string"
    if is_string:
        yield ToolDelta(arguments='"')
    while (end := source.held.find(PARAMETER_END)) < 0:
        if is_string and (size := len(source.held) - cut_off(source.held, PARAMETER_END, "\n" + PARAMETER_END)):
            yield ToolDelta(arguments=_json(source.take(size))[1:-1])
        if not (yield from more(source)):
            source.held = ""
            return False
    text = source.take(end).removesuffix("\n")
    source.take(len(PARAMETER_END))
    if is_string:
        yield ToolDelta(arguments=_json(text)[1:])
    else:
        value = parsed(text)
        yield ToolDelta(arguments=_json(text if value is None and text.strip() != "null" else value))
    return True


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


FORMAT = Qwen3Coder()
