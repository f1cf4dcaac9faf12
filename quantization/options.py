"""Options of methods: ``--quant name:option=value,...`` is parsed by the fields of the method's dataclass."""

from __future__ import annotations

import dataclasses
import inspect
import math
from typing import Any

from llmc.discover import instances, subclasses
from llmc.errors import UsageError
from llmc.quantization.base import Method

_TRUE_FALSE = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}


@dataclasses.dataclass(frozen=True)
class Preset:
    """A short name for a method with options; modules that hold one are found by a scan. Options can be added to it."""

    name: str
    method: str
    help: str


def option(
    default: Any, help: str, *, choices: tuple[Any, ...] = (), low: float | None = None, high: float | None = None
) -> Any:
    """A dataclass field that is an option, with what it may be."""
    return dataclasses.field(default=default, metadata={"help": help, "choices": choices, "low": low, "high": high})


def methods() -> dict[str, type[Method]]:
    """All methods by name: the classes that the modules of this folder hold."""
    base: type[Any] = Method
    found = [kind for kind in subclasses("llmc.quantization", base) if not inspect.isabstract(kind)]
    return {kind.name: kind for kind in sorted(found, key=lambda kind: kind.name)}


def presets() -> dict[str, Preset]:
    """All short names."""
    return {preset.name: preset for preset in instances("llmc.quantization", Preset)}


def parse(text: str) -> Method:
    """``awq:group=64,sym=false`` -> a method. Raises UsageError that lists what is known."""
    name, _, rest = text.strip().partition(":")
    preset = presets().get(name)
    given: dict[str, str] = {}
    if preset:
        name, _, inner = preset.method.partition(":")
        given = _split(inner, preset.method)
    given |= _split(rest, text)
    return make_method(name, given)


def make_method(name: str, given: dict[str, Any]) -> Method:
    """A method from its name and options, which may be text or values. Raises UsageError."""
    kind = methods().get(name)
    if kind is None:
        known = ", ".join(sorted([*methods(), *presets()]))
        raise UsageError(f"--quant {name}: unknown method; known: none, {known}")
    fields = {field.name: field for field in dataclasses.fields(kind)}
    for key in given:
        if key not in fields:
            raise UsageError(f"--quant {name}: unknown option {key}; known: {', '.join(fields)}")
    values = {key: _value(name, fields[key], value) for key, value in given.items()}
    try:
        return kind(**values)
    except UsageError as error:  # of values that don't go together, or of a Scheme, which knows no command line
        text = str(error)
        raise UsageError(text if text.startswith("--quant ") else f"--quant {name}: {text}") from None


def options_of(method: Method) -> dict[str, Any]:
    """All options of a method, defaults too, as plain values for JSON."""
    return {field.name: getattr(method, field.name) for field in dataclasses.fields(method)}


def describe(method: Method) -> str:
    """The shortest text that ``parse`` makes this method from."""
    changed = {
        field.name: getattr(method, field.name)
        for field in dataclasses.fields(method)
        if getattr(method, field.name) != field.default
    }
    values = ",".join(
        f"{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in changed.items()
    )
    return method.name + (":" + values if values else "")


def help_text() -> str:
    """Every method, preset and option, a line each."""
    lines = []
    for name, kind in methods().items():
        lines.append(f"{name}: {(kind.__doc__ or '').strip().splitlines()[0]}")
        for field in dataclasses.fields(kind):
            default = str(field.default).lower() if isinstance(field.default, bool) else field.default
            lines.append(f"  {field.name}={default}  {field.metadata['help']}{_range(field)}")
    lines += [f"{preset.name}: {preset.help} ({preset.method})" for preset in presets().values()]
    return "\n".join(lines)


def _range(field: dataclasses.Field[Any]) -> str:
    """What an option may be, where its default does not tell."""
    choices, low, high = (field.metadata[key] for key in ("choices", "low", "high"))
    if choices:
        return f" [{', '.join(str(choice) for choice in choices)}]"
    return "" if low is None else f" [{low} to {high}]"


def _split(text: str, whole: str) -> dict[str, str]:
    """``a=1,b=2`` -> a dict of texts."""
    given: dict[str, str] = {}
    for part in text.split(",") if text.strip() else []:
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not (key and equals and value):
            raise UsageError(f"--quant {whole}: expected option=value, got {part.strip()!r}")
        if key in given:
            raise UsageError(f"--quant {whole}: {key} is given twice")
        given[key] = value
    return given


def _value(method: str, field: dataclasses.Field[Any], value: Any) -> Any:
    """An option's value of the type of its default, within its bounds."""
    kind, limits = type(field.default), field.metadata
    where = f"--quant {method}: {field.name}={value}"
    try:
        converted = _convert(kind, value)
    except (ValueError, KeyError, TypeError):
        expected = {bool: "true or false", int: "a whole number", float: "a number", str: "a word"}[kind]
        raise UsageError(f"{where}: expected {expected}") from None
    if limits["choices"] and converted not in limits["choices"]:
        raise UsageError(f"{where}: expected one of {', '.join(str(choice) for choice in limits['choices'])}")
    low, high = limits["low"], limits["high"]
    if (low is not None and converted < low) or (high is not None and converted > high):
        bounds = f"from {low} to {high}" if low is not None and high is not None else f"at least {low}"
        raise UsageError(f"{where}: expected a number {bounds}")
    return converted


def _convert(kind: type, value: Any) -> Any:
    """Text or a value of JSON or YAML -> a value of a type. Raises ValueError, KeyError or TypeError."""
    if kind is bool:
        return value if isinstance(value, bool) else _TRUE_FALSE[value.lower() if isinstance(value, str) else ""]
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise TypeError
    if kind is int:
        if isinstance(value, float) and not value.is_integer():
            raise ValueError
        return int(value)
    if kind is float:
        number = float(value)
        if not math.isfinite(number):
            raise ValueError
        return number
    if not isinstance(value, str):
        raise TypeError
    return value
