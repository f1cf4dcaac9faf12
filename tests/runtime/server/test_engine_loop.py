"""The thread that owns the engine: failures of steps, an engine that is broken, one that is stuck."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from llmc.errors import KernelError
from llmc.runtime.output import Delta
from llmc.runtime.request import SamplingParams
from llmc.runtime.server.engine_loop import MAX_FAILED_STEPS, EngineLoop
from llmc.runtime.server.errors import ApiError
from llmc.runtime.server.job import Job, Ticket, TicketOptions
from llmc.runtime.server.metrics import Metrics


def run(llm: Any, work: Callable[[EngineLoop, Callable[..., Job]], Coroutine[Any, Any, None]]) -> list[str]:
    """Run the work with a loop around the LLM; what the loop reports at its end."""
    failures: list[str] = []

    async def main() -> None:
        loop = EngineLoop(llm, asyncio.get_running_loop(), 8, lambda: failures.append("failed"))

        def submit(prompt: list[int], streams: bool = True, priority: int = 0, **params: Any) -> Job:
            now = asyncio.get_running_loop().time()
            job = Job(Metrics(), loop.abort, now + 60, now + 60)
            values = {"max_tokens": 6, "ignore_eos": True} | params
            options = TicketOptions(streams=streams, priority=priority)
            job.tickets.append(Ticket(job, 0, prompt, SamplingParams(**values), options))
            loop.submit(job)
            return job

        try:
            await work(loop, submit)
        finally:
            await loop.stop()

    asyncio.run(main())
    return failures


async def text(job: Job) -> str:
    return "".join([delta.text async for _, delta in job.deltas()])


@pytest.mark.parametrize(
    "failure", [RuntimeError("launch failed"), MemoryError(), KernelError("llmc::norm: launch failed")], ids=repr
)
def test_api_03_a_step_that_fails_ends_only_its_own_requests(kit: Any, failure: Exception) -> None:
    """R11: a launch that fails, no memory in one step, a kernel that refuses."""
    llm = kit.llm(kit.scripted({(7,): kit.ids("abcdef"), (8,): kit.ids("uvwxyz")}))

    async def work(loop: EngineLoop, submit: Callable[..., Job]) -> None:
        llm.executor.fail_at, llm.executor.failure = 3, failure
        first = submit([7])
        await first.begun()
        with pytest.raises(ApiError) as caught:
            await text(first)
        assert caught.value.status == 500 and "launch" not in caught.value.message
        assert await text(submit([8])) == "uvwxyz"
        (result,) = await submit([8], streams=False).results()
        assert result.text == "uvwxyz"
        assert loop.is_alive(60) and loop.idle

    assert run(llm, work) == []


def test_mth_13_numbers_that_are_not_finite_are_an_error_of_their_request(kit: Any) -> None:
    def model(history: tuple[int, ...]) -> Any:
        return kit.one_hot(7) * (float("nan") if history[0] == 9 else 1)

    async def work(loop: EngineLoop, submit: Callable[..., Job]) -> None:
        good, bad = submit([8], streams=False), submit([9], streams=False)
        with pytest.raises(ApiError, match="not finite"):
            await bad.results()
        assert len((await good.results())[0].token_ids) == 6

    assert run(kit.llm(model), work) == []


def test_who_is_in_no_hurry_lets_others_go_first(kit: Any) -> None:
    llm = kit.llm(max_sequences=1)
    step, ended = llm.step, []

    def noted() -> list[Delta]:
        """The order is the thread's: the event loop may see several ends at once."""
        deltas: list[Delta] = step()
        ended.extend(delta.request_id for delta in deltas if delta.finish_reason is not None)
        return deltas

    llm.step = noted

    async def work(loop: EngineLoop, submit: Callable[..., Job]) -> None:
        loop.pause(True)
        jobs = {p: submit([8], streams=False, priority=p) for p in (3, 0, 1)}
        loop.pause(False)
        await asyncio.gather(*(job.results() for job in jobs.values()))
        assert ended == [jobs[p].tickets[0].request_id for p in (0, 1, 3)]

    assert run(llm, work) == []


def test_an_engine_that_fails_again_and_again_is_given_up(kit: Any) -> None:
    """R11: all its requests end, and the server is told to exit."""
    llm = kit.llm()

    def fail(batch: Any) -> Any:
        raise RuntimeError("the device is gone: /secret/path")

    llm.executor.step = fail

    async def work(loop: EngineLoop, submit: Callable[..., Job]) -> None:
        for _ in range(MAX_FAILED_STEPS):
            job = submit([7])
            with pytest.raises(ApiError) as caught:
                await text(job)
            assert "secret" not in caught.value.message
        await asyncio.to_thread(loop._thread.join, 30)
        await asyncio.sleep(0.01)
        assert loop.failed and not loop.is_alive(60)

    assert run(llm, work) == ["failed"]


def test_a_step_that_hangs_is_noticed(kit: Any) -> None:
    """R9: the loop has not turned."""
    llm, release = kit.llm(), threading.Event()
    step = llm.executor.step
    llm.executor.step = lambda batch: (release.wait(30), step(batch))[1]

    async def work(loop: EngineLoop, submit: Callable[..., Job]) -> None:
        job = submit([7], streams=False)
        assert loop.is_alive(60)
        while loop.is_alive(0.2):
            await asyncio.sleep(0.05)
        release.set()
        await job.results()
        while not loop.is_alive(1.5):
            await asyncio.sleep(0.05)

    assert run(llm, work) == []


def test_lif_09_a_queued_request_that_is_aborted_never_runs(kit: Any) -> None:
    llm = kit.llm(max_sequences=1)

    async def work(loop: EngineLoop, submit: Callable[..., Job]) -> None:
        jobs = [submit([7 + i], max_tokens=50, streams=False) for i in range(4)]
        jobs[2].close()
        done = [await jobs[i].results() for i in (0, 1, 3)]
        assert [len(outputs[0].token_ids) for outputs in done] == [50] * 3
        assert loop.idle and jobs[2].outputs == []
        assert 9 not in {int(batch.input_ids[0]) for batch in llm.executor.batches if batch.position_ids[0] == 0}
        assert llm.counts["kv_used"] == 0

    assert run(llm, work) == []


@pytest.mark.parametrize("delay", [0, 0.001, 0.003, 0.01, 0.03])
def test_aborts_at_any_moment_free_everything(kit: Any, delay: float) -> None:
    llm = kit.llm(max_batch_tokens=16)

    async def work(loop: EngineLoop, submit: Callable[..., Job]) -> None:
        for length in (1, 40, 200):
            jobs = [submit([7] * (length + i), max_tokens=100, n=1 + i % 2) for i in range(5)]
            await asyncio.sleep(delay)
            for job in jobs:
                job.close()
            while not loop.idle:
                await asyncio.sleep(0.001)
            assert llm.counts["kv_used"] == llm.counts["running"] == llm.counts["waiting"] == 0

    assert run(llm, work) == []


def test_bat_12_two_lists_of_prompts_at_once(live: Any) -> None:
    body = {"prompt": ["m", "z"], "temperature": 0, "max_tokens": 3}
    with ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(lambda _: live.post("/v1/completions", body), range(2)))
    assert [answer.status_code for answer in answers] == [200, 200]
    first, second = (answer.json()["choices"] for answer in answers)
    assert [choice["index"] for choice in first] == [0, 1]
    assert first[0]["text"] == "no"
    assert first == second
