"""The CPU executor on plans made by hand."""

import json
import threading
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from llmc.errors import EngineError, KernelError
from llmc.plugins import kernels
from llmc.plugins.linear.packing import pack
from llmc.runtime.batch import Batch
from llmc.runtime.devices.cpu import CpuExecutor
from llmc.runtime.devices.timeline import Timeline
from llmc.runtime.engine import Weight
from llmc.runtime.manifest import KvCacheSpec
from llmc.runtime.plan import Dim, KvSlot, Plan, StateSlot, Step, Storage, Value
from llmc.runtime.profiling import Profile

VOCAB, WIDTH, TOKENS = 37, 20, 12
T, N = Dim(tokens=1), Dim(rows=1)
ROW = 64 * TOKENS * 4
"""Bytes of an arena buffer."""


def value(name: str, base: int | str, rows: Dim, width: int, storage: Storage = Storage.ARENA) -> Value:
    return Value(name, storage, base, "float32", (rows, Dim(width)), (Dim(width), Dim(1)))


def weight(name: str, array: np.ndarray) -> tuple[Value, Weight]:
    array = np.ascontiguousarray(array)
    strides = tuple(Dim(s // array.itemsize) for s in array.strides)
    view = Value(f"w.{name}", Storage.WEIGHT, name, array.dtype.name, tuple(map(Dim, array.shape)), strides)
    return view, Weight(name, array.dtype.name, array.shape, array.reshape(-1).view(np.uint8))


TABLE = np.random.default_rng(0).standard_normal((VOCAB, WIDTH), np.float32)
HEAD = np.random.default_rng(1).standard_normal((VOCAB, WIDTH), np.float32)
WEIGHTS = dict([weight("table", TABLE), weight("head", pack(HEAD))])
VALUES = (
    Value("ids", Storage.BATCH, "input_ids", "int32", (T,), (Dim(1),)),
    Value("rows", Storage.BATCH, "logit_rows", "int32", (N,), (Dim(1),)),
    value("x", 0, T, WIDTH),
    value("halved", ROW, T, WIDTH),
    value("picked", 2 * ROW, N, WIDTH),
    value("logits", 3 * ROW, N, VOCAB),
    *WEIGHTS,
)
STEPS = (
    Step("embedding", ("ids", "w.table"), ("x",), module="model.embed"),
    Step("elementwise", ("x",), ("halved",), {"function": "tanh"}),
    Step("gather", ("halved", "rows"), ("picked",)),
    Step("linear", ("picked", "w.head", None), ("logits",), module="lm_head"),
)
PLAN = Plan(VALUES, STEPS, 4 * ROW + 4 * VOCAB * TOKENS, "logits", (KvSlot(1, 8, 8),))


def engine(plan: Plan = PLAN) -> Any:
    """What the executor reads of an engine."""
    weights: Mapping[str, Weight] = {w.name: w for w in WEIGHTS.values()}
    return SimpleNamespace(path="test-engine", plan=plan, weights=weights, kv_cache=KvCacheSpec("float32", 16))


def executor(plan: Plan = PLAN, **options: Any) -> CpuExecutor:
    return CpuExecutor(engine(plan), **({"num_blocks": 4, "threads": 2} | options))


def batch(counts: tuple[int, ...] = (3, 4), computed: tuple[int, ...] | None = None, **changes: Any) -> Batch:
    total = sum(counts)
    arrays: dict[str, Any] = {
        "input_ids": np.arange(total, dtype=np.int32) * 3 % VOCAB,
        "position_ids": np.concatenate([np.arange(n, dtype=np.int32) for n in counts]),
        "logit_rows": np.array([0, total - 1], np.int32),
        "cu_seqlens": np.cumsum([0, *counts]).astype(np.int32),
        "num_computed": np.array(computed or [0] * len(counts), np.int32),
        "block_tables": np.arange(len(counts) * 2, dtype=np.int32).reshape(-1, 2) % 4,
    }
    return Batch(**(arrays | changes))


def expected(ids: np.ndarray, rows: np.ndarray) -> np.ndarray:
    return np.tanh(TABLE[ids])[rows] @ HEAD.T


@pytest.mark.parametrize("isa", kernels.isas())
def test_a_plan_computes_what_its_steps_say(isa: str) -> None:
    run = executor(isa=isa, poison=True)
    for counts in ((3, 4), (1,), (2, 2, 2), (TOKENS,)):  # sizes change from step to step
        given = batch(counts)
        np.testing.assert_allclose(run.step(given), expected(given.input_ids, given.logit_rows), 1e-5, 1e-5)


def test_no_logit_rows_give_no_logits() -> None:
    assert executor().step(batch(logit_rows=np.zeros(0, np.int32))).shape == (0, VOCAB)


def test_threads_change_no_bit() -> None:
    one, two, many = (executor(threads=n).step(batch()).copy() for n in (1, 2, 7))
    np.testing.assert_array_equal(one, two)
    np.testing.assert_array_equal(one, many)


@pytest.mark.parametrize("threads", [1, 2, 7])
def test_the_largest_logits_are_found(threads: int) -> None:
    columns, nan, inf = 2500, np.nan, np.inf
    logits = value("logits", 0, N, columns)
    run = executor(Plan((logits,), (), 4 * columns * TOKENS, "logits", ()), threads=threads)
    rows = np.random.default_rng(0).standard_normal((8, columns), np.float32)
    rows[1] = 7  # ties
    rows[2], rows[2, 1030] = -0.0, 0.0
    rows[3], rows[3, -1] = -3, -2
    rows[4], rows[4, 2400] = -inf, -1e38
    rows[5, [1700, 40]] = inf
    rows[6, [1900, 60]] = nan, inf
    rows[7, 2047] = -nan
    given = batch(logit_rows=np.arange(7, dtype=np.int32).repeat(2)[:8])
    run.run(given, 0)
    run._native.view(0)[:] = rows
    found, ids, scores = run.step_greedily(given)
    np.testing.assert_array_equal(found, rows)
    assert ids == rows.argmax(axis=1).tolist()
    np.testing.assert_array_equal(np.array(scores, np.float32), rows[range(8), ids])


def test_values_can_be_read_at_any_step() -> None:
    run = executor(poison=True)
    given = batch()
    run.run(given, upto=2)
    np.testing.assert_array_equal(run.read("x"), TABLE[given.input_ids])
    assert np.isnan(run.read("logits")).all()
    with pytest.raises(KernelError, match="no value 'y'"):
        run.read("y")


REFUSED = [
    ({"input_ids": np.full(7, VOCAB, np.int32)}, r"llmc::embedding \(model.embed\): token id 37 .*37 rows"),
    ({"input_ids": np.full(7, -1, np.int32)}, "token id -1"),
    ({"input_ids": np.zeros(6, np.int32)}, "input_ids and position_ids differ"),
    ({"position_ids": np.full(7, -1, np.int32)}, "position_ids is negative"),
    ({"logit_rows": np.array([7], np.int32)}, "logit_rows names a row"),
    ({"cu_seqlens": np.array([0, 3, 6], np.int32)}, "cu_seqlens must go from 0"),
    ({"cu_seqlens": np.array([0, 7, 7], np.int32)}, "cu_seqlens must grow"),
    ({"cu_seqlens": np.array([0, 9, 7], np.int32)}, "cu_seqlens must grow"),
    ({"cu_seqlens": np.array([0, 7], np.int32)}, "one entry more"),
    ({"num_computed": np.array([-1, 0], np.int32)}, "num_computed is negative"),
    ({"num_computed": np.array([30, 0], np.int32)}, "block_tables is too narrow"),
    ({"block_tables": np.array([[0], [4]], np.int32)}, "a block that the cache does not have"),
    ({"block_tables": np.array([[0], [-1]], np.int32)}, "a block that the cache does not have"),
    ({"block_tables": np.zeros((1, 2), np.int32)}, "a row for each sequence"),
    ({"tree_mask": np.zeros((6, 1), np.uint64)}, "tree_mask must have a row"),
    ({"tree_mask": np.zeros((7, 0), np.uint64)}, "tree_mask"),
    ({"state_slots": np.zeros(1, np.int32)}, "state_slots"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED)
def test_a_batch_that_contradicts_itself_is_refused(changes: dict[str, Any], message: str) -> None:
    run = executor()
    with pytest.raises(KernelError, match=message):
        run.step(batch(**changes))
    good = batch()  # and the executor lives on
    np.testing.assert_allclose(run.step(good), expected(good.input_ids, good.logit_rows), 1e-5, 1e-5)


def test_a_batch_beyond_the_plan_is_refused() -> None:
    run = executor()
    with pytest.raises(KernelError, match=r"'x' reaches byte .* larger than the plan allows"):
        run.step(batch((400,), block_tables=np.zeros((1, 25), np.int32)))
    good = batch()
    np.testing.assert_allclose(run.step(good), expected(good.input_ids, good.logit_rows), 1e-5, 1e-5)


DAMAGED = [
    (Step("embeding", ("ids",), ("x",)), "llmc::embeding: there is no such op; known: .*embedding"),
    (Step("elementwise", ("x",), ("x",), {}), "'function' is missing"),
    (Step("elementwise", ("x",), ("x",), {"function": 1}), "'function' must be a string, not an int"),
    (Step("elementwise", ("x",), ("x",), {"function": "tanh", "k": True}), "unknown attributes: k"),
    (Step("elementwise", ("x",), ("w.table",), {"function": "tanh"}), "output is not in the arena"),
]


@pytest.mark.parametrize(("step", "message"), DAMAGED)
def test_a_damaged_plan_is_refused_at_the_start(step: Step, message: str) -> None:
    with pytest.raises(EngineError, match=message):
        executor(Plan(VALUES, (step,), PLAN.arena_bytes, "logits", ()))


@pytest.mark.parametrize(
    "bad",
    [
        value("x", 4 * ROW + 4 * VOCAB * TOKENS - 8, T, WIDTH),
        value("x", 0, Dim(1 << 62, 1), WIDTH),
        value("x", 0, Dim(-1), WIDTH),
        Value("x", Storage.ARENA, 0, "float32", (T, Dim(WIDTH)), (Dim(-WIDTH), Dim(1))),
        Value("x", Storage.ARENA, 0, "float32", (T, Dim(WIDTH)), (Dim(WIDTH), Dim(1)), Dim(-1)),
        Value("x", Storage.WEIGHT, "table", "float32", (T, Dim(WIDTH)), (Dim(1000), Dim(1))),
    ],
)
def test_views_outside_of_their_memory_are_refused(bad: Value) -> None:
    values = tuple(bad if v.name == "x" else v for v in VALUES)
    steps = (Step("elementwise", ("x",), ("halved",), {"function": "tanh"}),)
    with pytest.raises(KernelError, match=r"'x' reaches byte|'x' has a negative size|overflows"):
        executor(Plan(values, steps, PLAN.arena_bytes, "logits", ())).step(batch())


def test_options_are_checked() -> None:
    with pytest.raises(KernelError, match=r"isa 'sse9' is not available here; choose one of scalar"):
        executor(isa="sse9")
    with pytest.raises(EngineError, match="recurrent state"):
        executor(Plan(VALUES, STEPS, PLAN.arena_bytes, "logits", (), (StateSlot((4,), "float32"),)))
    with pytest.raises(EngineError, match="threads"):
        executor(threads=0)


def test_one_batch_at_a_time() -> None:
    run, errors = executor(threads=2), []

    def work() -> None:
        for _ in range(300):
            try:
                run.step(batch((TOKENS,), block_tables=np.zeros((1, 1), np.int32)))
            except KernelError as error:
                errors.append(str(error))

    workers = [threading.Thread(target=work) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert set(errors) <= {"the executor is already running a batch in another thread"}


def test_blocks_are_copied_and_poisoned() -> None:
    run = executor(poison=True)
    keys = run._native.keys(0)
    assert np.isnan(keys).all()
    keys[1] = 5
    run.copy_block(1, 3)
    assert (run._native.keys(0)[3] == 5).all()
    run.poison_blocks([1])
    assert np.isnan(keys[1]).all()
    with pytest.raises(KernelError, match="block 4 is not one of the cache's 4"):
        run.copy_block(0, 4)


def test_timeline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLMC_TRACE", str(tmp_path / "trace.json"))
    run = executor()
    run.step(batch())
    run.step(batch((1,)))
    (timeline,) = run._observers
    assert isinstance(timeline, Timeline)
    timeline.write()
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert [e["name"] for e in events if e["cat"] == "run"] == ["7 tokens, 2 sequences", "1 tokens, 1 sequences"]
    steps = [e for e in events if e["cat"] == "step"]
    assert [e["name"] for e in steps] == [step.op for step in STEPS] * 2
    assert steps[3]["args"]["module"] == "lm_head"
    assert all(e["dur"] >= 0 for e in events)


def test_profile_counts_bytes_and_operations() -> None:
    run = executor()
    ceilings = {"read_bandwidth": 1.0, "fp32": 2.0}
    everything = Profile(PLAN, "float32", ceilings, decodes_only=False)
    decodes = Profile(PLAN, "float32", ceilings, decodes_only=True)
    run.observe(everything)
    run.observe(decodes)
    run.step(batch())  # 7 tokens, 2 rows of logits
    run.step(batch((1, 1)))
    run.forget(everything)
    run.step(batch((1, 1)))
    head = 4 * WIDTH * 48  # in panels of 16 outputs
    assert everything.totals["linear"].bytes == 2 * head + 4 * 4 * (WIDTH + VOCAB)
    assert everything.totals["linear"].operations == 2 * 4 * head // 4
    assert everything.totals["elementwise"].bytes == 2 * (7 + 2) * WIDTH * 4
    assert everything.totals["elementwise"].operations == 0
    assert [everything.totals["linear"].steps, decodes.totals["linear"].steps] == [2, 2]
    found = decodes.to_json()
    assert list(found["ops"]) == sorted(found["ops"], key=lambda op: -found["ops"][op]["seconds"])
    assert sum(op["share"] for op in found["ops"].values()) + found["outside"] <= 1
    assert found["decodes"] is None


def test_profile_tells_what_decodes_spend_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    profile = Profile(PLAN, "float32", {"read_bandwidth": 1.0, "fp32": 2.0}, decodes_only=False)
    now = 0
    monkeypatch.setattr("time.perf_counter_ns", lambda: now)
    for number in range(20):
        sizes = (1, 1, 1) if number < 12 else (1, 1)
        now += 100
        profile.add(batch(sizes), now - 90, now, [])
    profile.add(batch((3, 4)), now + 50, now + 60, [])
    assert profile.to_json()["decodes"] == {"sequences": 3, "seconds": 100e-9, "outside": 0.1}


def test_profile_counts_what_attention_reads() -> None:
    shape, strides = (T, Dim(6), Dim(8)), (Dim(48), Dim(8), Dim(1))
    views = tuple(Value(name, Storage.ARENA, 0, "float32", shape, strides) for name in "qkvo")
    step = Step("paged_attention", ("q", "k", "v"), ("o",), {"slot": 0})
    plan = Plan(views, (step,), 0, "o", (KvSlot(2, 8, 8),))
    profile = Profile(plan, "bfloat16", {"read_bandwidth": 1.0, "fp32": 2.0, "bf16": 4.0}, decodes_only=False)
    profile.add(batch((2, 1), computed=(5, 3)), 0, 10, [(0, 0, 10)])
    total = profile.totals["paged_attention"]
    assert total.bytes == 4 * 3 * 48 * 4 + (7 + 4) * 2 * (8 + 8) * 2
    assert total.operations == 2 * (6 + 7 + 4) * 6 * (8 + 8)
    assert total.least_seconds == pytest.approx(max(total.bytes, total.operations / 4) / 1e9)
