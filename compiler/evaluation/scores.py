"""Numbers for rows of logits: how likely the next token was, and how far two models are apart there.

Logits and exponentials are float32, sums float64. Rows are taken a few at a time, so that the temporary arrays stay
below BLOCK_BYTES each however large the vocabulary is; a model against itself is at distance 0 exactly.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]
Ids = NDArray[np.int64]

BLOCK_BYTES = 4 << 20
"""Of one temporary array (a single row may be larger)."""


@dataclass(frozen=True)
class RowScores:
    """One model on n rows. ``nll``: natural logarithm, negated, of the probability of the token that came next."""

    nll: Float64
    top: Ids
    """The most likely token; of equal ones the lowest."""


@dataclass(frozen=True)
class PairScores:
    """Two models on the same n rows; ``divergence``: KL(reference || model) in nats."""

    model: RowScores
    reference: RowScores
    divergence: Float64


def score(logits: Float32, targets: Ids) -> RowScores:
    """Score rows of one model.

    Args:
        logits: [n, vocabulary]
        targets: [n] the tokens that came next.
    """
    nll, top = np.empty(len(logits)), np.empty(len(logits), np.int64)
    for rows in _blocks(logits):
        block = logits[rows]
        _, _, logsum = _exponentials(block)
        nll[rows] = logsum - _at(block, targets[rows])
        top[rows] = block.argmax(1)
    return RowScores(nll, top)


def compare(logits: Float32, reference: Float32, targets: Ids) -> PairScores:
    """Score rows of two models, and their distance.

    Args:
        logits: [n, vocabulary] of the model
        reference: [n, vocabulary] of the one that it is held to
        targets: [n] the tokens that came next.
    """
    nll, top = np.empty((2, len(logits))), np.empty((2, len(logits)), np.int64)
    divergence = np.empty(len(logits))
    for rows in _blocks(logits):
        pair = (logits[rows], reference[rows])
        _, _, logsum = _exponentials(pair[0])
        weights, total, reference_logsum = _exponentials(pair[1])
        nll[:, rows] = [s - _at(x, targets[rows]) for x, s in zip(pair, (logsum, reference_logsum), strict=True)]
        top[:, rows] = [x.argmax(1) for x in pair]
        with np.errstate(invalid="ignore"):
            difference = pair[1] - pair[0]
            difference *= weights
        difference[weights == 0] = 0  # what the reference rules out counts nothing, even where a logit is -inf
        mean = difference.sum(1, dtype=np.float64) / total
        divergence[rows] = mean - (reference_logsum - logsum)
    np.maximum(divergence, 0, out=divergence)  # NaN stays; rounding can leave a little less than nothing
    return PairScores(RowScores(nll[0], top[0]), RowScores(nll[1], top[1]), divergence)


def _blocks(logits: Float32) -> Iterator[slice]:
    step = max(1, BLOCK_BYTES // (4 * logits.shape[1]))
    for start in range(0, len(logits), step):
        yield slice(start, min(start + step, len(logits)))


def _exponentials(block: Float32) -> tuple[Float32, Float64, Float64]:
    """exp(x - max), their sum, and log(sum(exp(x))); NaN where a row holds NaN, or infinity as its largest number."""
    largest = block.max(1, keepdims=True)
    with np.errstate(invalid="ignore"):
        values = np.exp(block - largest)
        total = values.sum(1, dtype=np.float64)
        return values, total, largest[:, 0].astype(np.float64) + np.log(total)


def _at(block: Float32, targets: Ids) -> Float64:
    return block[np.arange(len(block)), targets].astype(np.float64)
