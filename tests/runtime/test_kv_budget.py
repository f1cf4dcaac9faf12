"""How many blocks the KV cache gets."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from llmc.errors import ResourceError, UsageError
from llmc.runtime import resources
from llmc.runtime.kv_budget import blocks_of_cache

MIB = 1 << 20


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """1,000 tokens (63 blocks) a sequence, 16 KiB a block; 64 MiB of memory are free."""
    monkeypatch.setattr(resources, "available_memory", lambda: 64 * MIB)
    return SimpleNamespace(
        kv_bytes_per_token=1024,
        kv_cache=SimpleNamespace(block_size=16),
        limits=SimpleNamespace(max_seq_len=1000),
        manifest=SimpleNamespace(target="cpu"),
    )


def test_default(engine: Any) -> None:
    assert blocks_of_cache(engine, 2, None, None) == 2 * 63
    assert blocks_of_cache(engine, 64, None, None) == 16 * MIB // 16384  # a quarter of the memory
    engine.limits.max_seq_len = 32_000  # more than a quarter, but one sequence has to fit
    assert blocks_of_cache(engine, 64, None, None) == 2000
    engine.limits.max_seq_len = 100_000
    with pytest.raises(ResourceError, match="takes 97 MiB, but 64 MiB are available; set kv_memory"):
        blocks_of_cache(engine, 64, None, None)


def test_options(engine: Any) -> None:
    assert blocks_of_cache(engine, 64, None, 7) == 7
    assert blocks_of_cache(engine, 64, "1MiB", None) == 64
    assert blocks_of_cache(engine, 1, "1GiB", None) == 63  # more can't be used
    with pytest.raises(UsageError, match="exclude each other"):
        blocks_of_cache(engine, 64, "1MiB", 7)
    with pytest.raises(UsageError, match="num_blocks: 0 is less than 1"):
        blocks_of_cache(engine, 64, None, 0)
    with pytest.raises(ResourceError, match="less than one block of 16384 bytes"):
        blocks_of_cache(engine, 64, "1KB", None)
    with pytest.raises(UsageError, match="is not a size"):
        blocks_of_cache(engine, 64, "much", None)
