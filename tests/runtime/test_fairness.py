"""Who waits how long, counted in steps; and what ends by its deadline."""

from __future__ import annotations

import math
from typing import Any

import pytest

from llmc.errors import RequestError
from llmc.runtime.request import OVERTAKEN, FinishReason, SamplingParams
from llmc.runtime.scheduler import LONG_SHARE


def params(count: int) -> SamplingParams:
    return SamplingParams(max_tokens=count, ignore_eos=True)


def ids(seed: int, length: int) -> list[int]:
    return [3 + (seed * 7919 + i * 31) % 380 for i in range(length)]


def steps_to_first_token(llm: Any, wanted: set[int], limit: int = 200) -> dict[int, int]:
    """For each request the number of the step that gave its first token."""
    first: dict[int, int] = {}
    for number in range(1, limit):
        for delta in llm.step():
            if delta.request_id in wanted and delta.token_ids:
                first.setdefault(delta.request_id, number)
        if set(first) == wanted:
            return first
    raise AssertionError(f"only {first} of {wanted} after {limit} steps")


def test_decodes_get_a_token_in_every_step(kit: Any) -> None:
    """Inter-token latency is one step, whatever prompts come in."""
    llm = kit.llm(max_batch_tokens=32, max_seq_len=512, num_blocks=400)
    running = {llm.add_request(ids(i, 5), params(40)) for i in range(6)}
    while any(llm.request(r).sequences[0].num_generated == 0 for r in running):
        llm.step()
    for step in range(30):
        llm.add_request(ids(100 + step, 300), params(5))
        got = {d.request_id: len(d.token_ids) for d in llm.step()}
        assert all(got.get(r) == 1 for r in running)


def test_the_oldest_prompt_gets_its_share(kit: Any) -> None:
    """Time to first token of the oldest prompt: its length over LONG_SHARE of what 4 decodes leave of a step."""
    budget, decodes, length = 32, 4, 400
    llm = kit.llm(max_batch_tokens=budget, num_blocks=400)
    running = [llm.add_request(ids(i, 3), params(100)) for i in range(decodes)]
    while any(llm.request(r).sequences[0].num_generated == 0 for r in running):
        llm.step()
    long = llm.add_request(ids(50, length), params(3))
    for i in range(20):
        llm.add_request(ids(60 + i, 200), params(3))
    bound = math.ceil(length / math.ceil(LONG_SHARE * (budget - decodes)))
    assert steps_to_first_token(llm, {long})[long] <= bound


def test_a_short_prompt_passes_a_long_one(kit: Any) -> None:
    llm = kit.llm(max_batch_tokens=64, num_blocks=400)
    long = llm.add_request(ids(0, 500), params(2))
    short = llm.add_request(ids(1, 12), params(2))
    first = steps_to_first_token(llm, {long, short})
    assert first[short] == 1
    assert first[long] == math.ceil((500 - (64 - 12) - (64 - 1)) / 64) + 2  # it gets what the short one leaves


def test_a_long_prompt_is_not_starved_by_short_ones(kit: Any) -> None:
    llm = kit.llm(max_batch_tokens=32, num_blocks=400, max_sequences=8)
    long = llm.add_request(ids(0, 400), params(1))
    for step in range(1, 100):
        for i in range(3):
            llm.add_request(ids(step * 3 + i, 10), params(1))
        if any(d.request_id == long and d.token_ids for d in llm.step()):
            break
    assert step <= math.ceil(400 / (LONG_SHARE * 32))


def test_priorities_age(kit: Any) -> None:
    """A request waits for OVERTAKEN later ones of a priority that is better by one, and for no more."""
    llm = kit.llm(max_sequences=1, num_blocks=8)
    patient = llm.add_request(ids(0, 3), params(1), priority=1)
    urgent = [llm.add_request(ids(1, 3), params(1)) for _ in range(OVERTAKEN + 3)]
    order = []
    while llm.has_unfinished:
        order += [d.request_id for d in llm.step() if d.finish_reason]
    assert order.index(patient) == OVERTAKEN - 1  # ties go to the older one
    assert [r for r in order if r != patient] == urgent


def timed(kit: Any, **sizes: Any) -> tuple[Any, list[float]]:
    llm, now = kit.llm(**sizes), [100.0]
    llm.scheduler._clock = lambda: now[0]
    return llm, now


def test_lif_07_what_is_late_ends_at_once(kit: Any) -> None:
    llm, _ = timed(kit)
    llm.add_request([5], params(3), deadline=99.0)
    (delta,) = llm.step()
    assert (delta.finish_reason, delta.error, delta.token_ids) == (FinishReason.TIMEOUT, "timeout", ())
    assert not llm.has_unfinished
    assert llm.scheduler.statistics.steps == 0


@pytest.mark.parametrize("state", ["waiting", "prompt", "decode"])
def test_a_deadline_frees_everything_in_any_state(kit: Any, state: str) -> None:
    llm, now = timed(kit, max_batch_tokens=16, max_sequences=2, prefix_cache=False)
    others = [llm.add_request(ids(9, 5), params(30))]
    if state == "waiting":
        others.append(llm.add_request(ids(8, 5), params(30)))
    late = llm.add_request(ids(0, 60 if state == "prompt" else 5), params(100), deadline=101.0)
    llm.step()
    llm.step()
    request = llm.request(late)
    assert (request.sequences[0].table is None) == (state == "waiting")
    now[0] = 101.0
    ends = {d.request_id: d.finish_reason for d in llm.step()}
    assert ends[late] is FinishReason.TIMEOUT
    assert request.sequences[0].table is None
    while llm.has_unfinished:
        ends.update({d.request_id: d.finish_reason for d in llm.step()})
    assert all(ends[other] is FinishReason.LENGTH for other in others)
    assert llm.scheduler.kv_cache.num_free == llm.scheduler.kv_cache.num_blocks


def test_lif_04_more_clients_than_slots(kit: Any) -> None:
    """4 slots, 64 requests of which some are cancelled: all others end."""
    llm = kit.llm(max_sequences=4, num_blocks=12)
    wanted = [llm.add_request(ids(i, 5 + i), params(8)) for i in range(64)]
    ends: dict[int, Any] = {}
    for step in range(2000):
        if not llm.has_unfinished:
            break
        if step % 7 == 0 and len(wanted) > step // 7 * 3:
            llm.abort(wanted[step // 7 * 3])
        ends.update({d.request_id: d.finish_reason for d in llm.step() if d.finish_reason})
    assert not llm.has_unfinished
    assert len(ends) >= 40
    assert set(ends.values()) == {FinishReason.LENGTH}


def test_lif_09_cancelling_one_that_waits(kit: Any) -> None:
    llm = kit.llm(max_sequences=1)
    first, second, third, fourth = (llm.add_request(ids(i, 5), params(3)) for i in range(4))
    llm.step()
    llm.abort(third)
    order = []
    while llm.has_unfinished:
        order += [d.request_id for d in llm.step() if d.finish_reason]
    assert order == [first, second, fourth]
    prompts = {tuple(b.input_ids[:5].tolist()) for b in llm.executor.batches}
    assert tuple(ids(2, 5)) not in prompts


def test_options_are_checked(kit: Any) -> None:
    llm = kit.llm()
    for options, message in (
        ({"priority": True}, "priority: expected a whole number"),
        ({"deadline": "soon"}, "deadline: expected seconds"),
        ({"salt": 5}, "salt: expected a text"),
        ({"adapter": "x"}, "adapter: there is no adapter 'x'"),
    ):
        with pytest.raises(RequestError, match=message):
            llm.add_request([5], **options)
    assert not llm.has_unfinished


def test_counts(kit: Any) -> None:
    llm = kit.llm(max_sequences=2)
    for i in range(3):
        llm.add_request(ids(i, 20), params(5))
    llm.step()
    counts = llm.counts
    assert {k: counts[k] for k in ("running", "waiting", "kv_used", "kv_cached", "kv_total", "steps")} == {
        "running": 2,
        "waiting": 1,
        "kv_used": 4,
        "kv_cached": 0,
        "kv_total": 256,
        "steps": 1,
    }


@pytest.mark.parametrize("budget", [5, 64])
def test_embeddings_beside_generation(kit: Any, budget: int) -> None:
    """With the fake executor the rows are the logits."""
    llm = kit.llm(max_batch_tokens=budget, max_sequences=4)
    llm.add_request(ids(0, 9), params(20))
    prompt = ids(1, 40)
    rows = [kit.hashed(tuple(prompt[: i + 1])) for i in range(40)]
    (last,) = llm.embed([prompt])
    (mean,) = llm.embed([prompt], "mean")
    assert (last == rows[-1]).all()
    assert mean == pytest.approx(sum(r.astype(float) for r in rows) / 40, abs=1e-6)
    assert (kit.llm().embed(prompt, "mean")[0] == mean).all()
    with pytest.raises(RequestError, match="pooling: 'cls' is not one of last, mean"):
        llm.embed([prompt], "cls")
    assert llm.has_unfinished
