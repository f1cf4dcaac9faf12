"""Qwen 3 Coder: <tool_call>, <function=name>, <parameter=key>, the value as it is."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from llmc.runtime.constraints.grammars import json_rule, literal
from llmc.runtime.tool_calls.base import Call, Taken, ToolFormat, Tools, function, parsed, repeated

END = "</tool_call>"
SHAPE = re.compile(r"<tool_call>\s*<function=([^>\n]+)>\s*(.*?)</function>\s*</tool_call>\Z", re.DOTALL)
PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>\s*", re.DOTALL)


class Qwen3Coder(ToolFormat):
    """See the module."""

    name = "qwen3_coder"
    openings = ("<tool_call>",)
    ends = ">"

    def fits(self, template: str) -> bool:
        """See ToolFormat."""
        return "<function=" in template and "<parameter=" in template

    def take(self, text: str, tools: Tools, *, final: bool) -> Taken | None:
        """See ToolFormat."""
        end = text.find(END)
        if end < 0:
            return None
        match = SHAPE.match(text[: end + len(END)])
        arguments = None if match is None else self._arguments(match[1], match[2], tools)
        if match is None or arguments is None:
            return Taken(len(self.openings[0]))
        return Taken(end + len(END), (Call(match[1], json.dumps(arguments, ensure_ascii=False)),))

    def _arguments(self, name: str, body: str, tools: Tools) -> dict[str, Any] | None:
        schemas = next((schema for n, schema in map(function, tools) if n == name), {})
        if PARAMETER.sub("", body).strip():
            return None
        return {key: _value(text, schemas.get("properties", {}).get(key)) for key, text in PARAMETER.findall(body)}

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


def _value(text: str, schema: Any) -> Any:
    """Strings are written as they are, anything else as JSON."""
    if isinstance(schema, Mapping) and schema.get("type") == "string":
        return text
    value = parsed(text)
    return text if value is None and text.strip() != "null" else value


FORMAT = Qwen3Coder()
