"""The device chooses tokens: those that the host would choose, and nothing else comes back."""

import dataclasses
from typing import Any

import numpy as np
import pytest
from driver import counts, fake_gpu
from emulated import CONFIG, Built, EmulatedDevice

from llmc import LLM, SamplingParams
from llmc.compiler.cuda.build import kernels_of
from llmc.runtime import scheduler
from llmc.runtime.batch import Chosen
from llmc.runtime.chunk import Chunk
from llmc.runtime.device_draws import draws_of
from llmc.runtime.devices.cuda.draws import MOST_CHANGES
from llmc.runtime.request import Request
from llmc.runtime.sampling import NONE_ALLOWED, NOT_FINITE, Sampler
from llmc.runtime.speculative.base import Tree

SIZE, MOST = CONFIG.vocab_size, (MOST_CHANGES, 8)
DEVICE: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"seed": 1},
    {"seed": 2, "temperature": 0.7, "top_k": 20},
    {"seed": 3, "temperature": 1.5, "top_p": 0.8, "min_p": 0.02, "presence_penalty": 0.6, "frequency_penalty": 0.3},
    {"seed": 4, "repetition_penalty": 1.4, "logit_bias": {5: 4.0, 9: -100.0}},
    {"temperature": 0, "min_tokens": 4, "logit_bias": {2: 50.0}},
)
HOST: tuple[dict[str, Any], ...] = ({"temperature": 0, "logprobs": 2}, {"seed": 6, "prompt_logprobs": 1})


def prompts(count: int) -> list[list[int]]:
    return [np.random.default_rng(i).integers(3, SIZE, 4 + 3 * i).tolist() for i in range(count)]


def answers(llm: LLM, settings: tuple[dict[str, Any], ...]) -> list[Any]:
    params = [SamplingParams(max_tokens=6, **values) for values in settings]
    return [
        (list(c.token_ids), c.finish_reason) for out in llm.generate(prompts(len(params)), params) for c in out.choices
    ]


def test_the_tokens_that_the_host_would_choose(built: Built, emulated: list[EmulatedDevice]) -> None:
    llm = LLM(built.engine.path, check=True)
    found = answers(llm, (*DEVICE, *HOST))
    (device,) = emulated
    assert device.waits == llm.scheduler.statistics.steps
    llm.scheduler._device = None  # as with an executor that only gives logits
    assert answers(llm, (*DEVICE, *HOST)) == found
    assert "sample_rows_f32" in device.names


class Alternating:
    """A constraint: ids that leave the right rest by three, below 128; an end from two tokens on, at four for sure."""

    def __init__(self, count: int = 0) -> None:
        self.count = count

    def mask(self) -> np.ndarray:
        return np.packbits(np.arange(128) % 3 == self.count % 3, bitorder="little").view(np.uint32)

    def accept(self, token: int) -> None:
        assert token % 3 == self.count % 3 and token < 128
        self.count += 1

    @property
    def is_complete(self) -> bool:
        return self.count >= 2

    @property
    def is_finished(self) -> bool:
        return self.count >= 4

    def clone(self) -> Any:
        return Alternating(self.count)


class Text:
    """In which some tokens would complete a bad word."""

    text = ""

    def __init__(self, bad: set[int]) -> None:
        self.bad = bad

    def would_contain(self, token: int, words: Any) -> bool:
        return token in self.bad

    def append(self, token: int, *, may_stop: bool) -> None:
        return None

    def flush(self) -> None:
        return None

    def end(self, token: int | None) -> None:
        return None

    def take(self) -> str:
        return ""


def test_masks_and_bad_words(built: Built, emulated: list[EmulatedDevice]) -> None:
    """Ruled out on the device; a word that several tokens make is found by the host, and chosen anew for."""
    settings: tuple[dict[str, Any], ...] = (*DEVICE[1:4], {"temperature": 0}, {"seed": 9, "top_k": 3})

    def run(llm: LLM, banned: Any) -> list[Any]:
        llm.scheduler._sampler._banned = banned
        requests = []
        for number, (values, prompt) in enumerate(zip(settings, prompts(len(settings)), strict=True)):
            params, rule = SamplingParams(max_tokens=4, **values), None if number % 2 else Alternating()
            requests.append(llm.request(llm.add_request(prompt, params, constraint=rule)))
            words = ("x",) if number % 3 else ()  # for which an engine without texts would not be asked
            requests[-1].params = dataclasses.replace(params, bad_words=words)
            requests[-1].sequences[0].text = Text(set(range(number % 4, SIZE, 4)))  # type: ignore[assignment]
        while llm.has_unfinished:
            llm.step()
        return [(r.sequences[0].tokens, r.sequences[0].finish_reason, r.sequences[0].error) for r in requests]

    llm = LLM(built.engine.path, check=True, prefix_cache=False)
    banned: Any = lambda words: np.arange(5, SIZE, 7)  # noqa: E731
    found = run(llm, banned)
    (device,) = emulated
    assert "adjust_rows_f32" in device.names
    anew = device.waits - llm.scheduler.statistics.steps
    assert 0 < anew < 6 * len(settings)
    llm.scheduler._device = None
    assert run(llm, banned) == found
    nothing: Any = lambda words: np.arange(SIZE)  # noqa: E731
    llm.scheduler._device = llm.executor  # type: ignore[assignment]
    found = run(llm, nothing)
    assert NONE_ALLOWED in [error for _, _, error in found]
    llm.scheduler._device = None
    assert run(llm, nothing) == found


def test_one_wait_for_a_step_and_only_tokens_come_back(built: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = built.engine
    kernels = kernels_of(engine.plan, engine.limits, engine.kv_cache, 90)
    with fake_gpu([kernel for name, kernel in kernels.items() if name != "move_positions"], mode="plain") as gpu:
        llm = LLM(engine.path)
        fetched: list[int] = []
        device = llm.executor.device  # type: ignore[attr-defined]
        calls: list[str] = []
        fetch, sync, run, replay = device.fetch, device.sync, device.run, device.replay
        device.fetch = lambda data, address: (fetched.append(data.nbytes), fetch(data, address))
        device.sync = lambda: (calls.append("wait"), sync())
        device.run = lambda launches: (calls.append("run"), run(launches))
        device.replay = lambda graph: (calls.append("run"), replay(graph))
        given = scheduler.draws_of
        monkeypatch.setattr(scheduler, "draws_of", lambda *a, **b: (calls.append("prepare"), given(*a, **b))[1])
        before = counts(gpu)
        llm.generate(prompts(3), SamplingParams(max_tokens=4, temperature=0))
        steps, after = llm.scheduler.statistics.steps, counts(gpu)
        assert after["waits"] - before["waits"] == steps
        assert after["copies"] - before["copies"] == 3 * steps  # the batch, what is drawn with, tokens
        assert fetched == [8 * 3] * steps
        assert after["bytes"] == before["bytes"], "nothing is allocated by steps"
        assert after["graphs"] > 0
        decodes = " ".join(calls).removeprefix("run prepare run wait ").replace("run run", "run")  # a graph is recorded
        assert decodes == " ".join(["run prepare run wait"] * (steps - 1)), (
            "the host prepares while the device computes"
        )
        llm.close()


def sequence(**values: Any) -> Any:
    """One with a prompt of four tokens, and two that came."""
    request = Request(0, [7, 8, 9, 8], SamplingParams(**values), 10, frozenset({2}))
    found = request.sequences[0]
    for token in (8, 30):
        found.append(token, None)
    return found


def test_rows_that_a_device_can_do() -> None:
    device, host = sequence(temperature=0), sequence(temperature=0, logprobs=1)
    changed = sequence(seed=3, frequency_penalty=0.5, min_tokens=5, logit_bias={2: 3.0, 40: 1.0})
    tree = Tree((5, 6, 7), (-1, -1, 0))
    chunks = [
        Chunk(device, 0, 3, 5),  # a part of a prompt: no row
        Chunk(host, 5, 6, 5),
        Chunk(changed, 5, 6, 5),
        Chunk(device, 5, 6, 5, tree),
        Chunk(changed, 5, 6, 5, tree),
    ]
    draws = draws_of(chunks, SIZE, MOST, Sampler(), exact=True)
    assert draws is not None
    assert draws.wanted.tolist() == [False, True, *[True] * 4, *[False] * 4]
    assert draws.bounds.tolist() == [0, 0, 4, *[4] * 8]
    assert draws.ids.tolist() == [2, 8, 30, 40]
    assert draws.penalties.tolist() == [0, 0.5, 0.5, 0]
    assert draws.biases.tolist() == [-np.inf, 0, 0, 1]
    cramped = draws_of(chunks, SIZE, (3, 8), Sampler(), exact=True)
    assert cramped is not None and not cramped.wanted[1]
    loose = draws_of(chunks, SIZE, MOST, Sampler(), exact=False)
    assert loose is not None and loose.wanted.tolist() == [False, True, *[False] * 8]
    assert draws_of(chunks[:2], SIZE, MOST, Sampler(), exact=True) is None


def test_random_numbers_are_those_of_places() -> None:
    """Of a tree's rows: of the place that a token below has."""
    drawn = sequence(seed=11)
    tree = Tree((5, 6, 7), (-1, 0, 0))
    draws = draws_of([Chunk(drawn, 5, 6, 5, tree)], SIZE, MOST, Sampler(), exact=True)
    assert draws is not None
    rows = np.random.default_rng(1).standard_normal((4, SIZE)).astype(np.float32)
    sampler = Sampler()
    from llmc.runtime.sampling import sample_token

    for row, later in ((0, []), (1, [5]), (2, [5, 6]), (3, [5, 7])):
        expected = sequence(seed=11)
        for token in later:
            expected.append(token, None)
        token = sample_token(rows[row], expected.request.params, draws.draws[row])
        assert sampler.sample_row(rows[row], expected).token == token


def test_rows_without_a_token() -> None:
    scores = np.array([1.0, np.nan, np.inf, -np.inf], np.float32)
    chosen = Chosen(np.ones(4, bool), np.array([3, 1, 2, 0], np.int32), scores, lambda *_: (0, 0.0))
    plain, sampler = sequence(), Sampler()
    assert sampler.take(chosen, 0, plain).token == 3
    assert [sampler.take(chosen, i, plain).error for i in (1, 2, 3)] == [NOT_FINITE, NOT_FINITE, NONE_ALLOWED]
