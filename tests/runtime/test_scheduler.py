"""Scheduling changes nothing but the time: each request gets what it would get alone."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from llmc.errors import RequestError
from llmc.runtime.embedding import Pool
from llmc.runtime.request import FinishReason, Request, SamplingParams
from llmc.runtime.sampling import Sampler
from llmc.runtime.scheduler import Scheduler


def prompt(seed: int, length: int) -> list[int]:
    return [int(t) for t in np.random.default_rng(seed).integers(3, 384, length)]


class Runner:
    """A scheduler with the fake executor."""

    def __init__(self, kit: Any, model: Any = None, **sizes: Any) -> None:
        self.config = kit.config(**sizes)
        self.executor = kit.PagedExecutor(model or kit.hashed, self.config)
        self.scheduler = Scheduler(self.executor, Sampler(), self.config, clock=lambda: self.now)
        self.count = self.now = 0

    def add(self, ids: list[int], pool: str | None = None, **values: Any) -> Request:
        options = {k: values.pop(k) for k in ("priority", "deadline", "salt", "adapter") if k in values}
        params = {"max_tokens": 20, "seed": 7} | values
        if pool is not None:
            params, options["pool"] = {"max_tokens": 0}, Pool(pool)
        request = Request(self.count, ids, SamplingParams(**params), params["max_tokens"], **options)
        self.count += 1
        self.scheduler.add(request)
        return request

    def run(self) -> None:
        while self.scheduler.has_work:
            self.scheduler.step()

    def assert_empty(self) -> None:
        cache = self.scheduler.kv_cache
        assert (cache.num_available, cache.num_used) == (cache.num_blocks, 0)
        assert not self.scheduler.running
        assert not self.scheduler.waiting


def output(request: Request) -> list[list[int]]:
    assert request.finished
    assert not any("AssertionError" in (s.error or "") for s in request.sequences), request.sequences[0].error
    return [s.tokens[s.num_prompt :] for s in request.sequences]


def alone(kit: Any, ids: list[int], **params: Any) -> Request:
    runner = Runner(kit, num_blocks=1024)
    request = runner.add(ids, **params)
    runner.run()
    return request


@pytest.mark.parametrize("budget", [1, 2, 7, 16, 48, 64])
def test_chunks_of_any_size(kit: Any, budget: int) -> None:
    runner = Runner(kit, max_batch_tokens=budget, max_sequences=min(budget, 4))
    requests = [runner.add(prompt(i, n), temperature=i % 2) for i, n in enumerate([1, 15, 16, 17, 33, 100])]
    runner.run()
    for i, request in enumerate(requests):
        assert output(request) == output(alone(kit, request.prompt, temperature=i % 2))
    assert max(len(b.input_ids) for b in runner.executor.batches) == budget
    runner.assert_empty()


def test_prefill_is_mixed_with_decode(kit: Any) -> None:
    runner = Runner(kit, max_batch_tokens=8)
    runner.add(prompt(0, 5))
    runner.scheduler.step()
    runner.add(prompt(1, 30))
    runner.scheduler.step()
    batch = runner.executor.batches[-1]
    assert np.diff(batch.cu_seqlens).tolist() == [1, 7]
    assert batch.logit_rows.tolist() == [0]
    assert batch.num_computed.tolist() == [5, 0]


def test_bat_08_growing_contexts(kit: Any) -> None:
    runner = Runner(kit, num_blocks=8)
    requests = [runner.add(prompt(i, 30), max_tokens=18) for i in range(4)]
    runner.run()
    assert [output(r) for r in requests] == [output(alone(kit, r.prompt, max_tokens=18)) for r in requests]
    assert runner.scheduler.statistics.preemptions > 0
    assert all(s.finish_reason == "length" for r in requests for s in r.sequences)


def test_kv_03_preemption_and_recompute(kit: Any) -> None:
    def run(blocks: int) -> tuple[Runner, list[Request]]:
        runner = Runner(kit, num_blocks=blocks)
        requests = [runner.add(prompt(i, 5 + i), max_tokens=30, logprobs=2) for i in range(34)]
        runner.run()
        return runner, requests

    small, requests = run(32)
    big, expected = run(4096)
    assert [output(r) for r in requests] == [output(r) for r in expected]
    assert [r.sequences[0].logprobs for r in requests] == [r.sequences[0].logprobs for r in expected]
    assert small.scheduler.statistics.preemptions > 0
    assert big.scheduler.statistics.preemptions == 0
    small.assert_empty()


def test_a_pool_of_8_blocks_with_16_requests(kit: Any) -> None:
    runner = Runner(kit, num_blocks=8)
    requests = [runner.add(prompt(i, 10 + 3 * i), max_tokens=40, temperature=i % 2) for i in range(16)]
    runner.run()
    for i, request in enumerate(requests):
        assert output(request) == output(alone(kit, request.prompt, max_tokens=40, temperature=i % 2))
    assert runner.scheduler.statistics.preemptions > 0
    runner.assert_empty()


def test_kv_09_what_runs_out_alone_ends_with_length(kit: Any) -> None:
    runner = Runner(kit, num_blocks=4)
    large = runner.add(prompt(0, 40), max_tokens=100)
    small = runner.add(prompt(1, 10), max_tokens=5)
    runner.run()
    (sequence,) = large.sequences
    assert (sequence.finish_reason, len(sequence.tokens)) == (FinishReason.LENGTH, 64)
    assert output(small) == output(alone(kit, small.prompt, max_tokens=5))


@pytest.mark.parametrize(("max_seq_len", "num_blocks", "context"), [(2048, 256, 2048), (4096, 8, 128)])
def test_what_can_never_fit_is_refused(kit: Any, max_seq_len: int, num_blocks: int, context: int) -> None:
    runner = Runner(kit, max_seq_len=max_seq_len, num_blocks=num_blocks)
    fits = runner.add(prompt(0, context - 1), max_tokens=50)
    with pytest.raises(RequestError, match=f"{context} tokens and one to generate do not fit the context of {context}"):
        runner.add(prompt(0, context))
    with pytest.raises(RequestError, match="min_tokens: 10 tokens of prompt"):
        runner.add(prompt(0, 10), min_tokens=context, max_tokens=context)
    with pytest.raises(RequestError, match="prompt: the prompt has no tokens"):
        runner.add([])
    runner.run()
    assert fits.sequences[0].num_generated == 1
    assert fits.sequences[0].finish_reason == "length"


def test_choices_share_the_prompt(kit: Any) -> None:
    runner = Runner(kit, max_batch_tokens=512)
    request = runner.add(prompt(0, 40), n=3, temperature=1)
    runner.run()
    assert runner.scheduler.statistics.tokens == 40 + 2 * 8 + 3 * 19  # two full blocks of 16 are shared
    texts = output(request)
    assert len({tuple(t) for t in texts}) == 3
    assert texts == output(alone(kit, request.prompt, n=3, temperature=1))
    runner.assert_empty()


def test_choices_under_pressure(kit: Any) -> None:
    runner = Runner(kit, num_blocks=8, max_batch_tokens=16)
    requests = [runner.add(prompt(i, 20 + i), n=4, temperature=1, max_tokens=30) for i in range(3)]
    runner.run()
    for request in requests:
        assert output(request) == output(alone(kit, request.prompt, n=4, temperature=1, max_tokens=30))
    assert runner.scheduler.statistics.preemptions > 0
    runner.assert_empty()


def test_priority_then_arrival(kit: Any) -> None:
    runner = Runner(kit, max_sequences=1)
    requests = [runner.add(prompt(i, 4), priority=p, max_tokens=1) for i, p in enumerate([1, 1, 0])]
    ended = []
    while runner.scheduler.has_work:
        ended += [s.request.id for s in runner.scheduler.step() if s.finish_reason]
    assert ended == [2, 0, 1]
    assert all(r.finished for r in requests)


def test_the_youngest_is_preempted_and_the_oldest_never(kit: Any) -> None:
    runner = Runner(kit, num_blocks=6)
    old = runner.add(prompt(0, 31), max_tokens=64)
    young = runner.add(prompt(1, 31), max_tokens=64)
    computed = 0
    while runner.scheduler.has_work:
        runner.scheduler.step()
        if old.sequences[0].finish_reason is None:
            assert old.sequences[0].num_computed > computed
            computed = old.sequences[0].num_computed
    assert runner.scheduler.statistics.preemptions > 0
    assert output(young) == output(alone(kit, young.prompt, max_tokens=64))


@pytest.mark.parametrize("when", range(28))
def test_abort_at_any_moment_frees_everything(kit: Any, when: int) -> None:
    runner = Runner(kit, max_batch_tokens=16, num_blocks=24, max_sequences=3)
    victim = runner.add(prompt(0, 100), n=2, temperature=1)
    others = [runner.add(prompt(i, 20)) for i in range(1, 4)]
    for _ in range(when):
        runner.scheduler.step()
    runner.scheduler.abort(victim)
    assert {s.finish_reason for s in victim.sequences} <= {FinishReason.ABORT, FinishReason.LENGTH}
    assert not any(s.request is victim for s in runner.scheduler.running + runner.scheduler.waiting)
    runner.run()
    assert [output(r) for r in others] == [output(alone(kit, r.prompt)) for r in others]
    runner.assert_empty()


def test_a_failed_step_fails_only_its_own_requests(kit: Any) -> None:
    runner = Runner(kit, max_sequences=2)
    requests = [runner.add(prompt(i, 10)) for i in range(4)]
    runner.executor.fail_at = 3
    runner.run()
    assert [r.sequences[0].finish_reason for r in requests] == ["error", "error", "length", "length"]
    assert requests[0].sequences[0].error == "RuntimeError: launch failed"
    assert output(requests[3]) == output(alone(kit, requests[3].prompt))
    runner.assert_empty()


def test_mth_13_rows_that_are_not_finite_end_their_own_request(kit: Any) -> None:
    def model(history: tuple[int, ...]) -> Any:
        logits = kit.hashed(history)
        if history[0] == 5 and len(history) == 12:
            logits[100] = np.nan
        if history[0] == 6 and len(history) == 12:
            logits[100] = np.inf
        return logits

    for temperature in (0, 1):
        runner = Runner(kit, model)
        requests = [runner.add([first, *prompt(1, 9)], temperature=temperature) for first in (5, 6, 7)]
        runner.run()
        assert [r.sequences[0].finish_reason for r in requests] == ["error", "error", "length"]
        assert requests[0].sequences[0].num_generated == 2
        assert requests[1].sequences[0].error == "the model computed logits that are not finite"


@pytest.mark.parametrize("sizes", [{}, {"max_logit_rows": 4}, {"max_batch_tokens": 5}, {"num_blocks": 8}])
def test_prompt_logprobs(kit: Any, sizes: dict[str, int]) -> None:
    runner = Runner(kit, **{"max_sequences": 4} | sizes)
    others = [runner.add(prompt(9 + i, 30), max_tokens=40) for i in range(3)]
    request = runner.add(prompt(0, 50), prompt_logprobs=2, n=2, temperature=1)
    runner.run()
    entries = request.prompt_logprobs
    assert entries[0] is None
    assert [e.token for e in entries[1:] if e] == request.prompt[1:]
    for i, entry in enumerate(entries[1:], start=1):
        logits = kit.hashed(tuple(request.prompt[:i])).astype(np.float64)
        expected = logits - np.log(np.exp(logits).sum())
        assert entry is not None
        assert entry.logprob == pytest.approx(expected[request.prompt[i]], abs=1e-5)
        assert [t for t, _ in entry.top] == np.argsort(-logits)[:2].tolist()
    assert output(request) == output(alone(kit, request.prompt, n=2, temperature=1))
    assert [output(r) for r in others] == [output(alone(kit, r.prompt, max_tokens=40)) for r in others]


def test_max_tokens_0(kit: Any) -> None:
    runner = Runner(kit)
    nothing = runner.add(prompt(0, 5), max_tokens=0)
    scored = runner.add(prompt(0, 5), max_tokens=0, prompt_logprobs=0, n=2)
    assert nothing.finished
    runner.run()
    assert len(scored.prompt_logprobs) == 5
    for request in (nothing, scored):
        assert all((s.finish_reason, s.num_generated) == (FinishReason.LENGTH, 0) for s in request.sequences)


def test_state_slots_follow_the_sequences(kit: Any) -> None:
    runner = Runner(kit, has_state=True, max_sequences=3, num_blocks=8)
    requests = [runner.add(prompt(i, 20), max_tokens=30, n=1 + i % 2) for i in range(5)]
    while runner.scheduler.has_work:
        runner.scheduler.step()
        slots = [s.state_slot for s in runner.scheduler.running]
        assert len(set(slots)) == len(slots)
        assert set(slots) <= {0, 1, 2}
        states = runner.scheduler.states
        assert states is not None
        assert states.num_free == 3 - len(slots)
    for batch in runner.executor.batches:
        assert batch.state_slots is not None
        assert len(set(batch.state_slots.tolist())) == len(batch.num_computed)
    assert runner.scheduler.statistics.preemptions > 0
    assert all(r.finished for r in requests)


STEPS = 20_000


def test_random_steps(kit: Any) -> None:
    """With aborts, preemption, chunking, choices, deadlines, equal prefixes, embeddings and failures, with and without
    a prefix cache; all blocks are recounted after every step.
    """
    rng = random.Random(3)
    prefixes = [[rng.randrange(3, 384) for _ in range(50)] for _ in range(2)]

    def model(history: tuple[int, ...]) -> Any:  # cheap: every token counts
        return kit.one_hot(hash(history) % 381 + 3)

    steps = preemptions = hits = expired = 0
    while steps < STEPS:
        sizes = {
            "num_blocks": rng.choice([4, 8, 13, 40]),
            "max_batch_tokens": rng.choice([1, 5, 16, 64]),
            "max_sequences": rng.choice([1, 3, 16]),
            "max_logit_rows": 16,
            "has_state": rng.random() < 0.2,
            "prefix_cache": rng.random() < 0.7,
        }
        runner = Runner(kit, model, **sizes)
        runner.executor.poisons(runner.scheduler.kv_cache)
        live: list[Request] = []
        aborted: set[int] = set()
        everything: list[Request] = []
        for _ in range(200):
            runner.now += 1
            if rng.random() < 0.3 and len(runner.scheduler.waiting) < 20:
                ids = rng.choice([[], prefixes[0], prefixes[1]])[: rng.randint(0, 40)]
                ids = [*ids, *(rng.randrange(3, 384) for _ in range(rng.randint(1, 20)))]
                request = runner.add(
                    ids,
                    priority=rng.randint(0, 1),
                    deadline=rng.choice([None, None, None, runner.now + rng.randint(0, 60)]),
                    salt=rng.choice(["", "", "x"]),
                    pool=rng.choice([None] * 8 + ["last", "mean"]),
                    n=rng.choice([1, 1, 1, 3]),
                    max_tokens=rng.randint(0, 60),
                    prompt_logprobs=rng.choice([None, None, 0]),
                    stop_token_ids=[rng.randrange(384) for _ in range(8)],
                )
                live.append(request)
                everything.append(request)
            if live and rng.random() < 0.03:
                victim = live.pop(rng.randrange(len(live)))
                aborted.add(victim.id)
                runner.scheduler.abort(victim)
            if rng.random() < 0.002:
                runner.executor.fail_at = len(runner.executor.batches) + 1
            runner.scheduler.step()
            steps += 1
            cache = runner.scheduler.kv_cache
            assert cache.num_free + cache.num_used + cache.num_cached == cache.num_blocks
        runner.run()
        runner.assert_empty()
        preemptions += runner.scheduler.statistics.preemptions
        hits += runner.scheduler.statistics.prefix_hits
        for request in everything:
            for sequence in request.sequences:
                assert sequence.finish_reason is not None
                assert "Assert" not in (sequence.error or "")
                expired += sequence.finish_reason is FinishReason.TIMEOUT
                history = tuple(request.prompt)
                for token in sequence.tokens[len(history) :]:
                    assert token == int(model(history).argmax())
                    history += (token,)
    assert preemptions > 10
    assert hits > 100
    assert expired > 20
