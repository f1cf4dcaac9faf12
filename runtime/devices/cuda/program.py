"""The launches of a plan for steps of one size: the part of the executor that knows no device.

The compiler asks for the same launches to find out which kernels an engine needs.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from llmc.errors import EngineError, LlmcError
from llmc.plugins.cuda import BatchTensors, Cache, Call, Launch, LaunchMaker, Tensor
from llmc.runtime.manifest import KvCacheSpec, Limits
from llmc.runtime.plan import DTYPES, Plan, Step, Storage, Value

if TYPE_CHECKING:
    from llmc.runtime.batch import Batch

ALIGNMENT = 256
"""Of everything that has an address of its own."""

WORD_ROWS = 64
"""Rows that a word of a tree mask covers."""


@dataclass(frozen=True)
class Bucket:
    """The sizes of a step, rounded up, so that few of them are ever prepared.

    ``rows``: tokens; ``logit_rows``: those whose logits are computed; ``longest``: rows of one sequence;
    ``tree_words``: 0 where no sequence has a tree.
    """

    rows: int
    logit_rows: int
    sequences: int
    max_blocks: int
    longest: int
    tree_words: int = 0

    @property
    def is_decode(self) -> bool:
        """Whether each sequence has one row, or a tree: then the step is replayed as a graph."""
        return self.longest == 1 or self.tree_words > 0


@dataclass(frozen=True)
class Inputs:
    """Byte offsets of the arrays of a batch in the memory that one copy fills."""

    offsets: Mapping[str, int]
    size: int

    def write(self, batch: Batch, bucket: Bucket, host: NDArray[np.uint8]) -> None:
        """Put the arrays of a batch where they belong, and nothing where the bucket is larger."""

        def put(name: str, array: NDArray[Any]) -> None:
            data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            host[self.offsets[name] : self.offsets[name] + len(data)] = data

        rows, blocks = len(batch.input_ids), batch.block_tables
        host[: self.size] = 0
        count = len(batch.num_computed)
        put("input_ids", batch.input_ids)
        put("position_ids", batch.position_ids)
        put("logit_rows", batch.logit_rows)
        ends = np.full(bucket.sequences + 1, rows, np.int32)
        ends[: count + 1] = batch.cu_seqlens
        put("cu_seqlens", ends)
        put("num_computed", batch.num_computed)
        table = np.zeros((bucket.sequences, bucket.max_blocks), np.int32)
        width = min(bucket.max_blocks, blocks.shape[1])
        table[:count, :width] = blocks[:, :width]
        put("block_tables", table)
        adapters = np.full((bucket.rows + bucket.logit_rows,), -1, np.int32)
        if batch.adapters is not None:
            of_rows = np.repeat(batch.adapters, np.diff(batch.cu_seqlens))
            adapters[: len(of_rows)] = of_rows
            adapters[bucket.rows :][: len(batch.logit_rows)] = of_rows[batch.logit_rows]
        put("adapters", adapters[: bucket.rows])
        put("row_adapters", adapters[bucket.rows :])
        if batch.tree_mask is not None:
            mask = np.zeros((bucket.rows, bucket.tree_words), np.uint64)
            words = min(bucket.tree_words, batch.tree_mask.shape[1])
            mask[:rows, :words] = batch.tree_mask[:, :words]
            put("tree_mask", mask)

    @staticmethod
    def of(bucket: Bucket) -> Inputs:
        """Those of a bucket."""
        sizes = {
            "input_ids": 4 * bucket.rows,
            "position_ids": 4 * bucket.rows,
            "logit_rows": 4 * bucket.logit_rows,
            "cu_seqlens": 4 * (bucket.sequences + 1),
            "num_computed": 4 * bucket.sequences,
            "block_tables": 4 * bucket.sequences * bucket.max_blocks,
            "tree_mask": 8 * bucket.rows * bucket.tree_words,
            "adapters": 4 * bucket.rows,
            "row_adapters": 4 * bucket.logit_rows,
        }
        offsets, at = {}, 0
        for name, size in sizes.items():
            offsets[name] = at
            at = aligned(at + size)
        return Inputs(offsets, at)


@dataclass(frozen=True)
class Memory:
    """Where things stand on the device. ``scratch`` is used by one step after the other."""

    arena: int
    inputs: int
    weights: Mapping[str, int]
    caches: Sequence[Cache]
    scratch: int
    table: Callable[[bytes], int]


class Scratch:
    """Hands out the memory of a step, and counts what is needed."""

    def __init__(self, address: int) -> None:
        self._address, self._used = address, 0
        self.most = 0

    def __call__(self, size: int) -> int:
        """The address of so many bytes."""
        address = self._address + self._used
        self._used = aligned(self._used + size)
        self.most = max(self.most, self._used)
        return address

    def reset(self) -> None:
        """The next step begins."""
        self._used = 0


def aligned(size: int) -> int:
    """Rounded up to the alignment."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def ladder(most: int) -> list[int]:
    """Sizes up to ``most`` so that rounding up adds at most a half, and a fifth on average."""
    sizes, step = [1, 2, 3, 4, 6, 8], 8
    while sizes[-1] < most:
        sizes += [step * 3 // 2, step * 2]
        step *= 2
    return [size for size in sizes if size < most] + [most]


def rounded(size: int, most: int) -> int:
    """The size of the ladder for something of that size."""
    return next(step for step in ladder(most) if step >= size)


def buckets(limits: Limits, block_size: int) -> Iterator[Bucket]:
    """Every kind of step an executor of these limits may run, as far as the choice of kernels goes."""
    blocks = -(-limits.max_seq_len // block_size)
    for rows in ladder(limits.max_batch_tokens):
        sequences = min(rows, limits.max_sequences)
        for max_blocks in {1, blocks}:
            if rows <= limits.max_sequences:
                yield Bucket(rows, rows, sequences, max_blocks, 1)
            for longest in sorted({rows, *(1 << power for power in range(1, 12))}):
                if not 1 < longest <= rows:
                    continue
                yield Bucket(rows, rows, sequences, max_blocks, longest)
                words = -(-longest // WORD_ROWS)
                yield Bucket(rows, rows, sequences, max_blocks, longest, words)


def launch_maker(op: str) -> LaunchMaker:
    """``launches`` of plugins/<op>/cuda.py.

    Raises:
        EngineError: the op has no CUDA kernel.
    """
    found = _maker(op)
    if found is None:
        raise EngineError(f"op {op} has no CUDA kernel yet")
    return found


@cache
def _maker(op: str) -> LaunchMaker | None:
    name = f"llmc.plugins.{op}.cuda"
    if importlib.util.find_spec(name) is None:
        return None
    made: LaunchMaker = importlib.import_module(name).launches
    return made


def program(
    plan: Plan, bucket: Bucket, memory: Memory, capability: int, *, only: Callable[[Step], bool] | None = None
) -> tuple[list[list[Launch]], int]:
    """The launches of each step of the plan, and the scratch memory that the hungriest of them needs.

    Raises:
        LlmcError: there is no kernel for a step; names it.
    """
    scratch, batch = Scratch(memory.scratch), batch_tensors(bucket, memory.inputs)
    made = []
    for number, step in enumerate(plan.steps):
        if only is not None and not only(step):
            continue
        scratch.reset()
        inputs = tuple(None if name is None else tensor(plan.value(name), bucket, memory) for name in step.inputs)
        outputs = tuple(tensor(plan.value(name), bucket, memory) for name in step.outputs)
        caches = tuple(memory.caches)
        call = Call(inputs, outputs, step.attributes, batch, caches, scratch, capability, memory.table)
        try:
            made.append(launch_maker(step.op)(call))
        except LlmcError as error:
            raise type(error)(f"step {number} ({step.op} of {step.module or 'the model'}): {error}") from error
    return made, scratch.most


def batch_tensors(bucket: Bucket, inputs: int) -> BatchTensors:
    """The arrays of a batch on the device."""
    offsets = Inputs.of(bucket).offsets
    return BatchTensors(
        position_ids=inputs + offsets["position_ids"],
        cu_seqlens=inputs + offsets["cu_seqlens"],
        num_computed=inputs + offsets["num_computed"],
        block_tables=inputs + offsets["block_tables"],
        tree_mask=inputs + offsets["tree_mask"] if bucket.tree_words else 0,
        tokens=inputs + offsets["input_ids"],
        rows=bucket.rows,
        sequences=bucket.sequences,
        max_blocks=bucket.max_blocks,
        tree_words=bucket.tree_words,
        longest=bucket.longest,
    )


def tensor(value: Value, bucket: Bucket, memory: Memory) -> Tensor:
    """A value of the plan in a step of that size."""
    sizes = bucket.rows, bucket.logit_rows
    if value.storage is Storage.ARENA:
        assert isinstance(value.base, int)
        base = memory.arena + value.base
    elif value.storage is Storage.WEIGHT:
        base = memory.weights[str(value.base)]
    else:
        base = memory.inputs + Inputs.of(bucket).offsets[str(value.base)]
    address = base + value.offset.at(*sizes) * DTYPES[value.dtype]
    shape, strides = (tuple(dim.at(*sizes) for dim in dims) for dims in (value.shape, value.strides))
    return Tensor(address, value.dtype, shape, strides)


def caches(plan: Plan, spec: KvCacheSpec, blocks: int, base: int) -> tuple[tuple[Cache, ...], int]:
    """The slots of the pool, one behind the other from an address, and the bytes of it all.

    Raises:
        EngineError: keys and values can't be kept so on CUDA.
    """
    attention = importlib.import_module("llmc.plugins.paged_attention.cuda")
    found, at = [], base
    for slot in plan.kv_slots:
        sizes = attention.array_bytes(slot.kv_heads, slot.key_dim, slot.value_dim, spec.dtype, spec.block_size, blocks)
        places = []
        for size in sizes:
            places.append(at if size else 0)
            at += aligned(size)
        keys, values, key_scales, value_scales = places
        where = Cache(keys, values, key_scales, value_scales, spec.dtype, spec.block_size, slot.window)
        found.append(where)
    return tuple(found), at - base
