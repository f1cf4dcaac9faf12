"""Checks of single values of a request; each returns the value in one form, or names the field."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from numbers import Integral, Real
from typing import Any

from llmc.errors import RequestError

POSITIVE = {"top_p", "repetition_penalty"}
"""Fields whose lower bound is not included."""

INT32_MAX = 2**31 - 1
MAX_STRING_BYTES, LOGIT_BIAS_BOUND = 256, 100.0


def integer(name: str, value: object, bounds: tuple[int, int]) -> int:
    """A whole number within bounds, both included.

    Raises:
        RequestError: names the field.
    """
    low, high = bounds
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise RequestError(f"expected a whole number, found {shown(value)}", name)
    number = int(value)
    if not low <= number <= high:
        raise RequestError(f"{shown(number)} is not in {low} to {high}", name)
    return number


def real(name: str, value: object, bounds: tuple[float, float]) -> float:
    """A number within bounds, both included but for fields of POSITIVE.

    Raises:
        RequestError: names the field.
    """
    low, high = bounds
    if isinstance(value, bool) or not isinstance(value, Real):
        raise RequestError(f"expected a number, found {shown(value)}", name)
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not low <= number <= high or (number == low and name in POSITIVE):
        raise RequestError(f"{number} is not in {'more than ' if name in POSITIVE else ''}{low:g} to {high:g}", name)
    return number


def strings(name: str, value: object, limit: int) -> tuple[str, ...]:
    """Strings of 1 to MAX_STRING_BYTES, at most ``limit``; one string is a list of one.

    Raises:
        RequestError: names the field.
    """
    found = entries(name, [value] if isinstance(value, str) else value, limit)
    for i, entry in enumerate(found):
        if not isinstance(entry, str):
            raise RequestError(f"entry {i}: expected a string, found {shown(entry)}", name)
        try:
            size = len(entry.encode())
        except UnicodeEncodeError:
            raise RequestError(f"entry {i} is not valid Unicode", name) from None
        if not 1 <= size <= MAX_STRING_BYTES:
            raise RequestError(
                f"entry {i} ({entry[:32]!r}) has {size} bytes; 1 to {MAX_STRING_BYTES} are allowed", name
            )
    return found


def token_ids(name: str, value: object, limit: int) -> tuple[int, ...]:
    """Numbers that could be token ids, at most ``limit``.

    Raises:
        RequestError: names the field.
    """
    return tuple(integer(name, entry, (0, INT32_MAX)) for entry in entries(name, value, limit))


def entries(name: str, value: object, limit: int) -> tuple[Any, ...]:
    """What a list has, at most ``limit``.

    Raises:
        RequestError: names the field.
    """
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise RequestError(f"expected a list, found {shown(value)}", name)
    entries = tuple(value)
    if len(entries) > limit:
        raise RequestError(f"{len(entries)} entries; at most {limit} are allowed", name)
    return entries


def logit_bias(name: str, value: object, limit: int) -> dict[int, float]:
    """Keys may be strings, as in JSON."""
    if not isinstance(value, Mapping):
        raise RequestError(f"expected an object of token ids and numbers, found {shown(value)}", name)
    if len(value) > limit:
        raise RequestError(f"{len(value)} entries; at most {limit} are allowed", name)
    biases = {}
    for key, bias in value.items():
        if isinstance(key, str) and key.isascii() and key.isdecimal() and len(key) <= 10:
            key = int(key)
        biases[integer(name, key, (0, INT32_MAX))] = real(name, bias, (-LOGIT_BIAS_BOUND, LOGIT_BIAS_BOUND))
    return biases


def shown(value: object) -> str:
    """For an error message."""
    try:
        text = repr(value)
    except ValueError:  # an int of more than 4,300 digits
        return "a huge number"
    return text if len(text) <= 80 else text[:80] + "..."
