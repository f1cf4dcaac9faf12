"""The prefix cache changes what is computed, and nothing of what comes out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from llmc.runtime import prefix_cache
from llmc.runtime.batch import Batch
from llmc.runtime.request import SamplingParams


def prompt(seed: int, length: int) -> list[int]:
    return [int(t) for t in np.random.default_rng(seed).integers(3, 384, length)]


def computed(llm: Any) -> int:
    return int(llm.scheduler.statistics.tokens)


def answers(llm: Any, prompts: list[list[int]], **params: Any) -> list[Any]:
    results = llm.generate(prompts, SamplingParams(**{"max_tokens": 20, "ignore_eos": True, "logprobs": 2} | params))
    return [[(c.token_ids, c.logprobs, c.text) for c in r.choices] for r in results]


SHARED = prompt(0, 100)
PROMPTS = [SHARED[:n] + prompt(i, 5) for i, n in enumerate([100, 100, 64, 63, 16, 15, 0, 100])]


@pytest.mark.parametrize("sizes", [{}, {"max_batch_tokens": 7, "max_sequences": 4}, {"num_blocks": 10}])
def test_the_same_with_and_without(kit: Any, sizes: dict[str, int]) -> None:
    off, on = (kit.llm(prefix_cache=flag, **sizes) for flag in (False, True))
    on.executor.poisons(on.scheduler.kv_cache)
    for params in ({}, {"temperature": 1, "seed": 5, "n": 2}, {"prompt_logprobs": 1}):
        assert answers(on, PROMPTS, **params) == answers(off, PROMPTS, **params)
    assert computed(on) < 0.8 * computed(off)
    for llm in (on, off):
        cache = llm.scheduler.kv_cache
        assert (cache.num_used, cache.num_available) == (0, cache.num_blocks)


def test_one_after_the_other_computes_only_the_rest(kit: Any) -> None:
    llm = kit.llm()
    first = answers(llm, [SHARED])
    assert computed(llm) == 100 + 19
    assert answers(llm, [SHARED]) == first
    assert computed(llm) == 119 + 4 + 19  # of 100 tokens 96 are in full blocks
    (result,) = llm.generate([SHARED[:96]], SamplingParams(max_tokens=1))
    assert result.usage.cached_tokens == 80  # the last token is always computed, and its block with it
    (result,) = llm.generate([SHARED[:97]], SamplingParams(max_tokens=1))
    assert result.usage.cached_tokens == 96
    assert llm.counts["prefix_hits"] == 96 + 80 + 96
    assert llm.counts["prefix_queries"] == 100 + 100 + 96 + 97


def test_a_conversation_finds_its_answers(kit: Any) -> None:
    llm = kit.llm()
    (result,) = llm.generate([SHARED], SamplingParams(max_tokens=30, ignore_eos=True))
    (second,) = llm.generate([SHARED + list(result.token_ids) + prompt(9, 5)], SamplingParams(max_tokens=1))
    assert second.usage.cached_tokens == 128  # 100 + 29 tokens were computed


def test_blocks_of_running_sequences_are_found(kit: Any) -> None:
    llm = kit.llm()
    llm.add_request(SHARED, SamplingParams(max_tokens=50, ignore_eos=True))
    llm.step()
    llm.step()
    second = llm.add_request(PROMPTS[1], SamplingParams(max_tokens=50, ignore_eos=True))
    llm.step()
    assert llm.request(second).num_cached_tokens == 96
    first, other = llm.scheduler.running
    assert first.table.blocks[:6] == other.table.blocks[:6]


def test_kv_10_nothing_is_shared_before_it_is_computed(kit: Any) -> None:
    """Equal prompts in one step; the second one waits for what the first one computes, and both are right."""
    expected = answers(kit.llm(prefix_cache=False), [SHARED[:48]])
    for budget in (16, 64, 512):
        llm = kit.llm(max_batch_tokens=budget)
        assert answers(llm, [SHARED[:48]] * 2) == expected * 2
        assert computed(llm) == 48 + 16 + 2 * 19


def test_kv_15_two_hundred_times_the_same(kit: Any) -> None:
    llm = kit.llm(num_blocks=24)
    first = answers(llm, [SHARED], max_tokens=4)
    for i in range(200):
        assert answers(llm, [SHARED], max_tokens=4) == first
        answers(llm, [prompt(i, 50 + i)], max_tokens=2)
    assert llm.counts["prefix_hits"] > 0


def test_kv_18_cached_tokens_are_counted_once(kit: Any) -> None:
    llm = kit.llm(num_blocks=10)
    ids = SHARED[:64]
    llm.generate([ids], SamplingParams(max_tokens=1))
    older = llm.add_request(prompt(5, 50), SamplingParams(max_tokens=60, ignore_eos=True))
    victim = llm.add_request(ids, SamplingParams(max_tokens=60, ignore_eos=True))
    request = llm.request(victim)
    while llm.has_unfinished:
        llm.step()
    assert llm.counts["preemptions"] > 0
    assert request.num_cached_tokens == 48
    assert llm.counts["prefix_hits"] == 48
    assert older < victim


def test_a_preempted_sequence_finds_its_own_blocks(kit: Any) -> None:
    def run(on: bool) -> tuple[int, list[Any]]:
        llm = kit.llm(num_blocks=12, prefix_cache=on)
        found = answers(llm, [prompt(1, 60), prompt(2, 60)], max_tokens=80)
        assert llm.counts["preemptions"] > 0
        return computed(llm), found

    (less, with_cache), (more, without) = run(True), run(False)
    assert with_cache == without
    assert less < more


def test_salts_and_adapters_keep_apart(kit: Any) -> None:
    llm = kit.llm()
    found = {}
    for salt in ("", "a", "b", "a", ""):
        request = llm.request(llm.add_request(SHARED, SamplingParams(max_tokens=1), salt=salt))
        while llm.has_unfinished:
            llm.step()
        found.setdefault(salt, []).append(request.num_cached_tokens)
    assert found == {"": [0, 96], "a": [0, 96], "b": [0]}


def test_sec_19_with_equal_hashes_everybody_gets_his_own(kit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = answers(kit.llm(prefix_cache=False), PROMPTS)
    monkeypatch.setattr(prefix_cache, "digest", lambda data: b"the same")
    llm = kit.llm()
    for _ in range(3):
        assert answers(llm, PROMPTS) == expected


def test_what_failed_is_not_found_again(kit: Any) -> None:
    """A step that breaks off may have written anything, and rows that are not finite come from somewhere."""
    bad: set[int] = set()

    def model(history: tuple[int, ...]) -> Any:
        logits = kit.hashed(history)
        if len(history) in bad:
            logits[7] = np.nan
        return logits

    for broken in ("step", "row"):
        llm = kit.llm(model)
        if broken == "step":
            llm.executor.fail_at = 2
        bad.update({100} if broken == "row" else ())
        (result,) = llm.generate([SHARED], SamplingParams(max_tokens=5, ignore_eos=True))
        assert result.finish_reason == "error"
        bad.clear()
        assert llm.scheduler.kv_cache.num_cached == 0
        assert answers(llm, [SHARED]) == answers(kit.llm(prefix_cache=False), [SHARED])


def test_a_cache_of_recurrent_state_shares_nothing(kit: Any) -> None:
    llm = kit.llm(has_state=True)
    assert answers(llm, [SHARED]) == answers(llm, [SHARED])
    assert llm.counts["prefix_hits"] == 0


def test_batches_name_each_block_once_for_writing(kit: Any) -> None:
    """A shared block is never written: the rows of a step go to blocks that one sequence owns."""
    llm = kit.llm(max_batch_tokens=33)
    writes: list[tuple[int, int]] = []
    step = llm.executor.step

    def watched(batch: Batch) -> Any:
        for s, start in enumerate(batch.num_computed.tolist()):
            count = int(batch.cu_seqlens[s + 1] - batch.cu_seqlens[s])
            writes.extend((int(batch.block_tables[s, p // 16]), p % 16) for p in range(start, start + count))
        assert len(set(writes)) == len(writes)
        writes.clear()
        return step(batch)

    llm.executor.step = watched
    answers(llm, PROMPTS * 2)


@pytest.mark.parametrize("when", range(1, 13))
def test_a_step_may_fail_at_any_time(kit: Any, when: int) -> None:
    """It fails the requests that it had, others get what they would get alone, and nothing of it is found later."""
    expected = [answers(kit.llm(prefix_cache=False), [p])[0] for p in PROMPTS]
    llm = kit.llm(max_batch_tokens=40, max_sequences=4, num_blocks=16)
    llm.executor.poisons(llm.scheduler.kv_cache)
    llm.executor.fail_at = when
    results = llm.generate(PROMPTS, SamplingParams(max_tokens=20, ignore_eos=True, logprobs=2))
    failed = [r.finish_reason == "error" for r in results]
    assert 1 <= sum(failed) <= 4
    for bad, result, wanted in zip(failed, results, expected, strict=True):
        if not bad:
            assert [(c.token_ids, c.logprobs, c.text) for c in result.choices] == wanted
    assert llm.counts["failed_steps"] == 1
    assert answers(llm, PROMPTS) == expected
    assert llm.counts["kv_used"] == 0
