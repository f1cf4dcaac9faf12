"""Scores of rows, against float64 and torch."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
import torch

from llmc.compiler.evaluation.generation import equal_prefix, repetition
from llmc.compiler.evaluation.scores import BLOCK_BYTES, compare, score
from llmc.compiler.evaluation.subject import LOGIT_BYTES, rows_at_once


def random_logits(rows: int, vocabulary: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(scale=4, size=(rows, vocabulary)).astype(np.float32)


@pytest.mark.parametrize(("rows", "vocabulary"), [(1, 2), (7, 131), (40, 50_000), (3, 2_000_000)])
def test_scores_equal_those_of_torch_in_float64(rows: int, vocabulary: int) -> None:
    a, b = random_logits(rows, vocabulary), random_logits(rows, vocabulary, 1)
    b = a + b / 8
    targets = np.random.default_rng(2).integers(0, vocabulary, rows)
    p, q = (torch.from_numpy(x).double().log_softmax(1) for x in (a, b))
    found = compare(b, a, targets)
    at = torch.from_numpy(targets)[:, None]
    np.testing.assert_allclose(found.reference.nll, -p.gather(1, at)[:, 0], rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(found.model.nll, -q.gather(1, at)[:, 0], rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(found.divergence, (p.exp() * (p - q)).sum(1), rtol=1e-4, atol=1e-7)
    np.testing.assert_array_equal(found.model.top, b.argmax(1))
    np.testing.assert_array_equal(found.reference.top, a.argmax(1))
    alone = score(b, targets)
    np.testing.assert_array_equal(alone.nll, found.model.nll)
    np.testing.assert_array_equal(alone.top, found.model.top)


def test_a_model_is_at_no_distance_from_itself() -> None:
    logits = random_logits(50, 1000)
    found = compare(logits, logits.copy(), np.zeros(50, np.int64))
    assert (found.divergence == 0).all()
    np.testing.assert_array_equal(found.model.nll, found.reference.nll)


def test_large_logits_and_what_is_ruled_out() -> None:
    a = np.array([[1e4, 1e4, -np.inf], [-3e38, 0, 1]], np.float32)
    found = compare(a, a, np.array([0, 1]))
    assert found.divergence.tolist() == [0, 0]
    assert found.model.nll[0] == pytest.approx(np.log(2))
    b = np.array([[0, 0, 0], [0, 0, 0]], np.float32)
    assert compare(b, a, np.array([0, 1])).divergence[0] == pytest.approx(np.log(1.5))
    assert np.isinf(compare(a, b, np.array([0, 1])).divergence[0])  # says "never" to what the reference expects


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_numbers_that_are_none_are_not_hidden(bad: float) -> None:
    a = random_logits(4, 100)
    b = a.copy()
    b[2, 7] = bad
    for found in (compare(b, a, np.zeros(4, np.int64)), compare(a, b, np.zeros(4, np.int64))):
        assert np.isnan(found.divergence).tolist() == [False, False, True, False]
    assert np.isnan(score(b, np.zeros(4, np.int64)).nll).tolist() == [False, False, True, False]


def test_memory_is_bounded_for_a_large_vocabulary() -> None:
    """2048 rows of 262144 in float64 would be 4.3 GB."""
    vocabulary = 262_144
    rows = rows_at_once(vocabulary, 2048)
    a = np.zeros((rows, vocabulary), np.float32)
    assert a.nbytes <= LOGIT_BYTES
    tracemalloc.start()
    for _ in range(2):
        compare(a, a, np.zeros(rows, np.int64))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak <= 8 * BLOCK_BYTES


def test_rows_at_once() -> None:
    assert rows_at_once(49152, 512) == 160
    assert rows_at_once(100, 512) == 512
    assert rows_at_once(100, 20) == 16
    assert rows_at_once(100, 7) == 7
    assert rows_at_once(10**9, 512) == 1


def test_repetition() -> None:
    assert repetition([]) == repetition([1, 2, 3]) == repetition([1, 2, 3, 4]) == 0
    assert repetition(list(range(100))) == 0
    assert repetition([5] * 104) == pytest.approx(100 / 101)
    assert repetition([1, 2, 3, 4, 1, 2, 3, 4]) == pytest.approx(1 / 5)


def test_equal_prefix() -> None:
    assert equal_prefix([], [1]) == 0
    assert equal_prefix([1, 2, 3], [1, 2, 4]) == 2
    assert equal_prefix([1, 2], [1, 2, 4]) == 2
