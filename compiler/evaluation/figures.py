"""The figures of an evaluation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from typing import Any

DIGITS, DECIMALS = 4, 5
"""Significant digits that an engine records, and decimals. What is below is rounding of float sums, which differs from
machine to machine."""


@dataclass(frozen=True)
class Position:
    """One scored token, among the worst. Texts are those of the engine's tokenizer."""

    window: int
    position: int
    divergence: float | None
    nll: float
    before: str
    """The end of what stands before it."""
    token: str
    """What comes in the text."""
    top: str
    """What the engine takes for the most likely."""
    reference_top: str | None


@dataclass(frozen=True)
class Comparison:
    """Teacher-forced distance from a reference. KL(reference || engine) in nats, over all scored tokens."""

    reference: str
    """model or engine."""
    perplexity: float
    """Of the reference."""
    ratio: float
    """Perplexity of the engine divided by it."""
    ratio_error: float
    """One standard error, if tokens were independent."""
    kl: float
    kl_median: float
    kl_p99: float
    kl_max: float
    top1: float
    """Share of tokens with the same most likely successor."""


@dataclass(frozen=True)
class Continuation:
    """One prompt, continued greedily by the engine and, if there is one, the reference."""

    prompt: str
    text: str
    tokens: int
    repetition: float
    reference_text: str | None = None
    reference_tokens: int | None = None
    reference_repetition: float | None = None
    divergence: int | None = None
    """Tokens before the two part, or before both end."""


@dataclass(frozen=True)
class Generation:
    """Free generation. ``repetition``: mean share of repeated pieces of 4 tokens."""

    limit: int
    """Tokens of a continuation at most."""
    repetition: float
    repetition_max: float
    continuations: tuple[Continuation, ...]
    reference_repetition: float | None = None
    divergence: float | None = None
    """Mean over the prompts."""
    prefix: float | None = None
    """Mean share of a continuation that is equal from its start on."""


@dataclass(frozen=True)
class Figures:
    """What was measured, on what."""

    text: str
    text_sha256: str
    context: int
    bos: bool
    """Whether each window begins with the beginning-of-text token."""
    windows: int
    windows_of: int
    """Windows that the whole text has."""
    scored: int
    perplexity: float
    window_perplexities: tuple[float, ...]
    worst: tuple[Position, ...]
    comparison: Comparison | None = None
    reference_window_perplexities: tuple[float, ...] = ()
    generation: Generation | None = None

    def to_json(self) -> dict[str, Any]:
        """All of it."""
        return asdict(self)

    def recorded(self) -> Figures:
        """As an engine keeps them: rounded."""
        rounded: Figures = _rounded(self)
        return rounded


def percent(share: float) -> str:
    """With a sign."""
    return f"{share * 100:+.2f} %"


def mean(values: Sequence[float]) -> float:
    """Of at least one."""
    return math.fsum(values) / len(values)


def _rounded(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{f.name: _rounded(getattr(value, f.name)) for f in fields(value)})
    if isinstance(value, tuple):
        return tuple(_rounded(item) for item in value)
    return round(float(f"{value:.{DIGITS}g}"), DECIMALS) if isinstance(value, float) else value
