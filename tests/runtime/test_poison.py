"""With the real executor: NaN in everything that nobody has written changes nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import engines
import numpy as np
import pytest

from llmc import LLM, SamplingParams
from llmc.runtime.devices import cpu
from llmc.runtime.devices.cpu import CpuExecutor
from llmc.runtime.engine import load_engine

PROMPTS = [np.random.default_rng(i).integers(3, 131, 17 + i).tolist() for i in range(34)]
PARAMS = SamplingParams(max_tokens=30, ignore_eos=True, logprobs=1)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    _, path = engines.build(engines.small_llama(), tmp_path_factory.mktemp("poison"), dtype="bfloat16")
    return path


def results(engine: Path, poison: bool, preempted: bool, monkeypatch: pytest.MonkeyPatch, **options: Any) -> list[Any]:
    monkeypatch.setattr(cpu, "POISON", poison)
    llm = LLM(engine, threads=1, check=True, **options)
    found = [(r.token_ids, r.logprobs) for r in llm.generate(PROMPTS, PARAMS)]
    assert (llm.scheduler.statistics.preemptions > 0) == preempted
    assert llm.scheduler.kv_cache.num_available == llm.scheduler.kv_cache.num_blocks
    return found


def test_kv_02_and_kv_03(engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """34 requests in 32 blocks are preempted and computed again; freed blocks are poisoned before they are reused."""
    expected = results(engine, False, False, monkeypatch, num_blocks=4096)
    assert results(engine, True, True, monkeypatch, num_blocks=32) == expected
    assert results(engine, True, False, monkeypatch, num_blocks=32, max_batch_tokens=8, max_sequences=3) == expected
    assert results(engine, True, True, monkeypatch, num_blocks=32, prefix_cache=False) == expected
    assert all(np.isfinite(e.logprob) for _, logprobs in expected for e in logprobs)


def test_the_poison_works(engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block that is poisoned while it is in use ends its request with an error, and no other."""
    monkeypatch.setattr(cpu, "POISON", True)
    llm = LLM(engine, threads=1)
    first, second = (llm.add_request(p, PARAMS) for p in PROMPTS[:2])
    llm.step()
    table = llm.request(first).sequences[0].table
    assert table is not None
    llm.executor.poison_blocks(table.blocks[:1])  # type: ignore[attr-defined]
    ends = {}
    while llm.has_unfinished:
        ends.update({d.request_id: d.finish_reason for d in llm.step() if d.finish_reason})
    assert ends == {first: "error", second: "length"}


def test_kv_07_only_owned_blocks_are_written(engine: Path) -> None:
    llm = LLM(engine, threads=2, num_blocks=32)
    executor = llm.executor
    assert isinstance(executor, CpuExecutor)
    for prompt in PROMPTS[:3]:
        llm.add_request(prompt, PARAMS)
    native = executor._native

    def memory() -> list[Any]:
        return [a(slot).copy() for slot in range(2) for a in (native.keys, native.values)]

    for _ in range(20):
        before = memory()
        llm.step()
        owned = {b for s in llm.scheduler.running if s.table for b in s.table.blocks}
        free = [b for b in range(32) if b not in owned]
        for old, new in zip(before, memory(), strict=True):
            np.testing.assert_array_equal(old[free], new[free])
            assert not np.array_equal(old, new)
    assert load_engine(engine).kv_cache.block_size == 16
