"""Texts, limits of texts, constraints and distributions are those without drafts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from drafts import Oracle

from llmc import LLM, SamplingParams
from llmc.runtime.chunk import Chunk
from llmc.runtime.outcome import Outcome
from llmc.runtime.request import Request
from llmc.runtime.sampling import Sampler
from llmc.runtime.speculative.base import Tree
from llmc.runtime.speculative.ngram import NgramProposer

LETTERS = "ab0 "
CHI_SQUARE = (0.0, 10.83, 13.82, 16.27, 18.47, 20.52, 22.46, 24.32)
"""What a sum of so many squares exceeds with probability 0.001."""


def letters(kit: Any) -> Any:
    """A model that writes four letters."""
    wanted = kit.ids(LETTERS)

    def model(history: tuple[int, ...]) -> Any:
        logits = kit.hashed(history)
        logits[wanted] += 20
        return logits

    return model


CASES: dict[str, dict[str, Any]] = {
    "stop": {"stop": ["ab0", "00"], "max_tokens": 60},
    "stop_included": {"stop": ["ba0"], "include_stop_str_in_output": True, "max_tokens": 60},
    "min_tokens": {"stop": ["ab"], "min_tokens": 17, "max_tokens": 60},
    "stp_02_bad_words": {"bad_words": ["a0", "b b"], "max_tokens": 40},
    "regex": {"constraint": {"regex": "[ab]{9,30}"}, "max_tokens": 50},
    "choice": {"constraint": {"choice": ["abba", "abb0"]}, "max_tokens": 50},
    "drawn": {"temperature": 1.0, "seed": 3, "n": 3, "stop": ["0a"], "max_tokens": 40},
    "drawn_regex": {"temperature": 1.0, "seed": 4, "constraint": {"regex": "(ab|0+)*"}, "max_tokens": 30},
}


@pytest.mark.parametrize("name", CASES)
def test_stp_02_texts_are_the_same(kit: Any, name: str) -> None:
    params = SamplingParams(logprobs=1, **CASES[name])
    model = letters(kit)

    def answers(llm: LLM) -> list[Any]:
        return [
            [(c.text, c.token_ids, c.logprobs, c.finish_reason, c.stop_reason) for c in result.choices]
            for result in llm.generate(["ab0 ab0 ab", "0 0 0", "abab abab"], params)
        ]

    expected = answers(kit.llm(model))
    for proposer in (Oracle(model, 1, right=0.9), NgramProposer()):
        llm = kit.llm(model, proposer=proposer)
        assert answers(llm) == expected
        if isinstance(proposer, Oracle):
            assert llm.scheduler.statistics.drafted > 0
    if "bad_words" in CASES[name]:
        assert not any("a0" in text or "b b" in text for choices in expected for text, *_ in choices)


def test_stp_02_increments_are_whole(kit: Any) -> None:
    """Several tokens at once: joined text, tokens and log-probabilities are those of the answer."""
    model = letters(kit)
    llm = kit.llm(model, proposer=Oracle(model, 2, right=1.0))
    params = SamplingParams(max_tokens=40, stop=["ab0"], logprobs=0)
    (whole,) = kit.llm(model).generate("ab0 a", params)
    deltas = list(llm.stream("ab0 a", params))
    assert "".join(d.text for d in deltas) == whole.text
    assert tuple(t for d in deltas for t in d.token_ids) == whole.token_ids
    assert tuple(e for d in deltas for e in d.logprobs or ()) == whole.logprobs
    assert max(len(d.token_ids) for d in deltas) > 1


@pytest.mark.parametrize("top_p", [1.0, 0.8])
def test_spc_01_the_distribution_is_the_models(top_p: float) -> None:
    """100,000 draws from eight tokens, after drafts of another distribution."""
    rng = np.random.default_rng(5)
    target = rng.normal(size=(4, 8)).astype(np.float32)  # of the last token, and of three drafts below it
    params = SamplingParams(max_tokens=9, temperature=1.0, top_p=top_p, seed=0)
    request = Request(0, [1], params, 9)
    (sequence,) = request.sequences
    outcome = Outcome(Sampler(), None)
    trees = [
        Tree(tuple(int(t) for t in rng.choice(8, 3, replace=False, p=np.arange(1, 9) / 36)), (-1, -1, -1))
        for _ in range(64)
    ]
    first, second = np.zeros(8, int), np.zeros((3, 8), int)
    for seed in range(100_000):
        request.seed, sequence.tokens = seed, [1]
        outcome.take(Chunk(sequence, 0, 1, 0, trees[seed % 64]), None, target, 0)
        token = sequence.tokens[1]
        first[token] += 1
        if len(sequence.tokens) > 2:
            second[trees[seed % 64].tokens.index(token), sequence.tokens[2]] += 1
    for counts, logits in zip((first, *second), target, strict=True):
        wanted = np.exp(logits.astype(np.float64))
        if top_p < 1:
            order = np.argsort(-wanted)
            kept = order[: int(np.searchsorted(np.cumsum(wanted[order]), top_p * wanted.sum())) + 1]
            wanted = np.where(np.isin(np.arange(8), kept), wanted, 0)
        wanted *= counts.sum() / wanted.sum()
        assert counts[wanted == 0].sum() == 0
        found, wanted = counts[wanted > 0], wanted[wanted > 0]
        assert ((found - wanted) ** 2 / wanted).sum() < CHI_SQUARE[len(wanted) - 1]
