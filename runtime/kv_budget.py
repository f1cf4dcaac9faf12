"""How large the KV cache is made, and other limits."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmc.errors import ResourceError, UsageError
from llmc.runtime import resources

if TYPE_CHECKING:
    from llmc.runtime.engine import Engine

MEMORY_SHARE = 0.25
"""Of the available memory: what the KV cache takes at most by default."""

DEVICE_RESERVE = 0.08
"""Of the memory of a device: left for kernels, graphs and scratch."""

DEVICE_STEP = 64
"""Blocks whose size is measured, so that alignment does not count."""


def blocks_of_cache(
    engine: Engine, sequences: int, kv_memory: int | str | None, num_blocks: int | None, more_bytes: int = 0
) -> int:
    """As asked for; else enough for so many sequences at full length within a share of the memory, at least for one.

    ``more_bytes``: that somebody else needs for each position.

    Raises:
        ResourceError: not even one sequence fits into memory.
        UsageError: the two options exclude each other, or are out of bounds.
    """
    size = engine.kv_cache.block_size
    if engine.manifest.target != "cpu":
        return _blocks_on_device(engine, sequences, kv_memory, num_blocks)
    block_bytes = max(1, (engine.kv_bytes_per_token + more_bytes) * size)
    per_sequence = -(-engine.limits.max_seq_len // size)
    if num_blocks is not None and kv_memory is not None:
        raise UsageError("num_blocks and kv_memory exclude each other")
    if num_blocks is not None:
        if num_blocks < 1:
            raise UsageError(f"num_blocks: {num_blocks} is less than 1")
        return num_blocks
    if kv_memory is not None:
        blocks = resources.parse_size(kv_memory) // block_bytes
        if blocks < 1:
            raise ResourceError(f"kv_memory: {kv_memory} is less than one block of {block_bytes} bytes")
        return min(blocks, per_sequence * sequences)
    available = resources.available_memory()
    blocks = max(per_sequence, min(per_sequence * sequences, int(available * MEMORY_SHARE) // block_bytes))
    if blocks * block_bytes > available:
        raise ResourceError(
            f"the KV cache of one sequence of {engine.limits.max_seq_len} tokens takes {blocks * block_bytes >> 20} "
            f"MiB, but {available >> 20} MiB are available; set kv_memory, or build with a smaller --max-seq-len"
        )
    return blocks


def _blocks_on_device(engine: Engine, sequences: int, kv_memory: int | str | None, num_blocks: int | None) -> int:
    """The same for a device, of which the cache takes what weights, activations and a reserve leave."""
    from llmc.runtime.devices import open_cuda
    from llmc.runtime.devices.cuda.program import caches

    if num_blocks is not None and (kv_memory is not None or num_blocks < 1):
        raise UsageError(f"num_blocks: {num_blocks} is less than 1, or kv_memory is given too")
    if num_blocks is not None:
        return num_blocks
    block_bytes = max(1, caches(engine.plan, engine.kv_cache, DEVICE_STEP, 0)[1] // DEVICE_STEP)
    per_sequence = -(-engine.limits.max_seq_len // engine.kv_cache.block_size)
    if kv_memory is not None:
        room = resources.parse_size(kv_memory)
    else:
        free, total = open_cuda().memory()
        room = free - engine.weight_bytes - engine.plan.arena_bytes - int(total * DEVICE_RESERVE)
    if (room < per_sequence * block_bytes and kv_memory is None) or room < block_bytes:
        raise ResourceError(
            f"the KV cache of one sequence of {engine.limits.max_seq_len} tokens needs {per_sequence * block_bytes} "
            f"bytes of device memory, but {max(room, 0)} are left beside {engine.weight_bytes} bytes of weights and "
            f"{engine.plan.arena_bytes} of activations; set kv_memory, or build with a smaller --max-seq-len"
        )
    return min(room // block_bytes, per_sequence * sequences)


def lowered(name: str, value: int | None, limit: int) -> int:
    """A limit of the engine, or what somebody wants instead.

    Raises:
        UsageError: it is more.
    """
    if value is None:
        return limit
    if not 1 <= value <= limit:
        raise UsageError(f"{name}: {value} is not in 1 to {limit}, which the engine was built for")
    return value
