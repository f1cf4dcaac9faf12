"""Drafts pay for themselves: many where rows are free and drafts right, none where a step is bound by arithmetic."""

from __future__ import annotations

from itertools import accumulate, cycle
from typing import Any

import numpy as np
import pytest

from llmc.runtime.request import FinishReason, Request, SamplingParams, Sequence
from llmc.runtime.speculative.control import PLAIN_AFTER, PROBE, PROBE_AFTER, Controller
from llmc.runtime.speculative.step_cost import StepCost


def sequences(count: int) -> list[Sequence]:
    return [Request(i, [5], SamplingParams(), 50).sequences[0] for i in range(count)]


def controller(row: float, *, pairs: bool = False) -> Controller:
    """One that knows steps of 1 second, and a second times ``row`` for each row."""
    made = Controller(pairs=pairs)
    for rows in (1, 2, 4, 8, 16, 32, 64, 128):
        for _ in range(50):
            made.cost.add(rows, 1 + row * rows)
    made.proposed(1, 0.0)
    return made


def test_cost_is_interpolated_and_never_falls() -> None:
    cost = StepCost()
    assert cost.at(33) == pytest.approx(cost.at(1) * 65 / 33)
    for _ in range(60):
        cost.add(4, 2.0)
        cost.add(16, 8.0)
        cost.add(64, 5.0)  # cannot be: fewer rows took longer
    assert cost.at(4) == pytest.approx(2)
    assert cost.at(10) == pytest.approx(4.25)
    assert cost.at(16) == cost.at(64) == pytest.approx(6.5)
    assert cost.at(2) < 2 < cost.at(5) < cost.at(15) < cost.at(200)
    for _ in range(10):
        cost.add(4, 1000.0)
    assert cost.at(4) == pytest.approx(2)
    cost.add(66, 9.0)
    assert cost.at(64) == pytest.approx(6.5) and cost.at(66) == pytest.approx(9)  # a size of its own


@pytest.mark.parametrize(("row", "least", "most"), [(0.001, 8, 16), (0.05, 3, 12), (1.0, 0, 8), (20.0, 0, 0)])
def test_more_where_rows_are_cheap(row: float, least: int, most: int) -> None:
    chosen = controller(row)
    (one,) = sequences(1)
    for _ in range(20):
        chosen.learn(one, 8, 8, 7)
    (nodes,) = chosen.sizes([one], [16], 1)
    assert least <= nodes <= most


def test_nothing_in_a_batch_that_is_bound_by_arithmetic() -> None:
    chosen, many = controller(0.2), sequences(64)
    for sequence in many:
        chosen.learn(sequence, 4, 4, 2)
    assert chosen.sizes(many[:1], [8], 1) > [0]
    assert chosen.sizes(many, [8] * 64, 64) == [0] * 64


def test_what_is_never_right_is_probed_now_and_then() -> None:
    chosen = controller(0.05)
    good, bad = sequences(2)
    sizes = []
    for _ in range(100):
        nodes = chosen.sizes([good, bad], [8, 8], 2, waiting=2)
        sizes.append(nodes)
        for sequence, count in zip((good, bad), nodes, strict=True):
            if count:
                chosen.learn(sequence, count, count, count if sequence is good else 0)
    without = sum(count == 0 for count, _ in sizes)
    assert 0 < without <= 100 // PLAIN_AFTER + 1
    assert all(count == 0 or count > 2 for count, _ in sizes[20:])
    later = [count for _, count in sizes[20:]]
    assert 0 < sum(count > 0 for count in later) <= 80 / PROBE_AFTER + 1
    assert set(later) == {0, PROBE}


def test_slow_proposers_get_shorter_trees() -> None:
    fast, slow = controller(0.01), controller(0.01)
    (one,) = sequences(1)
    for chosen in (fast, slow):
        for _ in range(20):
            chosen.learn(one, 8, 8, 6)
    for _ in range(100):
        slow.proposed(4, 1.2)
    assert 0 < slow.sizes([one], [16], 1)[0] < fast.sizes([one], [16], 1)[0]


COSTS = {
    "memory": lambda rows: 1 + 0.002 * rows,
    "processor": lambda rows: 1 + 0.12 * rows,
    "arithmetic": lambda rows: 0.1 + rows,
    "steps": lambda rows: 1.0 + -(-rows // 16),
}


def simulate(
    cost: Any,
    right: float,
    count: int = 1,
    level: float = 0.0,
    noise: float = 0.0,
    fixed: int | None = None,
    gains: tuple[float, ...] = (),
    steps: int = 400,
    second: float | None = None,
    seed: int = 7,
) -> float:
    """How many times as many tokens a second as without drafts, in so many steps of ``count`` sequences.

    Args:
        cost: seconds of rows.
        right: the share of drafts that are right; of trees with ``gains``, what they give as a part of these.
        level: seconds of making drafts, for each level of a chain, or at all.
        noise: steps seem to take up to 1 + 4 * noise times as long, few of them that long.
        fixed: drafts of each sequence, instead of what a controller says.
        second: the share of second guesses that are right where the first one is wrong; None: there are none.
    """
    random = np.random.default_rng(seed)
    chosen, many = Controller(gains, pairs=second is not None), sequences(count)
    seconds, tokens = 0.0, 0
    for _ in range(steps):
        nodes = chosen.sizes(many, [8] * count, count) if fixed is None else [fixed] * count
        if any(nodes):
            pairs = [0] * count if fixed is not None else chosen.pairs
            depths = [drafts - beside for drafts, beside in zip(nodes, pairs, strict=True)]
            took = level * (1 if gains else max(depths))
            seconds += took
            chosen.proposed(max(depths), took)
        rows = count + sum(nodes)
        took = cost(rows)
        seconds += took
        chosen.ran(rows, took * (1 + 4 * noise * random.random() ** 3))
        for number, (sequence, drafts) in enumerate(zip(many, nodes, strict=True)):
            accepted, found, depth = 0, None, 1
            if gains:
                accepted = int(random.random() < right * sum(gains[:drafts]))
            elif drafts:
                depth = depths[number]
                while accepted < depth and random.random() < right:
                    accepted += 1
                if second is not None and accepted < pairs[number]:
                    found = bool(random.random() < second)
            tokens += 1 + accepted + bool(found)
            if drafts:
                chosen.learn(sequence, drafts, depth, accepted, found)
    return tokens / seconds / (count / cost(count))


@pytest.mark.parametrize("name", COSTS)
def test_never_slower_than_without(name: str) -> None:
    """And nearly as fast as the size that one would choose if one knew."""
    for right in (0.0, 0.3, 0.8, 0.95):
        for count, level in ((1, 0.0), (1, 1.5), (6, 0.1)):
            found = simulate(COSTS[name], right, count, level)
            best = max(simulate(COSTS[name], right, count, level, fixed=fixed) for fixed in (1, 2, 4, 8))
            assert found >= 0.97, (right, count, level)
            assert found >= 0.8 * max(1.0, best), (right, count, level, best)


def measured(rows: int) -> float:
    """Milliseconds of a step of SmolLM2-135M, bfloat16, one thread; its heads take 5, and 0.35 for each row."""
    return float(np.interp(rows, [1, 3, 6, 16, 24, 32, 48, 64], [20.6, 22, 23.5, 33, 38, 43, 58, 75]))


TREE = (0.33, 0.16, 0.08, 0.06, 0.05)


@pytest.mark.parametrize("noise", [0.0, 0.3])
def test_nor_with_heads_in_a_batch_or_on_a_busy_machine(noise: float) -> None:
    """What heads and probes take is part of it, in short runs, too."""
    for count, steps in ((1, 64), (1, 400), (16, 64), (16, 300)):
        for share in (0.0, 0.6, 1.0):
            found = simulate(measured, share, count, 5 + 0.35 * count, noise, gains=TREE, steps=steps)
            assert found >= 0.97, (count, steps, share)
    for name, right in (("arithmetic", 0.2), ("arithmetic", 0.9), ("processor", 0.5)):
        found = [simulate(COSTS[name], right, 16, 0.001, noise, steps=300, seed=seed) for seed in range(5, 9)]
        assert np.mean(found) >= 0.97, (name, right)
    assert simulate(measured, 1.0, 1, 5.35, noise, gains=TREE) >= 1.03
    assert np.mean([simulate(measured, 0.8, 16, 0.01, noise, seed=seed) for seed in range(5, 9)]) >= 1.2


def bfloat16(rows: int) -> float:
    """Milliseconds of a step of SmolLM2-135M, one thread of a processor that has no matrix unit."""
    return float(np.interp(rows, [1, 2, 4, 8, 12, 16, 32, 48], [8.84, 9.5, 10.9, 14.2, 16.0, 18.8, 29.9, 39.2]))


def drain(right: list[float], *, waits: bool = False, end: float = 0.0, groups: int = 4) -> float:
    """How many times as fast as without drafts: groups of sequences that come at once, and have 128 tokens.

    Args:
        right: of each sequence, the share of drafts that are right.
        waits: places are filled again as long as there are sequences, instead of group by group.
        end: the chance of each token to be the last one.
        groups: as many sequences as those, so many times.
    """
    random = np.random.default_rng(3)
    lengths = [min(128, int(random.geometric(end))) if end else 128 for _ in range(groups * len(right))]
    queue = list(zip(right * groups, lengths, strict=True))
    size = len(queue) if waits else len(right)
    queues = [queue[begin : begin + size] for begin in range(0, len(queue), size)]
    chosen = Controller()
    plain, drafted = (sum(run_queue(q, len(right), c, random) for q in queues) for c in (None, chosen))
    return plain / drafted


def run_queue(
    queue: list[tuple[float, int]],
    places: int,
    chosen: Controller | None,
    random: Any,
    cost: Any = bfloat16,
    **draft: Any,
) -> float:
    """Milliseconds of all sequences, each with the share of drafts that are right, and its length.

    ``draft``: milliseconds of a ``level`` of drafts, and of reading a token, and tokens of each ``prompt``; and what
    is read of each whether there are drafts or not.
    """
    level, read, prompt, unasked = (
        draft.get(name, default) for name, default in (("level", 1e-3), ("read", 0.0), ("prompt", 1), ("unasked", 0.0))
    )
    queue, running, milliseconds = queue.copy(), dict[Sequence, tuple[float, int]](), 0.0
    done: dict[Sequence, int] = {}
    while queue or running:
        while queue and len(running) < places:
            running[Request(0, [5] * prompt, SamplingParams(), 128).sequences[0]] = queue.pop(0)
            if chosen is not None and unasked:
                chosen.has_read(unasked)
                milliseconds += unasked
        many, count = list(running), len(running)
        behind = [max(0, len(sequence.tokens) - 9 - done.get(sequence, 0)) if read else 0 for sequence in many]
        nodes = [0] * count if chosen is None else chosen.sizes(many, [16] * count, count, behind, waiting=len(queue))
        took = cost(count + sum(nodes))
        milliseconds += took
        if chosen is not None and any(nodes):
            if tokens := sum(late for late, drafts in zip(behind, nodes, strict=True) if drafts):
                chosen.caught_up(tokens, tokens * read)
            chosen.proposed(depth := max(nodes) if read else 1, depth * level)
            milliseconds += tokens * read + depth * level
        if chosen is not None:
            chosen.ran(count + sum(nodes), took)
        for sequence, drafts in zip(many, nodes, strict=True):
            share, length = running[sequence]
            accepted, most = 0, min(drafts, length - sequence.num_generated - 1)
            while accepted < most and random.random() < share:
                accepted += 1
            sequence.tokens += [5] * (1 + accepted)
            if drafts:
                done[sequence] = len(sequence.tokens)
            if sequence.num_generated == length:
                sequence.finish(FinishReason.LENGTH if length == 128 else FinishReason.STOP)
                del running[sequence]
            if chosen is not None:
                if drafts:
                    chosen.learn(sequence, most, most, accepted)
                if sequence.finish_reason is not None:
                    chosen.forget(sequence)
    return milliseconds


@pytest.mark.parametrize("end", [0.0, 0.01])
def test_nor_where_few_of_a_batch_copy(end: float) -> None:
    """They end before the others: what they save is rows of steps that run anyway, unless others wait for their places.

    With 4 of 16 right in 64 of 100 places, SmolLM2 took 1.04 times as long when their tokens counted like all others.
    """
    for right, share in ((4, 0.64), (3, 0.9), (16, 0.1), (16, 0.3)):
        assert drain([share] * right + [0.1] * (16 - right), end=end) >= 0.97, (right, share)
    assert drain([0.64, 0.64, 0.1, 0.1], end=end, groups=16) >= 0.97
    assert drain([0.9] * 16, end=end) >= 1.8
    assert drain([0.64] * 4 + [0.1] * 12, end=end, waits=True) >= 0.97
    assert drain([0.9, 0.1], end=end, waits=True) >= 1.2


def engine(rows: int) -> float:
    """Milliseconds of a step of SmolLM2-135M, float32, one thread; as a draft for it, int4 weights take 6.2."""
    return float(np.interp(rows, [1, 2, 4, 6, 8, 12, 16, 32, 64], [16.0, 16.1, 18.3, 19.5, 22.1, 26.3, 32, 51, 89]))


@pytest.mark.parametrize("noise", [0.0, 0.3])
def test_second_guesses_pay_or_are_left_away(noise: float) -> None:
    """On MT-bench, the first guess of int4 weights is right in 65 of 100 places, the second in 16."""
    found, chain = (simulate(engine, 0.65, 1, 6.2, noise, second=second, steps=2000) for second in (0.46, None))
    assert found >= 1.02 * chain >= 1.12
    for right in (0.0, 0.3, 0.65, 0.9, 1.0):
        for second in (0.0, 0.2, 0.6):
            for count in (1, 16):
                found = simulate(engine, right, count, 6.2, noise, second=second, steps=300)
                chain = simulate(engine, right, count, 6.2, noise, steps=300)
                assert found >= max(0.97, 0.9 * chain), (right, second, count, chain)


def test_reading_a_prompt_is_paid_once() -> None:
    """Int4 weights as a draft for float32, which read a token in 0.47 ms: where they are right, they start soon."""

    def speed(right: float, prompt: int, count: int, places: int = 1) -> float:
        def run(chosen: Controller | None) -> float:
            random, queue = np.random.default_rng(3), [(right, 128)] * places
            draft = {"level": 4.74, "read": 0.47, "prompt": prompt}
            return sum(run_queue(queue, places, chosen, random, engine, **draft) for _ in range(count))

        return run(None) / run(Controller())

    for prompt in (20, 100, 400, 1000):
        for right in (0.1, 0.65, 1.0):
            assert speed(right, prompt, 3) >= 0.97, (right, prompt)
            assert speed(right, prompt, 8, 4) >= 0.97, (right, prompt)
    assert speed(0.65, 100, 20) >= 1.1
    assert speed(1.0, 400, 20) >= 1.2  # a prompt is worth 12 steps: it starts after as many were allowed, then pays
    assert speed(1.0, 100, 30, 4) >= 1.1


@pytest.mark.parametrize("unasked", [5.0, 60.0])
def test_what_is_read_unasked_is_owed(unasked: float) -> None:
    """As of an EAGLE layer, for whose drafts a prompt is read in any case: good drafts pay it, bad ones get fewer."""
    queue = [(0.7, 128)] * 40
    plain = run_queue(queue, 4, None, np.random.default_rng(3), engine)

    def run(right: float, reads: float) -> float:
        found = run_queue(
            [(right, 128)] * 40, 4, Controller(), np.random.default_rng(3), engine, level=0.7, unasked=reads
        )
        return found / plain

    reading = len(queue) * unasked / plain
    assert run(0.7, unasked) - reading <= 1.02 * run(0.7, 0.0) < 0.8
    assert run(0.0, unasked) - reading <= run(0.0, 0.0) <= 1.03


def test_what_is_owed_is_paid_from_savings_and_half_of_what_drafts_may_cost() -> None:
    chosen, (one,) = controller(0.001), sequences(1)
    chosen.sizes([one], [0], 1)
    chosen.sizes([one], [0], 1)
    chosen.has_read(1.0)
    owed, credit = chosen._saved, chosen._credit
    assert owed == -1 and credit is not None
    chosen.sizes([one], [0], 1)
    assert chosen._saved == pytest.approx(owed + 0.005, rel=0.01)
    assert chosen._credit == pytest.approx(credit + 0.005, rel=0.01)
    for _ in range(100):
        (nodes,) = chosen.sizes([one], [8], 1)
        if nodes:
            chosen.learn(one, nodes, nodes, nodes)
    assert chosen._saved > 1


def test_second_guesses_hang_beside_first_ones() -> None:
    chosen, (one,) = controller(0.02, pairs=True), sequences(1)
    for _ in range(9):
        chosen.proposed(1, 0.4)

    assert chosen.sizes([one], [0], 1) == chosen.pairs == [0]  # a step that is full already

    def nodes(most: int) -> tuple[int, int]:
        return chosen.sizes([one], [most], 1)[0], chosen.pairs[0]

    for _ in range(40):
        chosen.learn(one, 3, 2, 2)
        chosen.learn(one, 3, 2, 0, True)  # wherever the first one is wrong
    assert [nodes(most) for most in (1, 2)] == [(1, 0), (2, 1)]
    for _ in range(60):
        chosen.learn(one, 3, 2, 1, False)
    assert [nodes(most)[1] for most in (1, 2, 8)] == [0, 0, 0]
    for _ in range(60):
        chosen.learn(one, 2, 2, 1)  # what was not tried for long is worth a try
    assert nodes(8)[1] > 0


def test_gains_of_trees_are_measured() -> None:
    """Trees that give half, or twice, of what was expected of them become smaller, or larger."""
    gains = [0.15, 0.1, 0.08, 0.06, 0.05, 0.04, 0.03, 0.02]
    sizes = {}
    for name, share in (("worse", 0.5), ("as expected", 1.0), ("better", 1.8)):
        random = np.random.default_rng(3)
        chosen, (one,) = Controller(gains), sequences(1)
        chosen.proposed(1, 0.0)
        found = []
        for _ in range(400):
            (nodes,) = chosen.sizes([one], [8], 1)
            chosen.ran(1 + nodes, COSTS["memory"](1) + 0.05 * nodes)
            if nodes:
                chosen.learn(one, nodes, 1, int(random.random() < share * sum(gains[:nodes])))
            found.append(nodes)
        sizes[name] = np.mean(found[100:])
    assert sizes["worse"] + 1 < sizes["as expected"] < sizes["better"] - 1


def test_sizes_change_no_result(kit: Any) -> None:
    """A clock that goes as it likes."""
    from llmc.runtime.sampling import Sampler
    from llmc.runtime.scheduler import Scheduler
    from llmc.runtime.speculative.ngram import NgramProposer
    from llmc.runtime.speculative.speculator import Speculator

    def model(history: tuple[int, ...]) -> Any:
        return kit.one_hot(3 + (history[-1] * 5 + 1) % 7)

    def run(ticks: list[float] | None) -> tuple[list[list[int]], int]:
        config = kit.config()
        executor = kit.PagedExecutor(model, config)
        speculator = None
        if ticks is not None:
            times = accumulate(cycle(ticks))
            speculator = Speculator(NgramProposer(), executor, vocab_size=kit.VOCAB, clock=lambda: next(times))
        scheduler = Scheduler(executor, Sampler(), config, speculator=speculator)
        requests = [Request(i, [5 + i, 9], SamplingParams(max_tokens=60), 60) for i in range(3)]
        for request in requests:
            scheduler.add(request)
        while scheduler.has_work:
            scheduler.step()
        return [r.sequences[0].tokens for r in requests], len(executor.batches)

    expected, plain = run(None)
    for ticks in ([1e-5, 1e-5, 0.001], [0.5, 0.001, 3.0], [1e-6, 9.0]):
        found, steps = run(ticks)
        assert found == expected
        assert steps < plain or (steps == plain and ticks[0] != 1e-5)
