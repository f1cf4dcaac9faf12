"""How a token is chosen where there are drafts for it: three rules, of which the last one changes what is said."""

from __future__ import annotations

import enum

import numpy as np
from numpy.typing import NDArray

from llmc.runtime.request import Sequence
from llmc.runtime.sampling import Draw, Scores, distribution, draw_token, pick, uniform
from llmc.runtime.speculative.base import Tree

DRAFT, ACCEPT = 1 << 30, 1 << 31
"""Where the random numbers begin that draw drafts, and that accept them; those before draw tokens."""

MOST_DOUBT, DOUBT_SHARE = 0.09, 0.3
"""Of typical acceptance: epsilon and delta of arXiv:2401.10774, section 2.3.2, as its authors set them."""

Probabilities = NDArray[np.float64]


class Rule(enum.StrEnum):
    """When a draft is accepted.

    EXACT: it is the token that the model draws; nothing depends on drafts. REJECTION: of drafts that were drawn at
    random, more are accepted; tokens have the same distribution, but are others. TYPICAL: the model thinks it likely
    enough; the distribution is another, unless the temperature is 0.
    """

    EXACT = "exact"
    REJECTION = "rejection"
    TYPICAL = "typical"

    @property
    def is_lossless(self) -> bool:
        """Whether tokens have the distribution of the model."""
        return self is not Rule.TYPICAL

    @property
    def label(self) -> str:
        """For people who read figures."""
        return self.value if self.is_lossless else f"{self.value} (lossy)"

    def draw(self, tree: Tree | None, node: int) -> Draw | None:
        """What chooses the token below a node, for `Sampler.sample_row`; None: nothing out of the ordinary.

        Drafts without probabilities can't do better than to be what the model draws: rejection leaves them to that.
        """
        below = [] if tree is None else tree.children.get(node, [])
        if tree is None or not below or self is Rule.EXACT or (self is Rule.REJECTION and tree.probabilities is None):
            return None
        tokens = [tree.tokens[child] for child in below]
        drawn_from = [] if tree.probabilities is None else [tree.probabilities[child] for child in below]

        def draw(scores: Scores, sequence: Sequence, attempt: int) -> int:
            if attempt or sequence.request.params.temperature == 0 or not np.isfinite(scores.max()):
                return draw_token(scores, sequence, attempt)
            wanted = distribution(scores, sequence.request.params)
            if self is Rule.REJECTION:
                return _accept_or_draw(wanted, tokens, drawn_from, sequence)
            best = max(tokens, key=lambda token: wanted[token])
            return best if wanted[best] > typical_bar(wanted) else draw_token(scores, sequence, attempt)

        return draw


def without(probabilities: Probabilities, token: int) -> Probabilities | None:
    """What is left to draw from after a token; None: nothing."""
    rest = probabilities.copy()
    rest[token] = 0
    total = rest.sum()
    return rest / total if total > 0 else None


def draft(probabilities: Probabilities, sequence: Sequence, position: int, number: int) -> int:
    """Draw draft ``number`` for a position."""
    return pick(probabilities, uniform(sequence.request.seed, sequence.choice, position, DRAFT + number))


def typical_bar(wanted: Probabilities) -> float:
    """The probability that a draft has to exceed: the less certain the model is, the lower."""
    some = wanted[wanted > 0]
    return min(MOST_DOUBT, DOUBT_SHARE * float(np.exp((some * np.log(some)).sum())))


def _accept_or_draw(
    wanted: Probabilities, tokens: list[int], drawn_from: list[NDArray[np.float32]], sequence: Sequence
) -> int:
    """Rejection sampling in several rounds (arXiv:2305.09781, algorithm 2): the result is distributed as ``wanted``.

    Each draft was drawn from its distribution, given those before it. One that is refused leaves what it lacked.
    """
    request, place = sequence.request, len(sequence.tokens)
    for number, (token, given) in enumerate(zip(tokens, drawn_from, strict=True)):
        if uniform(request.seed, sequence.choice, place, ACCEPT + number) * given[token] < wanted[token]:
            return token
        rest = wanted.copy()
        rest[: len(given)] -= given
        np.maximum(rest, 0, out=rest)
        total = rest.sum()
        if total == 0:  # both are the same but for rounding
            break
        wanted = rest / total
    return pick(wanted, uniform(request.seed, sequence.choice, place))
