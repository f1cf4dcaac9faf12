"""Logits to tokens. Every row is treated by itself, so what else runs in the batch can't matter.

Random numbers are a function of (seed, choice, position) alone, hence a sequence that is computed again, or by other
batches, draws the same tokens. Ties go to the lowest id.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Callable, Collection
from collections.abc import Sequence as ListOf
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmc.plugins import kernels
from llmc.runtime.batch import Chosen
from llmc.runtime.constraints.base import ConstraintError, TokenConstraint
from llmc.runtime.request import SamplingParams, Sequence

Scores = NDArray[np.float32]
Ids = NDArray[np.intp]
Draw = Callable[[Scores, Sequence, int], int]
"""Chooses the next token from its scores; how many tokens before it were not wanted is the last argument."""

NOT_FINITE = "the model computed logits that are not finite"
NONE_ALLOWED = "no token is allowed: constraint, bad_words, logit_bias and min_tokens rule out all of them"

LARGEST = np.finfo(np.float32).max
LOWEST_LOGPROB = -9999.0
"""Stands for minus infinity, as in OpenAI's API."""


@dataclass(frozen=True)
class TokenLogprob:
    """Log-probability of a token, and the most likely ones in its place: (id, log-probability), best first."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(slots=True)
class Sampled:
    """The next token of a sequence, or why there is none: an error, or ``ends``, its constraint allows nothing more."""

    token: int = -1
    logprob: TokenLogprob | None = None
    error: str | None = None
    ends: bool = False


class PenaltyState:
    """Which tokens a sequence has: ``seen`` [vocabulary] in prompt or output, ``counts`` how often in the output."""

    def __init__(self, sequence: Sequence, vocab_size: int) -> None:
        self.seen = np.zeros(vocab_size, bool)
        self.counts = np.zeros(vocab_size, np.int32)
        self.seen[sequence.tokens[: sequence.num_prompt]] = True
        self._length = sequence.num_prompt

    def update(self, tokens: list[int]) -> None:
        """Take in the tokens that came since."""
        for token in tokens[self._length :]:
            self.seen[token] = True
            self.counts[token] += 1
        self._length = len(tokens)


def penalty_state(sequence: Sequence, vocab_size: int) -> PenaltyState:
    """That of a sequence, up to date."""
    state = sequence.penalties
    if state is None:
        state = sequence.penalties = PenaltyState(sequence, vocab_size)
    state.update(sequence.tokens)
    return state


class Sampler:
    """Chooses tokens.

    Args:
        tokens_containing: ids of the tokens whose own text contains one of the given strings, for bad_words.
    """

    def __init__(self, tokens_containing: Callable[[tuple[str, ...]], Ids] | None = None) -> None:
        self._banned = lru_cache(maxsize=16)(tokens_containing) if tokens_containing else None

    def sample(self, logits: Scores, rows: ListOf[int], sequences: ListOf[Sequence]) -> list[Sampled]:
        """The next token of each sequence; ``logits`` [N, vocabulary], that of sequence i is row ``rows[i]``."""
        return [self.sample_row(logits[row], sequence) for row, sequence in zip(rows, sequences, strict=True)]

    def score_prompt(self, sequence: Sequence, position: int, logits: Scores) -> None:
        """Record log-probabilities of the prompt from ``position + 1`` on, given the logits from ``position`` on."""
        request = sequence.request
        count = request.params.prompt_logprobs
        assert count is not None, "nobody asked for prompt_logprobs"
        for row, token in zip(logits, request.prompt[position + 1 :], strict=False):
            request.prompt_logprobs.append(log_probability(row, token, count))

    def sample_row(self, row: Scores, sequence: Sequence, draw: Draw | None = None) -> Sampled:
        """The next token of a sequence, given its logits [vocabulary]; ``draw`` in place of `draw_token`."""
        params, constraint = sequence.request.params, sequence.constraint
        if constraint is not None and not np.isfinite(row.max()):  # what is masked can't show it
            return Sampled(error=NOT_FINITE)
        try:
            scores = self._adjust(row, sequence)
        except ConstraintError as problem:
            return Sampled(error=str(problem))
        attempt = 0
        while True:
            token = (draw or draw_token)(scores, sequence, attempt)
            if not np.isfinite(scores[token]):
                if np.isnan(scores).any() or np.isposinf(scores).any():
                    return Sampled(error=NOT_FINITE)
                if constraint is not None and constraint.is_complete:
                    return Sampled(ends=True)
                return Sampled(error=NONE_ALLOWED)
            if not _completes(sequence, token):
                break
            # Drawn anew with another random number: together that is a draw from what remains.
            scores = scores.copy() if scores is row else scores
            scores[token] = -np.inf
            attempt += 1
        if params.logprobs is None and params.num_choices == params.n:
            return Sampled(token)
        return Sampled(token, log_probability(row, token, params.logprobs or 0))

    def mask(self, sequence: Sequence, vocab_size: int) -> NDArray[np.uint32] | None:
        """A bit for each token that constraint and bad_words allow, 32 a word, lowest first; None: they allow all.

        Raises:
            ConstraintError: the constraint can't go on.
        """
        words = None if sequence.constraint is None else sequence.constraint.mask()
        bad = self._bad_ids(sequence.request.params)
        if words is None and not len(bad):
            return None
        mask = np.full(-(-vocab_size // 32), 0 if words is not None else 0xFFFFFFFF, np.uint32)
        if words is not None and sequence.constraint is not None:
            mask[: len(words)] = words[: len(mask)]
            if sequence.constraint.is_complete:
                ends = np.array(sorted(sequence.end_token_ids), np.int64)
                np.bitwise_or.at(mask, ends // 32, np.uint32(1) << (ends % 32).astype(np.uint32))
        np.bitwise_and.at(mask, bad // 32, ~(np.uint32(1) << (bad % 32).astype(np.uint32)))
        return mask

    def take(self, chosen: Chosen, row: int, sequence: Sequence) -> Sampled:
        """What a device has chosen for a row, or why there is no token; as `sample_row`."""
        request, constraint, attempt = sequence.request, sequence.constraint, 0
        token, score = int(chosen.tokens[row]), float(chosen.scores[row])
        while math.isfinite(score):
            if not _completes(sequence, token):
                return Sampled(token)
            assert chosen.again is not None, "it has bad words"
            attempt += 1
            drawn = uniform(request.seed, sequence.choice, len(sequence.tokens), attempt)
            token, score = chosen.again(row, token, drawn)
        if score != -math.inf:
            return Sampled(error=NOT_FINITE)
        if constraint is not None and constraint.is_complete:
            return Sampled(ends=True)
        return Sampled(error=NONE_ALLOWED)

    def _bad_ids(self, params: SamplingParams) -> Ids:
        """Tokens that contain a bad word by themselves."""
        if not params.bad_words or self._banned is None:
            return np.zeros(0, np.intp)
        return self._banned(tuple(params.bad_words))

    def _adjust(self, row: Scores, sequence: Sequence) -> Scores:
        """The row itself, or a copy with penalties, biases and masks."""
        params = sequence.request.params
        too_early = sequence.num_generated < params.min_tokens
        constraint = sequence.constraint
        if not (params.needs_penalties or params.logit_bias or params.bad_words or too_early or constraint):
            return row
        scores = row.copy()
        if params.needs_penalties:
            self._penalize(scores, sequence)
        if params.logit_bias:
            scores[list(params.logit_bias)] += np.fromiter(params.logit_bias.values(), np.float32)
        if too_early:
            scores[list(sequence.end_token_ids)] = -np.inf
        scores[self._bad_ids(params)] = -np.inf
        if constraint is not None:
            apply_constraint(scores, constraint, sequence.end_token_ids)
        return scores

    def _penalize(self, scores: Scores, sequence: Sequence) -> None:
        params, state = sequence.request.params, penalty_state(sequence, len(scores))
        if params.repetition_penalty != 1:
            seen = np.flatnonzero(state.seen)
            factor, before = np.float32(params.repetition_penalty), scores[seen]
            with np.errstate(all="ignore"):  # a tiny factor makes numbers as large as there are, not infinite ones
                after = np.clip(np.where(before > 0, before / factor, before * factor), -LARGEST, LARGEST)
            scores[seen] = np.where(np.isfinite(before), after, before)
        if params.presence_penalty or params.frequency_penalty:
            used = np.flatnonzero(state.counts)
            scores[used] -= (
                np.float32(params.presence_penalty) + np.float32(params.frequency_penalty) * state.counts[used]
            )


def _completes(sequence: Sequence, token: int) -> bool:
    """Whether a token would complete one of the bad words in the text."""
    bad = sequence.request.params.bad_words
    return bool(bad) and sequence.text is not None and sequence.text.would_contain(token, bad)


def apply_constraint(scores: Scores, constraint: TokenConstraint, end_token_ids: Collection[int]) -> None:
    """Rule out, in place, what may not come next."""
    words = constraint.mask()
    if words is None:
        return
    bits = np.unpackbits(words.view(np.uint8), count=len(scores), bitorder="little").view(bool)
    if constraint.is_complete:
        bits[list(end_token_ids)] = True
    np.copyto(scores, -np.inf, where=~bits)


def uniform(seed: int, choice: int, position: int, attempt: int = 0) -> float:
    """A random number in [0, 1), a function of its arguments."""
    digest = hashlib.blake2b(struct.pack("<qIII", seed, choice, position, attempt), digest_size=8).digest()
    return float(int.from_bytes(digest, "little") >> 11) * 2.0**-53


def draw_token(scores: Scores, sequence: Sequence, attempt: int = 0, position: int | None = None) -> int:
    """A token of a sequence as its parameters want it, by the random number of its place; default: the next one."""
    request = sequence.request
    if request.params.temperature == 0:
        return int(scores.argmax())
    place = len(sequence.tokens) if position is None else position
    return sample_token(scores, request.params, uniform(request.seed, sequence.choice, place, attempt))


def sample_token(scores: Scores, params: SamplingParams, draw: float) -> int:
    """The token at which the cumulative probability, of the tokens that the filters leave, exceeds ``draw``.

    Filters in the order of transformers: top_k, top_p of what is left, min_p. The rest is summed in order of ids.
    """
    highest = scores.max()
    if not np.isfinite(highest):
        return int(scores.argmax())
    if not 0 < params.top_k < len(scores) and params.top_p >= 1:
        return kernels.draw_token(scores, float(highest), max(params.temperature, 1e-30), params.min_p, draw)
    ids, probabilities = _filtered(scores, params, highest)
    index = pick(probabilities, draw)
    return index if ids is None else int(ids[index])


def distribution(scores: Scores, params: SamplingParams) -> NDArray[np.float64]:
    """What `sample_token` draws from, [vocabulary]; the highest score is finite."""
    ids, probabilities = _filtered(scores, params, scores.max())
    result = np.zeros(len(scores))
    result[slice(None) if ids is None else ids] = probabilities
    result /= result.sum()
    return result


def pick(weights: NDArray[np.floating[Any]], draw: float) -> int:
    """The place at which their sum, in order, exceeds the share ``draw`` of all."""
    cumulative = np.cumsum(weights, dtype=np.float64)
    index = int(np.searchsorted(cumulative, draw * cumulative[-1], side="right"))
    if index == len(cumulative):  # the product was rounded up
        index = int(np.flatnonzero(weights)[-1])
    return index


def _filtered(scores: Scores, params: SamplingParams, highest: np.float32) -> tuple[Ids | None, Scores]:
    """The tokens that the filters leave (None: all), in order, and what the probability of each is proportional to."""
    with np.errstate(over="ignore"):
        scaled = (scores - highest) / np.float32(max(params.temperature, 1e-30))
    ids: Ids | None = None
    if 0 < params.top_k < len(scaled):
        ids = _top(scaled, params.top_k)
        scaled = scaled[ids]
    if params.top_p < 1:
        kept = _nucleus(scaled, params.top_p)
        ids = kept if ids is None else ids[kept]
        scaled = scaled[kept]
    probabilities = np.exp(scaled)
    if params.min_p > 0:  # the highest probability is exp(0)
        probabilities[probabilities < params.min_p] = 0
    return ids, probabilities


def largest(scores: Scores, count: int) -> Ids:
    """The ids of the ``count`` largest scores, in falling order; ties: lowest id first."""
    ids = _top(scores, count) if count < len(scores) else np.arange(len(scores))
    return ids[np.argsort(-scores[ids], kind="stable")]


def _top(scores: Scores, count: int) -> Ids:
    """The same in order of ids; ``count`` is less than all."""
    return _from(scores, count, np.partition(scores, len(scores) - count)[len(scores) - count])


def _nucleus(scores: Scores, top_p: float) -> Ids:
    """The smallest set of most likely tokens with ``top_p`` of the probability, in order of ids."""
    falling = np.sort(scores)[::-1]
    cumulative = np.cumsum(np.exp(falling), dtype=np.float64)
    count = min(int(np.searchsorted(cumulative, top_p * cumulative[-1])) + 1, len(scores))
    return _from(scores, count, falling[count - 1])


def _from(scores: Scores, count: int, lowest: np.float32) -> Ids:
    """The ids of the ``count`` largest scores, of which the smallest is ``lowest``, in order of ids."""
    above = np.flatnonzero(scores > lowest)
    if len(above) == count:
        return above
    return np.sort(np.concatenate([above, np.flatnonzero(scores == lowest)[: count - len(above)]]))


def log_probability(row: Scores, token: int, count: int) -> TokenLogprob:
    """Log-probability of a token and of the ``count`` most likely ones under the model's own distribution."""
    highest = row.max()
    total = float(highest) + float(np.log(np.exp(row - highest).sum(dtype=np.float64)))

    def logprob(i: int) -> float:
        return max(float(row[i]) - total, LOWEST_LOGPROB)

    top = tuple((int(i), logprob(int(i))) for i in largest(row, count)) if count else ()
    return TokenLogprob(token, logprob(token), top)
