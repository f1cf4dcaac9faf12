"""Drafts change no token, no log-probability and no reason to end, whatever they are."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from drafts import Oracle

from llmc.runtime.request import Request, SamplingParams
from llmc.runtime.sampling import Sampler
from llmc.runtime.scheduler import Scheduler
from llmc.runtime.speculative.base import Proposer, Query, Tree
from llmc.runtime.speculative.ngram import NgramProposer
from llmc.runtime.speculative.speculator import Speculator


class Runner:
    def __init__(self, kit: Any, proposer: Proposer | None, **sizes: Any) -> None:
        self.config = kit.config(**sizes)
        self.executor = kit.PagedExecutor(kit.hashed, self.config)
        self.speculator = None
        if proposer is not None:
            self.speculator = Speculator(proposer, self.executor, vocab_size=kit.VOCAB, nodes=6)
        self.scheduler = Scheduler(self.executor, Sampler(), self.config, speculator=self.speculator)
        self.executor.poisons(self.scheduler.kv_cache)

    def run(self, cases: list[tuple[int, list[int], dict[str, Any]]]) -> list[Any]:
        """Each is added before the step that it names."""
        requests, waiting, step = [], sorted(cases, key=lambda case: case[0]), 0
        while waiting or self.scheduler.has_work:
            while waiting and waiting[0][0] <= step:
                _, prompt, params = waiting.pop(0)
                number = len(requests)
                requests.append(Request(number, prompt, SamplingParams(**params), params["max_tokens"], frozenset([2])))
                self.scheduler.add(requests[-1])
            self.scheduler.step()
            step += 1
        cache = self.scheduler.kv_cache
        assert (cache.num_available, cache.num_used) == (cache.num_blocks, 0)
        return [
            (s.tokens, s.logprobs, s.finish_reason, s.stop_reason, s.error, s.cumulative_logprob)
            for request in requests
            for s in request.sequences
        ]


def some_case(rng: random.Random) -> tuple[int, list[int], dict[str, Any]]:
    length = rng.choice([1, 2, 15, 16, 17, 40, 100])
    prompt = [rng.randrange(3, 384) for _ in range(length)]
    if rng.random() < 0.3:
        prompt = (prompt * 5)[: length + 20]
    greedy = rng.random() < 0.5
    params: dict[str, Any] = {"max_tokens": rng.randrange(1, 40), "seed": rng.randrange(100)}
    if not greedy:
        params |= {"temperature": rng.choice([0.5, 1.0]), "top_p": rng.choice([1.0, 0.8]), "n": rng.choice([1, 1, 3])}
    if rng.random() < 0.3:
        params |= {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "logprobs": 2}
    if rng.random() < 0.3:
        params |= {"stop_token_ids": [rng.randrange(384) for _ in range(30)]}
        params["min_tokens"] = rng.randrange(params["max_tokens"] + 1)
    if rng.random() < 0.2:
        params["logit_bias"] = {rng.randrange(384): 5.0, 17: -100.0}
    if rng.random() < 0.1:
        params["prompt_logprobs"] = 1
    return rng.randrange(12), prompt, params


@pytest.mark.parametrize("seed", range(12))
def test_random_mixes(kit: Any, seed: int) -> None:
    """Chunks, preemption, prefix cache, penalties, limits, choices; drafts right and wrong."""
    rng = random.Random(seed)
    cases = [some_case(rng) for _ in range(10)]
    expected = Runner(kit, None, num_blocks=1024, max_batch_tokens=512, max_logit_rows=64).run(cases)
    oracle = Oracle(kit.hashed, seed)
    sizes = {"num_blocks": rng.choice([12, 16, 256]), "max_batch_tokens": rng.choice([16, 40, 64])}
    runner = Runner(kit, oracle, prefix_cache=bool(seed % 3), max_logit_rows=rng.choice([16, 40]), **sizes)
    assert runner.run(cases) == expected
    assert not oracle.known, "proposers are told of all that end"
    assert runner.speculator.acceptance.accepted > 0


def test_as_many_moves_as_tokens_that_were_accepted_out_of_place(kit: Any) -> None:
    class Fork(Proposer):
        """A wrong token and a right one, three times."""

        name = "fork"
        open = None

        def propose(self, queries: list[Query]) -> list[Tree]:
            trees = []
            for query in queries:
                tokens, path = [], list(query.sequence.tokens)
                for _ in range(3):
                    right = int(kit.hashed(tuple(path)).argmax())
                    tokens += [(right + 1) % 384, right]
                    path.append(right)
                trees.append(Tree(tuple(tokens), (-1, -1, 1, 1, 3, 3)))
            return trees

    Fork.__abstractmethods__ = frozenset()
    runner = Runner(kit, Fork())
    ((tokens, *_),) = runner.run([(0, [5, 6, 7], {"max_tokens": 13})])
    acceptance = runner.speculator.acceptance
    assert len(tokens) == 16
    assert acceptance.to_json() | {"steps": 3, "accepted": 9, "by_position": [1.0, 1.0, 1.0]} == acceptance.to_json()
    assert runner.executor.moved == 9
    assert len(runner.executor.batches) == 4
    assert runner.scheduler.statistics.steps == 4


def test_spc_06_the_first_draft_is_verified(kit: Any) -> None:
    def run(proposer: Proposer | None) -> Any:
        return Runner(kit, proposer).run([(0, [1, 1, 1], {"max_tokens": 9}), (0, [4, 5] * 9, {"max_tokens": 30})])

    assert run(NgramProposer()) == run(None)


@pytest.mark.parametrize("max_tokens", range(1, 12))
def test_spc_07_limits_and_logprobs_are_exact(kit: Any, max_tokens: int) -> None:
    oracle = Oracle(kit.hashed, 0, right=1.0)
    ((tokens, logprobs, reason, *_),) = Runner(kit, oracle).run(
        [(0, [5, 6, 7], {"max_tokens": max_tokens, "logprobs": 1})]
    )
    assert (len(tokens) - 3, len(logprobs), reason) == (max_tokens, max_tokens, "length")


def test_spc_07_drafts_do_not_exceed_the_context(kit: Any) -> None:
    sizes = {"max_seq_len": 40, "num_blocks": 64}
    case = (0, list(range(3, 33)), {"max_tokens": 100, "ignore_eos": True})
    runner = Runner(kit, Oracle(kit.hashed, 1, right=1.0), **sizes)
    (found,) = runner.run([case])
    assert found == Runner(kit, None, **sizes).run([case])[0]
    assert len(found[0]) == 40
    assert max(int(batch.position_ids.max()) for batch in runner.executor.batches) < 39


def test_kv_01_prefix_cache_and_drafts(kit: Any) -> None:
    prompt = np.random.default_rng(0).integers(3, 20, 64).tolist()
    cases = [(9 * i, prompt, {"max_tokens": 24}) for i in range(5)]
    plain = Runner(kit, None, prefix_cache=False).run(cases)
    runner = Runner(kit, NgramProposer())
    assert runner.run(cases) == plain
    assert runner.scheduler.statistics.prefix_hits > 0


def test_kv_06_a_pool_in_which_the_requests_just_fit(kit: Any) -> None:
    cases = [(0, [10 * i + 3] * 16, {"max_tokens": 16}) for i in range(4)]
    for blocks in (8, 5):
        runner = Runner(kit, Oracle(kit.hashed, 3, right=0.9), num_blocks=blocks)
        assert runner.run(cases) == Runner(kit, None).run(cases)
        assert runner.speculator.acceptance.accepted > 0
        assert (runner.scheduler.statistics.preemptions > 0) == (blocks == 5)


def test_kv_11_no_draft_in_a_pool_that_is_full(kit: Any) -> None:
    prompt = np.random.default_rng(1).integers(3, 384, 31).tolist()
    cases = [(0, prompt, {"max_tokens": 2}), (9, prompt, {"max_tokens": 17})]
    runner = Runner(kit, Oracle(kit.hashed, 4, right=1.0), num_blocks=3)
    assert runner.run(cases) == Runner(kit, None).run(cases)
    assert runner.scheduler.statistics.prefix_hits == 16


def test_a_proposer_that_fails_fails_only_its_step(kit: Any) -> None:
    class Broken(NgramProposer):
        def propose(self, queries: list[Query]) -> list[Tree]:
            raise RuntimeError("no idea")

    ((_, _, reason, _, error, _),) = Runner(kit, Broken()).run([(0, [5, 6], {"max_tokens": 5})])
    assert (reason, error) == ("error", "RuntimeError: no idea")


def test_proposers_that_want_rows_are_asked_only_where_there_are_some(kit: Any) -> None:
    """A prompt of one token decodes in its first step, before anything was computed."""

    class Wants(Oracle):
        wants_hidden = True

        def propose(self, queries: list[Query]) -> list[Tree]:
            assert all(query.hidden is not None and len(query.hidden) for query in queries)
            return super().propose(queries)

    cases: list[Any] = [(0, [5], {"max_tokens": 12}), (1, [7, 8, 9], {"max_tokens": 12})]
    runner = Runner(kit, Wants(kit.hashed, 3))
    assert runner.run(cases) == Runner(kit, None).run(cases)
    assert runner.speculator.acceptance.accepted > 0
