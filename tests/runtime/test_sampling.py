"""Sampling: filters, penalties, masks, and random numbers that depend on nothing else."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from llmc.runtime.request import Request, SamplingParams, Sequence
from llmc.runtime.sampling import LOWEST_LOGPROB, Sampler, largest, log_probability, sample_token, uniform


def sequence(prompt: list[int], output: list[int] | None = None, **params: Any) -> Sequence:
    request = Request(0, prompt, SamplingParams(**{"seed": 1} | params), 100, frozenset({2, 5}))
    result = request.sequences[0]
    for token in output or []:
        result.append(token)
    return result


def sample(logits: Any, seq: Sequence) -> int:
    (sampled,) = Sampler().sample(np.array([logits], np.float32), [0], [seq])
    assert sampled.error is None
    return sampled.token


def allowed(logits: Any, **params: Any) -> set[int]:
    scores = np.array(logits, np.float32)
    full = SamplingParams(temperature=params.pop("temperature", 1.0), **params)
    return {sample_token(scores, full, draw) for draw in np.linspace(0, 1, 4001)[:-1]}


def test_greedy_takes_the_lowest_id_of_equals() -> None:
    assert sample([0, 3, 1, 3], sequence([1])) == 1
    assert sample([-np.inf, -np.inf, -4], sequence([1])) == 2


def test_filters() -> None:
    logits = np.log([0.5, 0.2, 0.2, 0.06, 0.04])
    assert allowed(logits) == {0, 1, 2, 3, 4}
    assert allowed(logits, top_k=1) == {0}
    assert allowed(logits, top_k=2) == {0, 1}  # tie: lowest id
    assert allowed(logits, top_k=-1) == allowed(logits, top_k=100) == {0, 1, 2, 3, 4}
    assert allowed(logits, top_p=0.5) == {0}
    assert allowed(logits, top_p=0.6) == {0, 1}
    assert allowed(logits, top_p=1e-9) == {0}
    assert allowed(logits, top_k=2, top_p=0.7) == {0}  # of what top_k leaves, 0.71 is enough
    assert allowed(logits, min_p=0.3) == {0, 1, 2}
    assert allowed(logits, min_p=1) == {0}
    assert allowed(logits, temperature=1e-6) == {0}


@pytest.mark.parametrize("top_p", [0.1, 0.5, 0.9, 0.999])
def test_nucleus_of_a_large_vocabulary(top_p: float) -> None:
    logits = np.random.default_rng(0).normal(size=50_000).astype(np.float32)
    probabilities = np.exp(logits.astype(np.float64))
    probabilities /= probabilities.sum()
    order = np.argsort(-probabilities, kind="stable")
    size = int(np.searchsorted(np.cumsum(probabilities[order]), top_p)) + 1
    params = SamplingParams(temperature=1, top_p=top_p)
    drawn = {sample_token(logits, params, draw) for draw in np.linspace(0, 1, 1000, endpoint=False)}
    assert drawn <= set(order[: size + 1].tolist())
    assert max(drawn) == pytest.approx(order[:size].max(), rel=0.01)


def test_equals_at_the_edge_of_the_nucleus() -> None:
    assert allowed([2.0, 1.0, 1.0, 1.0], top_p=0.6) == {0, 1}
    assert allowed([1.0, 1.0, 2.0, 1.0], top_p=0.6) == {0, 2}
    assert allowed([1.0] * 4, top_p=0.5) == {0, 1}


def test_draws_have_the_distribution() -> None:
    logits = np.array([0.0, 1.0, 2.0, -1.0], np.float32)
    for temperature in (0.5, 1.0, 2.0):
        params = SamplingParams(temperature=temperature)
        draws = [sample_token(logits, params, uniform(3, 0, i)) for i in range(20_000)]
        expected = np.exp(logits / temperature) / np.exp(logits / temperature).sum()
        chi = sum((np.bincount(draws, minlength=4) - 20_000 * expected) ** 2 / (20_000 * expected))
        assert chi < 16.3  # p = 0.001, 3 degrees of freedom


def test_uniform_depends_on_its_arguments_only() -> None:
    assert uniform(-(2**63), 0, 0) == uniform(-(2**63), 0, 0)
    values = {uniform(s, c, p, a) for s in (0, 1) for c in (0, 1) for p in (0, 1) for a in (0, 1)}
    assert len(values) == 16
    assert all(0 <= v < 1 for v in values)
    sample = np.array([uniform(9, 0, i) for i in range(10_000)])
    assert abs(sample.mean() - 0.5) < 0.01
    assert abs(np.corrcoef(sample[:-1], sample[1:])[0, 1]) < 0.03


def test_largest_breaks_ties_by_id() -> None:
    scores = np.array([1, 3, 3, 2, 3], np.float32)
    assert largest(scores, 2).tolist() == [1, 2]
    assert largest(scores, 4).tolist() == [1, 2, 4, 3]
    assert largest(scores, 9).tolist() == [1, 2, 4, 3, 0]


def test_repetition_penalty_counts_prompt_and_output() -> None:
    logits = [0.0, 4.0, 3.0, 2.5, -1.0]
    assert sample(logits, sequence([1])) == 1
    assert sample(logits, sequence([1], repetition_penalty=2)) == 2
    assert sample(logits, sequence([1], [3, 2][:1], repetition_penalty=2)) == 2
    assert sample(logits, sequence([1, 2], [3], repetition_penalty=2)) == 1  # 2, 1.5, 1.25 are left
    assert sample([-1.0, -1.5], sequence([0], repetition_penalty=2)) == 1  # negative logits are multiplied


def test_presence_and_frequency_count_the_output_alone() -> None:
    logits = [0.0, 4.0, 3.0, 2.0]
    assert sample(logits, sequence([1], presence_penalty=2)) == 1
    assert sample(logits, sequence([0], [1], presence_penalty=1.5)) == 2
    assert sample(logits, sequence([0], [1, 1], presence_penalty=0.5)) == 1
    assert sample(logits, sequence([0], [1, 1], frequency_penalty=0.9)) == 2
    assert sample(logits, sequence([0], [1], frequency_penalty=-2)) == 1


def test_logit_bias() -> None:
    assert sample([0.0, 1.0, 2.0], sequence([1], logit_bias={0: 5, 2: -100})) == 0


def test_min_tokens_masks_every_end_token() -> None:
    logits = [0.0, 1.0, 9.0, 2.0, 3.0, 8.0, 7.0]
    assert sample(logits, sequence([1], [3], min_tokens=2, stop_token_ids=[6])) == 4
    assert sample(logits, sequence([1], [3, 3], min_tokens=2)) == 2
    assert sample(logits, sequence([1], min_tokens=2, ignore_eos=True)) == 2


def test_everything_masked_is_an_error() -> None:
    seq = sequence([1], min_tokens=3)
    logits = np.full((1, 6), -np.inf, np.float32)
    logits[0, [2, 5]] = 1
    (sampled,) = Sampler().sample(logits, [0], [seq])
    assert sampled.error is not None
    assert sampled.error.startswith("no token is allowed")


def test_bat_06_neighbours_do_not_matter() -> None:
    logits = np.random.default_rng(0).normal(size=(2, 1000)).astype(np.float32)
    greedy = sequence([1], [3])
    wild = sequence([1], [3], temperature=2, top_k=50, repetition_penalty=2.0)
    expected = [sample(logits[0], greedy), sample(logits[1], wild)]
    both = Sampler().sample(logits, [0, 1], [greedy, wild])
    turned = Sampler().sample(logits, [1, 0], [wild, greedy])
    assert [s.token for s in both] == expected
    assert [s.token for s in turned] == expected[::-1]


def test_the_row_is_not_changed() -> None:
    logits = np.random.default_rng(0).normal(size=(1, 100)).astype(np.float32)
    before = logits.copy()
    for params in ({}, {"temperature": 1}, {"repetition_penalty": 2.0}, {"logit_bias": {3: 4}}, {"min_tokens": 9}):
        Sampler().sample(logits, [0], [sequence([1], [3], **params)])
        assert (logits == before).all()


def test_logprobs_are_those_of_the_model() -> None:
    logits = np.array([1.0, 2.0, 0.5, -np.inf], np.float32)
    seq = sequence([1], [0], logprobs=3, temperature=0.1, presence_penalty=2, logit_bias={2: 50})
    (sampled,) = Sampler().sample(logits[None], [0], [seq])
    expected = logits - np.log(np.exp(logits).sum())
    assert sampled.token == 2
    assert sampled.logprob is not None
    assert sampled.logprob.logprob == pytest.approx(expected[2], abs=1e-6)
    assert sampled.logprob.top == tuple((i, pytest.approx(expected[i], abs=1e-6)) for i in (1, 0, 2))
    assert log_probability(logits, 3, 4).logprob == LOWEST_LOGPROB


def test_top_logprobs_0_is_the_chosen_token_alone() -> None:
    (sampled,) = Sampler().sample(np.zeros((1, 9), np.float32), [0], [sequence([1], logprobs=0)])
    assert sampled.logprob is not None
    assert sampled.logprob.top == ()
    (plain,) = Sampler().sample(np.zeros((1, 9), np.float32), [0], [sequence([1])])
    assert plain.logprob is None


@pytest.mark.parametrize("count", [1, 17, 1023, 1024, 1025, 5000])
@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.0])
def test_draws_without_filters_follow_the_cumulative_sum(count: int, temperature: float) -> None:
    rng = np.random.default_rng(count)
    logits = (rng.standard_normal(count) * 3).astype(np.float32)
    logits[rng.random(count) < 0.2] = -np.inf
    logits[count // 2] = 1
    wide = logits.astype(np.float64)
    cumulative = np.cumsum(np.exp((wide - wide.max()) / temperature))
    for draw in [*rng.random(100), 0.0, np.nextafter(1, 0)]:
        token = sample_token(logits, SamplingParams(temperature=temperature), draw)
        # Within the rounding of the sums, the token is the one at which the sum passes the draw.
        assert np.isfinite(logits[token])
        target, slack = draw * cumulative[-1], 1e-5 * cumulative[-1]
        assert cumulative[token] > target - slack
        assert token == 0 or cumulative[token - 1] <= target + slack
