"""When drafts are accepted: rejection keeps the distribution, and typical acceptance what it promises."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from drafts import Oracle

from llmc import SamplingParams
from llmc.runtime.chunk import Chunk
from llmc.runtime.outcome import Outcome
from llmc.runtime.request import Request
from llmc.runtime.sampling import Sampler, distribution
from llmc.runtime.speculative.base import Tree
from llmc.runtime.speculative.draft_path import DraftPath
from llmc.runtime.speculative.growth import DrawnGrowth
from llmc.runtime.speculative.rules import Rule, draft, typical_bar, without
from llmc.runtime.speculative.speculator import _allowed

CHI_SQUARE = (0.0, 10.83, 13.82, 16.27, 18.47, 20.52, 22.46, 24.32)
"""What a sum of so many squares exceeds with probability 0.001."""

FILTERS: dict[str, dict[str, Any]] = {
    "plain": {"temperature": 1.0},
    "hot_top_p": {"temperature": 1.5, "top_p": 0.8},
    "cold_top_k": {"temperature": 0.7, "top_k": 5},
    "penalties": {"temperature": 1.0, "repetition_penalty": 1.7, "presence_penalty": 0.4, "logit_bias": {3: 1.0}},
    "masked": {"temperature": 1.0},
}


LAYER_TOKENS = np.array([1, 2, 3, 4, 5, 7], np.int32)


class Mask:
    """A constraint that allows some of eight tokens, always."""

    is_complete = is_finished = False

    def __init__(self, allowed: list[int]) -> None:
        self.allowed = allowed

    def clone(self) -> Mask:
        return self

    def accept(self, token: int) -> None:
        pass

    def mask(self) -> Any:
        return np.array([sum(1 << token for token in self.allowed)], np.uint32)


def outcome_of(rule: Rule, accepted: list[int] | None = None) -> Outcome:
    def take(chunk: Any, path: list[int], rows: Any) -> None:
        if accepted is not None:
            accepted[0] += len(path)

    return Outcome(Sampler(), SimpleNamespace(rule=rule, take=take))  # type: ignore[arg-type]


def draw_tree(drafter: Any, request: Request, nodes: int, layer: bool = False) -> Tree:
    """As the proposer makes it, from logits [depth, 8] that do not depend on tokens; a layer has no tokens 0 and 6."""
    (sequence,) = request.sequences
    if layer:
        growth = DrawnGrowth(SimpleNamespace(sequence=sequence), nodes, 2)  # type: ignore[arg-type]
        level = [-1]
        while level:
            growth.add(level[0], drafter[len(growth.followed)][LAYER_TOKENS], LAYER_TOKENS)
            level = growth.follow()
        return growth.tree
    path = DraftPath(SimpleNamespace(sequence=sequence), nodes - nodes // 3, nodes // 3, True)  # type: ignore[arg-type]
    while len(path.drafts) < path.limit:
        path.grow(drafter[len(path.drafts)])
    return path.tree


def test_spc_01_100_000_tokens_after_two_drafts_are_the_models() -> None:
    rng = np.random.default_rng(7)
    row, drafter = rng.normal(size=(2, 8)).astype(np.float32)
    request = Request(0, [1], SamplingParams(max_tokens=9, temperature=1.0, seed=0), 9)
    (sequence,) = request.sequences
    given = distribution(drafter, request.params)
    rest = [without(given, token) for token in range(8)]
    counts = np.zeros(8)
    for request.seed in range(100_000):
        first = draft(given, sequence, 1, 0)
        left = rest[first]
        assert left is not None
        tree = Tree((first, draft(left, sequence, 1, 1)), (-1, -1), (given.astype(np.float32), left.astype(np.float32)))
        choose = Rule.REJECTION.draw(tree, -1)
        assert choose is not None
        counts[choose(row, sequence, 0)] += 1
    wanted = 100_000 * distribution(row, request.params)
    assert ((counts - wanted) ** 2 / wanted).sum() < CHI_SQUARE[7]


def test_spc_01_100_000_tokens_after_three_drafts_of_a_layer_are_the_models() -> None:
    """Of three drawn side by side more are accepted than if the one that the sequence would draw were there."""
    row, drafter = np.random.default_rng(7).normal(size=(2, 8)).astype(np.float32)
    request = Request(0, [1], SamplingParams(max_tokens=9, temperature=1.0, seed=0), 9)
    (sequence,) = request.sequences
    counts, accepted = np.zeros(8), 0
    for request.seed in range(100_000):
        growth = DrawnGrowth(SimpleNamespace(sequence=sequence), 3, 1)  # type: ignore[arg-type]
        growth.add(-1, drafter[LAYER_TOKENS], LAYER_TOKENS)
        tree = growth.tree
        assert tree.parents == (-1, -1, -1) and not growth.follow()
        choose = Rule.REJECTION.draw(tree, -1)
        assert choose is not None
        counts[token := choose(row, sequence, 0)] += 1
        accepted += token in tree.tokens
    wanted = 100_000 * distribution(row, request.params)
    assert ((counts - wanted) ** 2 / wanted).sum() < CHI_SQUARE[7]
    assert accepted > 0.6 * 100_000


@pytest.mark.parametrize("layer", [False, True])
@pytest.mark.parametrize("name", FILTERS)
def test_spc_01_rejection_keeps_the_distribution(name: str, layer: bool) -> None:
    """Answers of two tokens from eight, after trees of drafts of another distribution."""
    rng = np.random.default_rng(11)
    logits, drafter = rng.normal(size=(9, 8)).astype(np.float32), rng.normal(size=(9, 8)).astype(np.float32)
    params = SamplingParams(max_tokens=9, seed=0, **FILTERS[name])
    request = Request(0, [1], params, 9)
    (sequence,) = request.sequences
    if name == "masked":
        sequence.constraint = Mask([0, 2, 3, 5, 7])  # type: ignore[assignment]
    accepted = [0]
    outcome = outcome_of(Rule.REJECTION, accepted)
    first, second = np.zeros(8), np.zeros((8, 8))
    rounds = 2_000
    for seed in range(rounds):
        request.seed, sequence.tokens, sequence.penalties = seed, [1], None
        tree = draw_tree(drafter, request, 3, layer)  # two below each other, and another beside the first
        assert tree.parents == (-1, -1, 0)
        if sequence.constraint is not None:
            tree = _allowed(tree, sequence.constraint)
        # row 0 is of the last token; those below depend on the first token alone
        rows = np.stack([logits[0], *(logits[1 + t % 3] for t in tree.tokens)])
        outcome.take(Chunk(sequence, 0, 1, 0, tree), None, rows, 0)
        token = sequence.tokens[1]
        first[token] += 1
        if len(sequence.tokens) > 2:
            second[token, sequence.tokens[2]] += 1

    def wanted_after(tokens: list[int], row: Any) -> Any:
        sequence.tokens, sequence.penalties = tokens, None
        return distribution(Sampler()._adjust(row, sequence), params)

    def check(counts: Any, wanted: Any) -> None:
        assert counts[wanted == 0].sum() == 0
        found, expected = counts[wanted > 0], wanted[wanted > 0] * counts.sum()
        if expected.min() >= 5:
            assert ((found - expected) ** 2 / expected).sum() < CHI_SQUARE[len(found) - 1]

    check(first, wanted_after([1], logits[0]))
    for token in range(8):
        if second[token].sum():
            check(second[token], wanted_after([1, token], logits[1 + token % 3]))
    assert accepted[0] > (0.25 if layer else 0.4) * rounds


def test_drafts_like_the_model_are_all_accepted() -> None:
    row = np.random.default_rng(3).normal(size=(1, 8)).astype(np.float32)
    request = Request(0, [1], SamplingParams(max_tokens=9, temperature=1.0, seed=0), 9)
    (sequence,) = request.sequences
    accepted = [0]
    outcome = outcome_of(Rule.REJECTION, accepted)
    for seed in range(500):
        request.seed, sequence.tokens = seed, [1]
        tree = draw_tree(np.repeat(row, 4, 0), request, 4)
        outcome.take(Chunk(sequence, 0, 1, 0, tree), None, np.repeat(row, 5, 0), 0)
    assert accepted[0] == 3 * 500


def test_rejection_is_reproducible_and_leaves_likely_drafts_to_what_is_drawn(kit: Any) -> None:
    def answer(rule: Rule | None, beside: int = 0) -> Any:
        options = {} if rule is None else {"proposer": Oracle(kit.hashed, 1), "rule": rule}
        llm = kit.llm(kit.hashed, **options)
        params = [SamplingParams(max_tokens=20, temperature=0.9, seed=7)] * (1 + beside)
        return llm.generate([[5, 6, 7], *([8 + i] for i in range(beside))], params)[0].token_ids

    assert answer(Rule.REJECTION) == answer(None) == answer(Rule.REJECTION, beside=3)


def test_typical_acceptance_takes_the_likeliest_draft_above_the_bar() -> None:
    probabilities = np.array([0.5, 0.2, 0.1, 0.08, 0.06, 0.03, 0.02, 0.01])
    entropy = -float((probabilities * np.log(probabilities)).sum())
    assert typical_bar(probabilities) == pytest.approx(min(0.09, 0.3 * np.exp(-entropy)))
    rows = np.repeat(np.log(probabilities).astype(np.float32)[None], 4, 0)
    request = Request(0, [1], SamplingParams(max_tokens=9, temperature=1.0, seed=0), 9)
    (sequence,) = request.sequences

    def first(tree: Tree, seed: int) -> int:
        request.seed, sequence.tokens = seed, [1]
        outcome_of(Rule.TYPICAL).take(Chunk(sequence, 0, 1, 0, tree), None, rows, 0)
        return sequence.tokens[1]

    assert {first(Tree((7, 2, 1), (-1, -1, -1)), seed) for seed in range(50)} == {1}
    assert len({first(Tree((5, 6, 7), (-1, -1, -1)), seed) for seed in range(50)}) > 2


def test_typical_acceptance_leaves_greedy_answers_alone(kit: Any) -> None:
    params = SamplingParams(max_tokens=30, repetition_penalty=1.2)
    (expected,) = kit.llm(kit.hashed).generate([[5, 6, 7]], params)
    llm = kit.llm(kit.hashed, proposer=Oracle(kit.hashed, 1), rule=Rule.TYPICAL)
    (found,) = llm.generate([[5, 6, 7]], params)
    assert found.token_ids == expected.token_ids
    speculator = llm.scheduler.speculator
    assert speculator is not None
    assert speculator.acceptance.accepted > 0
    assert speculator.acceptance.to_json()["lossless"] is False
    assert "typical (lossy)" in speculator.acceptance.line()
