"""What an engine takes of a device's memory, before anything is allocated: a build tells it, and a load follows it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

from llmc.errors import ResourceError, UsageError
from llmc.plugins.cuda import capability_of
from llmc.runtime import resources
from llmc.runtime.devices.cuda.draws import draws_bytes
from llmc.runtime.devices.cuda.program import (
    WORD_ROWS,
    Bucket,
    Inputs,
    Memory,
    aligned,
    caches,
    ladder,
    program,
)
from llmc.runtime.fusing import fuse_gates
from llmc.runtime.kv_budget import MAX_LOGIT_BYTES

if TYPE_CHECKING:
    from llmc.runtime.engine import Engine, Weight
    from llmc.runtime.manifest import KvCacheSpec, Limits
    from llmc.runtime.plan import Plan

SHARE = 0.9
"""Of the memory of a device: what an engine takes by default."""

RESERVE = 0.02
"""Of it: what nobody takes, for the driver's own needs."""

LAUNCH_BYTES = 1024
"""What a launch in a graph is taken to need. An allowance: nobody has measured it."""

POOL_STEP = 64
"""Blocks whose size is measured, so that alignment does not count."""

PLACE = 1 << 40
"""Where memory is thought to begin while sizes are looked for; far more than aligned."""


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes of device memory. ``step``: the inputs of a step, twice with what sampling needs; ``block``: of the cache.

    ``weights``, ``activations``, ``step``, ``scratch`` and the cache are exact. ``kernels`` is the size of their files,
    and ``graphs`` an allowance for each launch of as many graphs as are kept: not verified on hardware.
    """

    weights: int
    activations: int
    step: int
    scratch: int
    kernels: int
    graphs: int
    block: int
    block_size: int
    blocks: int = 0

    @property
    def fixed(self) -> int:
        """All but the cache."""
        return self.weights + self.activations + self.step + self.scratch + self.kernels + self.graphs

    @property
    def pool(self) -> int:
        """The KV cache."""
        return self.block * self.blocks

    def tokens_on(self, room: int) -> int:
        """Tokens that the cache holds if all of this takes so many bytes."""
        return max(0, room - self.fixed) // self.block * self.block_size

    def to_json(self) -> dict[str, int]:
        """All figures."""
        return asdict(self) | {"kv_cache": self.pool, "total": self.fixed + self.pool}

    def __str__(self) -> str:
        parts = (
            *(("weights", self.weights), ("KV cache", self.pool), ("activations", self.activations)),
            *(("inputs", self.step), ("scratch", self.scratch), ("kernels", self.kernels), ("graphs", self.graphs)),
        )
        shown = ", ".join(f"{name} {size / 2**20:.1f}" for name, size in parts)
        return f"{(self.fixed + self.pool) / 2**20:.1f} MiB of device memory ({shown})"


@dataclass(frozen=True)
class BucketSize:
    """What a step of one size launches, and the scratch memory and inputs that it takes."""

    name: str
    launches: int
    scratch: int
    inputs: int


def plan_of(engine: Engine, arch: str, beside: Engine | None = None) -> MemoryPlan:
    """That of an engine with the kernels of an architecture; without what it shares with another on the device.

    ``beside``: the other one. Parts of an engine share its weights and kernels, a draft engine has its own.
    """
    files = engine.manifest.files
    kernels = sum(entry.size for name, entry in files.items() if name.startswith(f"kernels-{arch}/"))
    if beside is not None and files is beside.manifest.files:
        kernels = 0
    plan, capability = fuse_gates(engine.plan), capability_of(arch)
    weights = sum(aligned(weight.data.nbytes) for weight in own_weights(engine, beside).values())
    return measure(plan, engine.kv_cache, engine.limits, weights, kernels, capability)


def own_weights(engine: Engine, beside: Engine | None) -> Mapping[str, Weight]:
    """Those that another engine on the same device does not have."""
    there = {} if beside is None else beside.weights
    return {name: weight for name, weight in engine.weights.items() if there.get(name) is not weight}


def measure(plan: Plan, spec: KvCacheSpec, limits: Limits, weights: int, kernels: int, capability: int) -> MemoryPlan:
    """That of a plan; the weights and the kernels take so many bytes."""
    sizes = list(bucket_sizes(plan, spec, limits, capability))
    blocks = -(-limits.max_seq_len // spec.block_size)
    # Decodes have a graph for each size. Trees come in many more sizes: they share room for as many.
    graphs = len(ladder(limits.max_sequences)) * len(ladder(blocks))
    launches = max(size.launches for size in sizes[:2]) + sizes[3].launches
    pool = caches(plan, spec, POOL_STEP, 0)[1]
    return MemoryPlan(
        weights=weights,
        activations=aligned(plan.arena_bytes),
        step=max(size.inputs for size in sizes) + draws_bytes(limits, plan.value(plan.logits).shape[1].constant),
        scratch=max(size.scratch for size in sizes),
        kernels=kernels,
        graphs=graphs * launches * LAUNCH_BYTES,
        block=max(1 if plan.kv_slots else 0, pool // POOL_STEP),
        block_size=spec.block_size,
    )


def bucket_sizes(plan: Plan, spec: KvCacheSpec, limits: Limits, capability: int) -> Iterator[BucketSize]:
    """Those of the smallest and the largest decodes, the longest prefill, and trees as large as it."""
    blocks, rows, sequences = -(-limits.max_seq_len // spec.block_size), limits.max_batch_tokens, limits.max_sequences
    slots, _ = caches(plan, spec, 1, PLACE)
    memory = Memory(PLACE, PLACE, {str(v.base): PLACE for v in plan.values}, slots, PLACE, lambda _: PLACE)
    vocabulary = plan.value(plan.logits).shape[1].constant
    logits = min(rows, max(sequences, MAX_LOGIT_BYTES // (4 * vocabulary)))
    most = min(rows, sequences)
    for name, bucket in (
        ("decode of 1 sequence", Bucket(1, 1, 1, blocks, 1)),
        (f"decode of {most} sequences", Bucket(most, most, most, blocks, 1)),
        (f"prefill of {rows} tokens", Bucket(rows, logits, sequences, blocks, rows)),
        (f"trees of {rows} tokens", Bucket(rows, logits, sequences, blocks, rows, -(-rows // WORD_ROWS))),
    ):
        steps, scratch = program(plan, bucket, memory, capability)
        yield BucketSize(name, sum(map(len, steps)), scratch, Inputs.of(bucket).size)


def budget(gpu_memory: int | float | str | None, total: int) -> int:
    """Bytes of a device: of a share such as ``0.9`` or ``90%``, or a size such as ``40GiB``.

    Raises:
        UsageError: it is neither.
    """
    given = SHARE if gpu_memory is None else gpu_memory
    text = str(given).strip()
    try:
        share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        share = 2.0
    if text.endswith("%") or share <= 1:
        if not 0 < share <= 1:
            raise UsageError(f"gpu_memory: {given!r} is not more than 0 and at most 1 (or 100%)")
        return int(share * total)
    return resources.parse_size(text)


def with_pool(
    needs: MemoryPlan,
    free: int,
    total: int,
    *,
    device: str,
    sequences: int,
    per_sequence: int,
    gpu_memory: int | float | str | None,
    kv_memory: int | str | None,
    num_blocks: int | None,
    others: tuple[int, int] = (0, 0),
) -> MemoryPlan:
    """The plan with the blocks of the cache: as many as are asked for, or as fit.

    Args:
        needs: all but the cache.
        free: bytes of the device.
        total: the same, used ones included.
        device: its name.
        sequences: that run at one time; more blocks than they can fill are not taken.
        per_sequence: blocks of one at full length.
        gpu_memory: see `budget`.
        kv_memory: bytes of the cache.
        num_blocks: the same in blocks.
        others: bytes that a draft engine takes, and those for each block of this one.

    Raises:
        ResourceError: it does not fit; says what is needed and what there is.
        UsageError: options exclude each other, or are out of bounds.
    """
    given = [name for name, value in (("kv_memory", kv_memory), ("num_blocks", num_blocks)) if value is not None]
    if len(given) > 1:
        raise UsageError("num_blocks and kv_memory exclude each other")
    allowed = budget(gpu_memory, total)
    room = min(allowed, free - int(RESERVE * total)) - needs.fixed - others[0]
    block = needs.block + others[1]
    if num_blocks is not None:
        if num_blocks < 1:
            raise UsageError(f"num_blocks: {num_blocks} is less than 1")
        wanted = num_blocks
    elif kv_memory is not None:
        wanted = min(resources.parse_size(kv_memory) // block, per_sequence * sequences)
        if wanted < 1:
            raise ResourceError(f"kv_memory: {kv_memory} is less than one block of {block} bytes")
    else:
        wanted = max(per_sequence, min(room // block, per_sequence * sequences))
    if wanted * block > room:
        what = f"{wanted} blocks" if given else f"one sequence of {per_sequence * needs.block_size} tokens"
        raise ResourceError(
            f"the KV cache of {what} needs {wanted * block} bytes of device memory, but {max(room, 0)} are left on "
            f"{device}: {free} of {total} are free, of which the engine may take {allowed} (gpu_memory), and "
            f"{needs.weights} are for weights, {needs.activations} for activations, "
            f"{needs.fixed - needs.weights - needs.activations + others[0]} for inputs, scratch, kernels and graphs"
            f"{' and the draft engine' if others[0] else ''}; set gpu_memory or kv_memory, or build with a smaller "
            "--max-seq-len or --max-batch-tokens"
        )
    return replace(needs, blocks=wanted)
