"""Llama 3.2 and 4 and others: the whole answer is a Python list of calls, ``[f(a="x", b=2), g()]``."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable
from typing import Any

from llmc.runtime.constraints.grammars import json_rule, literal
from llmc.runtime.tool_calls.base import (
    Call,
    Nesting,
    Source,
    Steps,
    ToolDelta,
    ToolFormat,
    Tools,
    function,
    known,
    more,
)

MAX_CHARACTERS = 1 << 16
WORDS = {"true": True, "false": False, "null": None}


class Pythonic(ToolFormat):
    """See the module."""

    name = "pythonic"
    openings = ("[",)
    at_start = True

    def fits(self, template: str) -> bool:
        """See ToolFormat."""
        return "[func_name1(params_name1" in template or "<|python_start|>" in template

    def read(self, source: Source, tools: Tools) -> Steps[None]:
        """See ToolFormat: calls are given when the list ends; values of Python are not JSON before they are read."""
        nesting, seen = Nesting("()[]{}", "\"'"), 0
        while (end := nesting.end(source.held, seen)) is None:
            seen = len(source.held)
            if seen > MAX_CHARACTERS or not (yield from more(source)):
                return
        try:
            tree = ast.parse(source.held[:end], mode="eval").body if end <= MAX_CHARACTERS else None
            calls = [_call(node) for node in tree.elts] if isinstance(tree, ast.List) else []
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return
        if known((call.name for call in calls), tools):
            source.take(end if calls else 0)
            for call in calls:
                yield ToolDelta(name=call.name, arguments=call.arguments)

    def grammar(self, tools: Tools, token: Callable[[str], str], *, several: bool) -> str:
        """See ToolFormat."""
        rules = []
        for i, (name, schema) in enumerate(map(function, tools)):
            given = {k: f"{literal(f'{k}=')} {json_rule(v)}" for k, v in schema.get("properties", {}).items()}
            needed = [k for k in given if k in schema.get("required", ())]
            rest = [k for k in given if k not in needed]
            comma = literal(", ")
            first = f" {comma} ".join(given[k] for k in needed)
            more = [" ".join(f"({comma} {given[k]})?" for k in rest[at:]) for at in range(len(rest) + 1)]
            options = [f"{first} {more[0]}"] if needed else [f"{given[k]} {more[at + 1]}" for at, k in enumerate(rest)]
            inner = f"({' | '.join(options)})" + ("" if needed else "?") if options else ""
            rules.append(f"call{i}: {literal(f'{name}(')} {inner} {literal(')')}\n")
        calls = " | ".join(f"call{i}" for i in range(len(rules)))
        repeat = f"({literal(', ')} call)*" if several else ""
        return f"start: {literal('[')} call {repeat} {literal(']')}\ncall: {calls}\n{''.join(rules)}"


def _call(node: ast.expr) -> Call:
    if not isinstance(node, ast.Call) or node.args:
        raise ValueError("not a call with named arguments")
    arguments = {}
    for keyword in node.keywords:
        if keyword.arg is None:
            raise ValueError("not a named argument")
        arguments[keyword.arg] = _value(keyword.value)
    return Call(ast.unparse(node.func), json.dumps(arguments, ensure_ascii=False, allow_nan=False))


def _value(node: ast.expr) -> Any:
    """A literal of Python, or a word of JSON."""
    if isinstance(node, ast.Name) and node.id in WORDS:
        return WORDS[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [_value(item) for item in node.elts]
    if isinstance(node, ast.Dict):
        keys = [None if key is None else ast.literal_eval(key) for key in node.keys]
        if not all(isinstance(key, str) for key in keys):
            raise ValueError("a key is not a string")
        return {key: _value(value) for key, value in zip(keys, node.values, strict=True)}
    value = ast.literal_eval(node)
    if not isinstance(value, str | int | float | bool | None):
        raise ValueError("not a value of JSON")  # noqa: TRY004 - it comes from a text
    return value


FORMAT = Pythonic()
