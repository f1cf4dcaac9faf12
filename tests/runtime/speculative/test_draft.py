"""A draft engine: right wherever it agrees, harmless elsewhere."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import engines
import pytest

from llmc import LLM, SamplingParams
from llmc.errors import UsageError
from llmc.runtime.request import Request
from llmc.runtime.speculative.base import Query, Tree
from llmc.runtime.speculative.draft import DraftProposer, differs
from llmc.runtime.speculative.opening import Speculation


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return engines.build(engines.small_llama(), tmp_path_factory.mktemp("target"), dtype="bfloat16")[1]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One layer, and a context and steps that are shorter than the target's."""
    options: dict[str, Any] = {"dtype": "bfloat16", "max_seq_len": 64, "max_batch_tokens": 24}
    config = engines.small_llama(num_hidden_layers=1)
    return engines.build(config, tmp_path_factory.mktemp("draft"), max_sequences=16, **options)[1]


PROMPTS = [[5, 6, 7], list(range(3, 60)), [9, 9, 9, 10], list(range(100, 20, -2))]
PARAMS = [
    SamplingParams(max_tokens=30, ignore_eos=True, logprobs=1),
    SamplingParams(max_tokens=26, ignore_eos=True, logprobs=1, temperature=1.0, seed=1, n=2),
    SamplingParams(max_tokens=21, ignore_eos=True, temperature=0.8, top_k=12, top_p=0.9, seed=2),
    SamplingParams(max_tokens=22, ignore_eos=True, temperature=1.0, min_p=0.1, seed=3),
]


def run(llm: LLM) -> list[Any]:
    return [[(c.token_ids, c.logprobs) for c in r.choices] for r in llm.generate(PROMPTS, PARAMS)]


def test_spc_08_a_draft_engine_that_is_the_target_is_always_right(target: Path) -> None:
    llm = LLM(target, threads=1, speculative=Speculation(f"draft={target}", tokens=5), check=True)
    assert run(llm) == run(LLM(target, threads=1))
    speculator = llm.scheduler.speculator
    assert speculator is not None
    acceptance = speculator.acceptance
    assert acceptance.accepted >= 0.99 * acceptance.drafted
    assert acceptance.tokens_per_step > 5


@pytest.mark.parametrize("which", ["target", "small"])
def test_what_stands_behind_the_end_is_no_wrong_draft(request: pytest.FixtureRequest, which: str) -> None:
    """Texts that end by themselves, at their limit, and at the end of the context, which is short in one engine."""
    path: Path = request.getfixturevalue(which)
    plain = LLM(path, threads=1)
    prompts = [[5 + i, 60 - i, 7 + i] for i in range(12)] + [list(range(3, 62))]
    free = [c.token_ids for r in plain.generate(prompts, SamplingParams(max_tokens=30)) for c in r.choices]
    params = [SamplingParams(max_tokens=30, stop_token_ids=[max(ids[:28], key=ids.index)]) for ids in free]
    params[-1] = SamplingParams(max_tokens=30)
    expected = [c.token_ids for r in plain.generate(prompts, params) for c in r.choices]
    assert sum(len(ids) < 30 for ids in expected) >= 12
    llm = LLM(path, threads=1, speculative=Speculation(f"draft={path}", tokens=5), check=True)
    assert [c.token_ids for r in llm.generate(prompts, params) for c in r.choices] == expected
    assert llm.scheduler.speculator is not None
    acceptance, counted = llm.scheduler.speculator.acceptance, llm.scheduler.statistics
    assert acceptance.accepted >= 0.99 * acceptance.drafted > 20
    assert (counted.drafted, counted.accepted) == (acceptance.drafted, acceptance.accepted)


def test_a_smaller_engine_changes_nothing(target: Path, small: Path) -> None:
    expected = run(LLM(target, threads=1))
    for sizes in ({}, {"num_blocks": 9, "max_sequences": 3}):
        llm = LLM(target, threads=1, speculative=Speculation(f"draft={small}", tokens=3), check=True, **sizes)
        assert run(llm) == expected
        speculator = llm.scheduler.speculator
        assert speculator is not None
        assert speculator.acceptance.drafted > 20
        proposer = speculator._proposer
        assert isinstance(proposer, DraftProposer)
        assert proposer._cache.num_used == 0
        assert not proposer._states


@pytest.mark.parametrize(("drafting", "step"), [(1e-6, 1.0), (0.3, 1e-4), (1e-3, 2e-4)])
def test_second_guesses_change_nothing(target: Path, small: Path, drafting: float, step: float) -> None:
    """Whatever they seem to cost; some are right where the first ones are not."""
    llm = LLM(target, threads=1, speculative=f"draft={small}", check=True)
    speculator = llm.scheduler.speculator
    assert speculator is not None
    propose, ran, trees, now = speculator._proposer.propose, speculator.ran, [], [0.0]

    def timed_propose(queries: list[Query]) -> list[Tree]:
        now[0] += drafting
        trees.extend(found := propose(queries))
        return found

    def timed_ran() -> None:
        now[0] += step
        ran()

    speculator._clock = lambda: now[0]
    speculator._proposer.propose = timed_propose  # type: ignore[method-assign]
    speculator.ran = timed_ran  # type: ignore[method-assign]
    assert run(llm) == run(LLM(target, threads=1))
    assert speculator.acceptance.read_tokens > 50 or step < drafting
    if step > drafting:
        assert any(not tree.is_chain for tree in trees)


def test_second_guesses_are_the_next_best(target: Path, small: Path) -> None:
    """Beside the first drafts, in the order of nodes; a sequence that draws has what it draws first."""
    logits = LLM(small, threads=1).generate([PROMPTS[0]], [SamplingParams(max_tokens=2, ignore_eos=True, logprobs=2)])
    best = [[token for token, _ in place.top] for place in logits[0].choices[0].logprobs]
    llm = LLM(target, threads=1, speculative=f"draft={small}")
    assert llm.scheduler.speculator is not None
    for temperature, firsts in ((0.0, best), (1.0, None)):
        request = Request(0, PROMPTS[0], SamplingParams(temperature=temperature, seed=1), 50)
        (tree,) = llm.scheduler.speculator._proposer.propose([Query(request.sequences[0], 5, 9, pairs=2)])
        assert tree.parents == (-1, -1, 0, 0, 2)
        if firsts is not None:
            assert tree.tokens[:4] == (*firsts[0], *firsts[1])
        else:
            assert tree.tokens[1] in best[0]


def test_prompts_are_read_before(target: Path, small: Path) -> None:
    """In steps of the draft engine's size; drafts are those without."""
    queries = [Query(Request(n, PROMPTS[n], SamplingParams(), 50).sequences[0], 4, 9) for n in (0, 1, 3)]
    trees = []
    for reads in (True, False):
        llm = LLM(target, threads=1, speculative=f"draft={small}")
        assert llm.scheduler.speculator is not None
        proposer = llm.scheduler.speculator._proposer
        assert [proposer.behind(query.sequence) for query in queries] == [0, 56, 39]
        if reads:
            assert proposer.catch_up(queries) == 56 + 39
            assert [proposer.behind(query.sequence) for query in queries] == [0, 0, 0]
            assert proposer.catch_up(queries) == 0
        trees.append([tree.tokens for tree in proposer.propose(queries)])
    assert trees[0] == trees[1]
    assert min(map(len, trees[0])) == 4


def test_memory_of_the_draft_engine_is_part_of_the_budget(target: Path, small: Path) -> None:
    plain = LLM(target, threads=1, kv_memory="256KiB").scheduler.config.num_blocks
    shared = LLM(target, threads=1, kv_memory="256KiB", speculative=f"draft={small}").scheduler.config.num_blocks
    assert shared == plain * 2 // 3  # two layers, and one


def test_engines_with_other_tokens_are_refused(target: Path, tmp_path: Path) -> None:
    other = engines.build(engines.small_llama(vocab_size=140), tmp_path)[1]
    with pytest.raises(UsageError, match=r"their vocabularies \(of 140 and 131 tokens\)"):
        LLM(target, speculative=f"draft={other}")
    with pytest.raises(UsageError, match="name the draft engine, as in draft=DIR"):
        LLM(target, speculative="draft")
    with pytest.raises(UsageError, match="no such proposer; known: off, draft, "):
        LLM(target, speculative="tarot")
    with pytest.raises(UsageError, match="spec-tokens: 0 is less than 1"):
        Speculation("ngram", tokens=0)


def test_tokens_are_compared(kit: Any) -> None:
    def engine(added: list[str], **more: Any) -> Any:
        text = json.dumps({**kit.byte_level_spec(added), **more}).encode()
        return SimpleNamespace(read=lambda name: text)

    assert differs(engine(["<a>"]), engine(["<a>"])) is None
    assert differs(engine(["<a>"], truncation={}), engine(["<a>"])) is None
    assert differs(engine(["<a>", "<b>"]), engine(["<b>", "<a>"])) == "2 tokens (such as '<a>')"
    assert differs(engine([]), engine(["<b>"])) == "1 tokens (such as '<b>')"


def test_rejection_accepts_more_and_is_reproducible(target: Path, small: Path) -> None:
    """The same answers again, whatever runs beside; the engine itself as its draft is always right."""
    for draft in (small, target):

        def answer(beside: int) -> Any:
            asked = Speculation(f"draft={draft}", sampling="rejection")  # noqa: B023 - called in its round
            llm = LLM(target, threads=1, speculative=asked, check=True)
            params = [SamplingParams(max_tokens=24, ignore_eos=True, temperature=1.0, top_p=0.9, seed=5)]
            results = llm.generate([[5, 6, 7], *([9 + i] for i in range(beside))], params * (1 + beside))
            assert llm.scheduler.speculator is not None
            return results[0].token_ids, llm.scheduler.speculator.acceptance

        alone, acceptance = answer(0)
        assert answer(2)[0] == alone
        assert acceptance.accepted > 0
        if draft == target:
            assert min(acceptance.rates) >= 0.99


def test_a_rule_that_makes_no_sense_is_refused(target: Path) -> None:
    with pytest.raises(UsageError, match="'greedy' is none of exact, rejection, typical"):
        Speculation("ngram", sampling="greedy")
    with pytest.raises(UsageError, match="nothing is drafted; say what drafts with --spec"):
        LLM(target, speculative=Speculation(sampling="typical"))
