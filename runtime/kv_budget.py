"""How large the KV cache is made, and other limits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from llmc.errors import ResourceError, UsageError
from llmc.runtime import resources
from llmc.runtime.scheduler import SchedulerConfig

if TYPE_CHECKING:
    from llmc.runtime.devices.cuda.device import Device
    from llmc.runtime.engine import Engine
    from llmc.runtime.speculative.opening import Drafter

MEMORY_SHARE = 0.25
"""Of the available memory: what the KV cache takes at most by default."""

MAX_LOGIT_BYTES = 64 << 20
"""Of the logits of one step, beyond one row for each sequence: bounds what prompt_logprobs take."""


def config_of(
    engine: Engine,
    device: Device | None,
    drafter: Drafter | None,
    *,
    sizes: tuple[int | None, int | None],
    kv_memory: int | str | None,
    num_blocks: int | None,
    gpu_memory: float | str | None,
    prefix_cache: bool,
    check: bool,
) -> SchedulerConfig:
    """What the scheduler of an engine works with; ``sizes``: sequences and tokens of a step, if lower than its limits.

    Raises:
        ResourceError, UsageError: as `blocks_of_cache`, `lowered`.
    """
    limits = engine.limits
    sequences = lowered("max_sequences", sizes[0], limits.max_sequences)
    batch_tokens = lowered("max_batch_tokens", sizes[1], limits.max_batch_tokens)
    blocks = blocks_of_cache(
        engine,
        sequences,
        kv_memory,
        num_blocks,
        0 if drafter is None else drafter.kv_bytes_per_token,
        gpu_memory=gpu_memory,
        device=device,
        drafts=None if drafter is None or device is None else drafter.beside,
    )
    return SchedulerConfig(
        max_seq_len=limits.max_seq_len,
        max_batch_tokens=batch_tokens,
        max_sequences=sequences,
        max_logit_rows=min(batch_tokens, max(sequences, MAX_LOGIT_BYTES // (4 * engine.model.vocab_size))),
        num_blocks=blocks,
        block_size=engine.kv_cache.block_size,
        has_state=bool(engine.plan.state_slots),
        prefix_cache=prefix_cache,
        check=check,
    )


def blocks_of_cache(
    engine: Engine,
    sequences: int,
    kv_memory: int | str | None,
    num_blocks: int | None,
    more_bytes: int = 0,
    *,
    gpu_memory: float | str | None = None,
    device: Device | None = None,
    drafts: Engine | None = None,
) -> int:
    """As asked for; else enough for so many sequences at full length within a share of the memory, at least for one.

    Args:
        engine: whose cache it is.
        sequences: that run at one time.
        kv_memory: bytes of the cache.
        num_blocks: the same in blocks.
        more_bytes: that somebody else needs for each position.
        gpu_memory: what the engine may take of its device, a share or bytes; see devices/cuda/memory.py.
        device: that the engine runs on, if that is not the CPU.
        drafts: an engine, or a part of this one, that runs beside it.

    Raises:
        ResourceError: not even one sequence fits into memory.
        UsageError: the options exclude each other, or are out of bounds.
    """
    size = engine.kv_cache.block_size
    if device is not None:
        return _blocks_on_device(engine, device, sequences, (gpu_memory, kv_memory, num_blocks), drafts)
    if gpu_memory is not None:
        raise UsageError(f"gpu_memory: {engine.path} is built for the CPU; use kv_memory")
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


def _blocks_on_device(
    engine: Engine, device: Device, sequences: int, given: tuple[Any, Any, Any], drafts: Engine | None
) -> int:
    """The same for a device, of which the cache takes what all else leaves."""
    from llmc.runtime.devices.cuda import memory, targets

    needs = memory.plan_of(engine, targets.choose(engine.path, engine.manifest, device.capability, device.name))
    others = (0, 0)
    if drafts is not None and drafts.manifest.target != "cpu":
        arch = targets.choose(drafts.path, drafts.manifest, device.capability, device.name)
        its = memory.plan_of(drafts, arch, engine)
        others = its.fixed, -(-its.block * engine.kv_cache.block_size // its.block_size)
    gpu_memory, kv_memory, num_blocks = given
    free, total = device.memory()
    found = memory.with_pool(
        needs,
        free,
        total,
        device=device.name,
        sequences=sequences,
        per_sequence=-(-engine.limits.max_seq_len // engine.kv_cache.block_size),
        gpu_memory=gpu_memory,
        kv_memory=kv_memory,
        num_blocks=num_blocks,
        others=others,
    )
    return found.blocks


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
