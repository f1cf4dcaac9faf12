"""What is refused before anything is compiled: size, nesting, NUL, and patterns with nothing to repeat."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from llmc.errors import RequestError
from llmc.runtime import strict
from llmc.runtime.constraints.base import MAX_BYTES, MAX_NESTING

MAX_CHOICES = 4096
DATA = frozenset({"const", "enum", "default", "examples", "example"})
"""Keywords of JSON Schema whose values are data, not schemas."""
NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
"""Those whose values are schemas by name."""


def check(kind: str, text: str) -> None:
    """Refuse what is out of bounds.

    Raises:
        RequestError: names the kind as the field.
    """
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        raise RequestError("not valid Unicode", kind) from None
    if size > MAX_BYTES:
        raise RequestError(f"{size} bytes; at most {MAX_BYTES} are allowed", kind)
    if "\0" in text:
        raise RequestError("has a NUL character, which no text of a model has", kind)
    if kind == "regex":
        check_pattern(text, kind)
    elif kind == "grammar":
        if _nesting(re.sub(r'"(?:\\.|[^"\\\n])*"|//[^\n]*', "", text)) > MAX_NESTING:
            raise RequestError(f"is nested more than {MAX_NESTING} deep", kind)
        if not text.strip():
            raise RequestError("is empty", kind)
    elif kind == "json_schema":
        _check_schema(parsed(text, kind))
    elif kind == "choice":
        choices = parsed(text, kind)
        if not isinstance(choices, list) or not 1 <= len(choices) <= MAX_CHOICES:
            raise RequestError(f"expected a list of 1 to {MAX_CHOICES} texts", kind)
        if not all(isinstance(c, str) and c for c in choices):
            raise RequestError("expected texts that are not empty", kind)


def parsed(text: str, kind: str) -> Any:
    """The JSON of a specification.

    Raises:
        RequestError: it is not JSON, or is nested too deeply; names the kind as the field.
    """
    try:
        return strict.parse_json(text.encode(errors="replace"), kind, RequestError)
    except RequestError as problem:
        raise RequestError(str(problem).removeprefix(f"{kind}: "), kind) from None


def check_pattern(pattern: str, field: str) -> None:
    """Refuse what ECMA-262 refuses and other engines take for something else.

    Raises:
        RequestError: names the field.
    """
    if "\0" in pattern:
        raise RequestError("has a NUL character", field)
    bare = re.sub(r"\\.", "xx", pattern, flags=re.DOTALL)  # escapes are ordinary characters here
    bare = re.sub(r"\[\]?[^\]]*\]", lambda match: "x" * len(match[0]), bare)  # so are classes
    if nothing := re.search(r"(?:^|[(|^$]|\(!:)(?:[*+?]|\{\d+(?:,\d*)?\})", bare.replace("(?", "(!")):
        raise RequestError(f"nothing to repeat at {nothing.end() - 1}", field)
    if _nesting(bare) > MAX_NESTING:
        raise RequestError(f"is nested more than {MAX_NESTING} deep", field)


def _nesting(text: str) -> int:
    """How deep brackets go."""
    depth = deepest = 0
    for c in text:
        if c in "([{":
            depth += 1
            deepest = max(deepest, depth)
        elif c in ")]}":
            depth -= 1
    return deepest


def _check_schema(schema: Any) -> None:
    if not isinstance(schema, dict | bool):
        raise RequestError("expected an object, or true", "json_schema")
    for depth, pattern in _patterns(schema, 1):
        if depth > MAX_NESTING:
            raise RequestError(f"is nested more than {MAX_NESTING} deep", "json_schema")
        if pattern is not None:
            check_pattern(pattern, "json_schema")


def _patterns(value: Any, depth: int, keyword: str = "") -> Iterator[tuple[int, str | None]]:
    """Every pattern of a schema, and every depth, as far as the limit and one more."""
    yield depth, None
    if depth > MAX_NESTING:
        return
    if isinstance(value, list):
        for child in value:
            yield from _patterns(child, depth + 1, keyword)
    if not isinstance(value, dict):
        return
    for key, child in value.items():
        named = keyword in NAMED  # then the key is a name, no keyword
        if (key == "pattern" and isinstance(child, str) and not named and keyword not in DATA) or (
            keyword == "patternProperties"
        ):
            yield depth, child if key == "pattern" and not named else key
        yield from _patterns(child, depth + 1, keyword if keyword in DATA else "" if named else key)
