"""Reads JSON files into frozen dataclasses, strictly: an unknown key, a missing one or a wrong type is an error."""

from __future__ import annotations

import dataclasses
import enum
import json
import math
import types
import typing
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, TypeVar

from llmc.errors import EngineError, LlmcError

T = TypeVar("T")


class _RefusedError(ValueError):
    """Something that the JSON library would let pass."""


def parse_json(text: bytes, where: str, error: type[LlmcError] = EngineError, *, infinite: bool = False) -> Any:
    """Parse UTF-8 JSON; a key that occurs twice is refused, and, unless ``infinite``, numbers that are not finite.

    Raises:
        error: it is not JSON, or is nested too deeply.
    """
    try:
        constant = float if infinite else _no_constants
        return json.loads(text.decode("utf-8"), object_pairs_hook=_no_duplicates, parse_constant=constant)
    except RecursionError:
        raise error(f"{where}: nested too deeply") from None
    except ValueError as problem:
        raise error(f"{where}: not valid JSON ({problem})") from None


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise _RefusedError(f"the key {twice!r} occurs twice")
    return result


def _no_constants(name: str) -> Any:
    raise _RefusedError(f"{name} is not a number of JSON")


def load(kind: type[T], value: Any, where: str) -> T:
    """Make a dataclass of an object whose keys are its fields; a field with a default may be missing.

    Field types: int, float, str, bool, None, unions of them, ``tuple[X, ...]``, ``Mapping[str, X]``, enums,
    dataclasses, and any class with a static ``from_json``.

    Raises:
        EngineError: naming the place, what was expected and what was found.
    """
    result: T = _load(kind, value, where)
    return result


def dump(value: Any) -> Any:
    """The JSON form of what ``load`` reads. Fields that have their default value are left out if they are empty."""
    if hasattr(value, "to_json"):
        return value.to_json()
    if isinstance(value, enum.Enum):
        return value.value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            f.name: dump(getattr(value, f.name)) for f in dataclasses.fields(value) if not _is_empty_default(value, f)
        }
    if isinstance(value, Mapping):
        return {key: dump(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [dump(item) for item in value]
    return value


def _is_empty_default(value: Any, field: dataclasses.Field[Any]) -> bool:
    has_default = field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING
    return has_default and getattr(value, field.name) in ("", 0, (), {}, None, False)


def _load(kind: Any, value: Any, where: str) -> Any:
    if type(value) is kind and kind is not float:
        return value
    return _reader(kind)(value, where)


@cache
def _reader(kind: Any) -> Callable[[Any, str], Any]:
    """What reads a value of the kind; found once, since plans have thousands of values of few kinds."""
    if hasattr(kind, "from_json"):
        return lambda value, where: kind.from_json(value)
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return lambda value, where: _load_enum(kind, value, where)
    if dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        fields = {f.name: (hints[f.name], _is_required(f)) for f in dataclasses.fields(kind)}
        return lambda value, where: _load_dataclass(kind, fields, value, where)
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        return lambda value, where: _load_union(arguments, value, where)

    def read(value: Any, where: str) -> Any:
        if origin is tuple and isinstance(value, list):
            return tuple([_load(arguments[0], item, f"{where}[{i}]") for i, item in enumerate(value)])
        if origin is not None and issubclass(origin, Mapping) and isinstance(value, dict):
            return {key: _load(arguments[1], item, f"{where}.{key}") for key, item in value.items()}
        if kind is Any or (kind in (None, type(None)) and value is None):
            return value
        if kind is float and isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            return float(value)
        if isinstance(kind, type) and type(value) is kind and kind is not float:
            return value
        raise EngineError(f"{where}: expected {_name(kind)}, found {_shown(value)}")

    return read


def _is_required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _load_enum(kind: type[enum.Enum], value: Any, where: str) -> Any:
    known = [member.value for member in kind]
    if value not in known:
        raise EngineError(f"{where}: expected one of {', '.join(map(str, known))}, found {_shown(value)}")
    return kind(value)


def _load_dataclass(kind: Any, fields: dict[str, tuple[Any, bool]], value: Any, where: str) -> Any:
    if not isinstance(value, dict):
        raise EngineError(f"{where}: expected an object, found {_shown(value)}")
    if unknown := sorted(value.keys() - fields.keys()):
        raise EngineError(f"{where}: unknown key {unknown[0]!r}; known: {', '.join(fields)}")
    arguments = {}
    for name, (hint, required) in fields.items():
        if name in value:
            arguments[name] = _load(hint, value[name], f"{where}.{name}")
        elif required:
            raise EngineError(f"{where}: the key {name!r} is missing")
    return kind(**arguments)


def _load_union(kinds: tuple[Any, ...], value: Any, where: str) -> Any:
    for kind in kinds:  # exact types first: an int is no bool, and a float field takes an int
        if isinstance(kind, type) and type(value) is kind:
            return value
    if value is None and type(None) in kinds:
        return None
    for kind in kinds:
        if kind is float or typing.get_origin(kind) is not None or dataclasses.is_dataclass(kind):
            return _load(kind, value, where)
    raise EngineError(f"{where}: expected {' or '.join(_name(kind) for kind in kinds)}, found {_shown(value)}")


def _name(kind: Any) -> str:
    if kind in (None, type(None)):
        return "null"
    return kind.__name__ if isinstance(kind, type) and typing.get_origin(kind) is None else str(kind)


def _shown(value: Any) -> str:
    text = (
        json.dumps(value)
        if not isinstance(value, dict | list)
        else ("an object" if isinstance(value, dict) else "a list")
    )
    return text if len(text) <= 80 else text[:77] + "..."
