"""What a model writes when nothing corrects it: where two texts part, and how much of a text repeats itself."""

from __future__ import annotations

from collections.abc import Sequence

GRAM = 4
"""Tokens of the pieces that are looked for again."""


def repetition(tokens: Sequence[int]) -> float:
    """The share of pieces of GRAM tokens that occurred earlier in the text: near 0 in prose, near 1 in a loop."""
    grams = [tuple(tokens[i : i + GRAM]) for i in range(len(tokens) - GRAM + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def equal_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Tokens before the texts part, or before both end."""
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return min(len(a), len(b))
