"""Runs the plan of an engine on a CUDA device.

A step is one copy of the batch to the device (and one of what tokens are drawn with), the launches of its bucket, one
copy back and one wait. What comes back are tokens, and logits of rows only where the host needs them. The launches of a
bucket are made when it is first met; those of decodes and trees are recorded as a graph.
"""

from __future__ import annotations

import functools
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from llmc.errors import EngineError, KernelError
from llmc.plugins.cuda import Launch, Tensor, capability_of
from llmc.runtime.batch import Batch, Chosen, Draws
from llmc.runtime.devices.cuda import targets
from llmc.runtime.devices.cuda.device import Device
from llmc.runtime.devices.cuda.draws import MOST_CHANGES, draws_bytes, place, without
from llmc.runtime.devices.cuda.draws import launches as sampling
from llmc.runtime.devices.cuda.graphs import Graphs
from llmc.runtime.devices.cuda.memory import LAUNCH_BYTES, own_weights, plan_of
from llmc.runtime.devices.cuda.moves import Moves
from llmc.runtime.devices.cuda.program import (
    WORD_ROWS,
    Bucket,
    Inputs,
    Memory,
    aligned,
    caches,
    program,
    rounded,
    tensor,
)
from llmc.runtime.devices.cuda.rows import Rows
from llmc.runtime.engine import Engine
from llmc.runtime.lora import input_factors

CLOSE_SECONDS = 5.0
"""For a step that runs to end."""


class CudaExecutor:
    """Implements ``runtime.batch.DraftExecutor`` and ``SamplingExecutor`` for engines with a target such as cuda:sm_90.

    Args:
        engine: what to run; its weights are copied to the device.
        device: where; the executor's own from now on.
        num_blocks: blocks of the KV cache.
        beside: the executor of the model that the engine is a part of: device and weights are shared, and it closes
            both.

    Raises:
        EngineError: the engine has no kernels for this device, or not those that this version asks for.
        ResourceError: the memory of the device does not suffice.
    """

    def __init__(self, engine: Engine, device: Device, *, num_blocks: int, beside: CudaExecutor | None = None) -> None:
        plan = engine.plan
        if plan.state_slots:
            raise EngineError(f"{engine.path}: the plan keeps recurrent state, which this version can't run")
        self.engine, self.device, self.plan, self.num_blocks = engine, device, plan, num_blocks
        self._arch = targets.choose(engine.path, engine.manifest, device.capability, device.name)
        self.isa = f"{self._arch} on {device.name}"
        needs = plan_of(engine, self._arch, None if beside is None else beside.engine)
        self.memory = replace(needs, blocks=num_blocks)
        self.vocab_size = plan.value(plan.logits).shape[1].constant
        self.most_changes, self.most_masks = MOST_CHANGES, engine.limits.max_sequences
        self._known = _kernels(engine)
        self._lock: threading.Lock = threading.Lock() if beside is None else beside._lock
        limits = engine.limits
        self._blocks = -(-limits.max_seq_len // engine.kv_cache.block_size)
        self._largest = Bucket(
            limits.max_batch_tokens,
            limits.max_batch_tokens,
            limits.max_sequences,
            self._blocks,
            limits.max_batch_tokens,
            -(-limits.max_batch_tokens // WORD_ROWS),
        )
        self._allocate(beside)
        self._loaded: set[str] = set() if beside is None else beside._loaded
        self._prepared: dict[Bucket, list[list[Launch]]] = {}
        self._graphs = Graphs(device, self.memory.graphs // LAUNCH_BYTES)
        self._head = plan.head

    def step(self, batch: Batch) -> NDArray[np.float32]:
        """Logits [N, vocabulary]; the array is the executor's own and valid until the next step.

        Raises:
            KernelError: the batch contradicts the engine's limits, or a token id is out of range.
        """
        with self._open():
            bucket, count = self._compute(batch), len(batch.logit_rows)
            return self._rows(bucket, count, self.plan.logits)[0]

    def run_on(self, batch: Batch, name: str, rows: NDArray[np.float32], begin: int = 0) -> NDArray[np.float32]:
        """Logits of a plan whose steps from ``begin`` on read a value that is written from outside; until the next run.

        Steps before are left away.

        Raises:
            KernelError: as step.
        """
        with self._open():
            bucket, count = self._send(batch), len(batch.logit_rows)
            given = tensor(self.plan.value(name), bucket, self._memory)
            self._results.send(name, given, rows)
            self._launch(bucket, begin)
            parts = tensor(self.plan.value(self.plan.logits), bucket, self._memory).shape[0] // bucket.logit_rows
            (logits,) = self._rows(bucket, (parts - 1) * bucket.logit_rows + count, self.plan.logits)
            each = [logits[part * bucket.logit_rows :][:count] for part in range(parts)]
            return each[0] if parts == 1 else np.concatenate(each)

    def features(self) -> NDArray[np.float32]:
        """What the plan calls features, [T, width] of the last batch, side by side; a copy."""
        with self._open():
            return np.concatenate(self._rows(*self._last, *self.plan.features), axis=1)

    def choose(
        self, batch: Batch, draws: Callable[[], Draws | None], *, hidden: bool
    ) -> tuple[NDArray[np.float32] | None, NDArray[np.float32], Chosen | None]:
        """Tokens for the rows that are wanted, logits as of `step` for the others, rows as of `embed` if asked for.

        There is one wait for all of it.

        Raises:
            KernelError: as step; or the plan has no head.
        """
        with self._open():
            bucket, count = self._send(batch), len(batch.logit_rows)
            if hidden:
                self._fetch_hidden(bucket, count)
            self._launch(bucket, self._head or 0 if hidden else 0)
            try:
                wanted = draws()  # the device computes meanwhile
            except BaseException:
                self.device.sync()  # before the next step uses the same memory
                raise
            if wanted is None:
                (rows,) = self._rows(bucket, count, self.plan.logits)
                return self._hidden(bucket, count) if hidden else None, rows, None
            logits = tensor(self.plan.value(self.plan.logits), bucket, self._memory)
            found = self._sample(replace(logits, shape=(count, self.vocab_size)), wanted)
            (rows,) = self._rows(bucket, count, self.plan.logits, wanted=~wanted.wanted)
            before = self._hidden(bucket, count) if hidden else None
            tokens, scores = np.split(found.copy(), 2)

        def again(row: int, token: int, number: float) -> tuple[int, float]:
            with self._open():
                place = logits.address + 4 * row * logits.strides[0]
                one = replace(logits, address=place, shape=(1, self.vocab_size))
                found = self._sample(one, without(wanted, row, token, number))
                self.device.sync()
                return int(found[:4].view(np.int32)[0]), float(found[4:].view(np.float32)[0])

        return before, rows, Chosen(wanted.wanted, tokens.view(np.int32), scores.view(np.float32), again)

    def _sample(self, logits: Tensor, draws: Draws) -> NDArray[np.uint8]:
        """Tokens and then scores of rows of logits, after the next wait."""
        placed = place(draws, self._draws, self._drawn)
        self.device.send(self._draws, self._drawn[: placed.size])
        launches = sampling(logits, draws, placed)
        self._load(launches)
        self.device.run(launches)
        found = self._drawn[placed.size : placed.size + 8 * draws.count]
        self.device.fetch(found, placed.rows["tokens"])
        return found

    def embed(self, batch: Batch, *, logits: bool) -> tuple[NDArray[np.float32], NDArray[np.float32] | None]:
        """What goes into the head of the model, [N, hidden size], a copy; and logits as of `step` if asked for.

        Raises:
            KernelError: as step; or the plan has no head.
        """
        with self._open():
            bucket, count = self._send(batch), len(batch.logit_rows)
            self._fetch_hidden(bucket, count)
            if logits:
                self._launch(bucket, self._head or 0)
            found = self._rows(bucket, count, *((self.plan.logits,) if logits else ()))
            return self._hidden(bucket, count), found[0] if found else None

    def _fetch_hidden(self, bucket: Bucket, count: int) -> None:
        """Run the steps before the head, and have its input copied."""
        if self._head is None:
            raise KernelError("the plan has no product that makes the logits, and so no embeddings")
        self._launch(bucket, 0, self._head)
        self._results.fetch(*self._head_input(bucket), count, None)

    def _hidden(self, bucket: Bucket, count: int) -> NDArray[np.float32]:
        """What `_fetch_hidden` has brought, after a wait; a copy."""
        found = self._results.rows(*self._head_input(bucket), count)
        factors = self._head_factors  # a calibrated method has folded them into the norm
        return found.copy() if factors is None else found * factors

    def _head_input(self, bucket: Bucket) -> tuple[str, Tensor]:
        name = str(self.plan.steps[self._head or 0].inputs[0])
        return name, tensor(self.plan.value(name), bucket, self._memory)

    @functools.cached_property
    def _head_factors(self) -> NDArray[np.float32] | None:
        return None if self._head is None else input_factors(self.engine, self.plan.steps[self._head])

    def move_positions(self, blocks: NDArray[np.int32], sources: NDArray[np.int32], targets: NDArray[np.int32]) -> None:
        """Copy what the cache holds of positions of a sequence with these blocks, one after the other, in all slots."""
        if not len(sources):
            return
        with self._open():
            launches = self._moves.launches(self.plan.kv_slots, blocks, sources, targets)
            self._load(launches)
            self.device.run(launches)

    def close(self) -> None:
        """Give back the memory of the device. A step that hangs keeps it until the process ends."""
        if self._lock.acquire(timeout=CLOSE_SECONDS):
            try:
                self._closed = True
                self.device.close()
            finally:
                self._lock.release()

    @contextmanager
    def _open(self) -> Iterator[None]:
        """While nobody closes it."""
        with self._lock:
            if self._closed:
                raise KernelError(f"{self.engine.path}: the engine is closed")
            yield

    # ----------------------------------------------------------------------------------------------------- a step
    def _compute(self, batch: Batch) -> Bucket:
        """Start a step, up to its logits."""
        bucket = self._send(batch)
        self._launch(bucket)
        return bucket

    def _launch(self, bucket: Bucket, begin: int = 0, end: int | None = None) -> None:
        """Run some steps, by default all."""
        steps = self._prepare(bucket)

        def launches() -> list[Launch]:
            return [launch for step in steps[begin:end] for launch in step]

        if bucket.is_decode:
            self._graphs.replay((bucket, begin, end), launches)
        else:
            self.device.run(launches())

    def _send(self, batch: Batch) -> Bucket:
        """Check the batch and copy it to the device."""
        bucket = self._bucket(batch)
        ids = batch.input_ids
        self._last = bucket, len(ids)
        if len(ids) and not 0 <= ids.min() <= ids.max() < self.engine.model.vocab_size:
            raise KernelError(f"token id {ids.min() if ids.min() < 0 else ids.max()} is out of range")
        blocks = batch.block_tables
        if blocks.size and not 0 <= blocks.min() <= blocks.max() < self.num_blocks:
            raise KernelError(f"block {blocks.max()} of {self.num_blocks}")
        inputs = Inputs.of(bucket)
        inputs.write(batch, bucket, self._host)
        self.device.send(self._memory.inputs, self._host[: inputs.size])
        return bucket

    def _bucket(self, batch: Batch) -> Bucket:
        limits, rows, count = self.engine.limits, len(batch.input_ids), len(batch.num_computed)
        lengths = np.diff(batch.cu_seqlens)
        if not 1 <= rows <= limits.max_batch_tokens or not 1 <= count <= limits.max_sequences:
            raise KernelError(f"a step of {rows} rows of {count} sequences is beyond what the engine was built for")
        ends = batch.num_computed + lengths
        if ends.max() > limits.max_seq_len:
            raise KernelError(f"a sequence of {ends.max()} tokens is beyond the engine's {limits.max_seq_len}")
        longest = int(lengths.max())
        size = self.engine.kv_cache.block_size
        padded = rounded(rows, limits.max_batch_tokens)
        return Bucket(
            rows=padded,
            logit_rows=rounded(max(1, len(batch.logit_rows)), limits.max_batch_tokens),
            sequences=rounded(count, limits.max_sequences),
            max_blocks=rounded(-(-int(ends.max()) // size), self._blocks),
            longest=min(padded, rounded(longest, limits.max_batch_tokens)),
            tree_words=0 if batch.tree_mask is None else -(-longest // WORD_ROWS),
        )

    def _prepare(self, bucket: Bucket) -> list[list[Launch]]:
        """The launches of each step."""
        if bucket not in self._prepared:
            steps, scratch = program(self.plan, bucket, self._memory, capability_of(self._arch))
            if scratch > self._scratch_bytes:  # earlier graphs go on with what they have
                self._grow(scratch)
                steps, _ = program(self.plan, bucket, self._memory, capability_of(self._arch))
            self._load([launch for step in steps for launch in step])
            self._prepared[bucket] = steps
        return self._prepared[bucket]

    def _rows(
        self, bucket: Bucket, count: int, *names: str, wanted: NDArray[np.bool_] | None = None
    ) -> list[NDArray[np.float32]]:
        """The first rows of values of the last step, once it is done; of others than wanted ones nothing is valid."""
        tensors = {name: tensor(self.plan.value(name), bucket, self._memory) for name in names}
        for name, found in tensors.items():
            self._results.fetch(name, found, count, wanted)
        self.device.sync()
        self._moves.used = 0
        return [self._results.rows(name, found, count) for name, found in tensors.items()]

    # ----------------------------------------------------------------------------------------------------- loading
    _memory: Memory
    _host: NDArray[np.uint8]
    _drawn: NDArray[np.uint8]
    _moves: Moves
    _results: Rows
    _last: tuple[Bucket, int]
    """The last batch, and its tokens."""
    _draws: int
    _closed = False

    def _allocate(self, beside: CudaExecutor | None) -> None:
        """The three arenas, and what a batch takes."""
        device, engine, plan = self.device, self.engine, self.plan
        inputs, drawn = Inputs.of(self._largest).size, draws_bytes(engine.limits, self.vocab_size)
        self._host, self._drawn = device.host(inputs), device.host(drawn)
        self._results = Rows(device)
        offsets, at = {}, 0
        own = own_weights(engine, None if beside is None else beside.engine)
        for name, weight in own.items():
            offsets[name], at = at, at + aligned(weight.data.nbytes)
        weights = device.alloc(max(at, 1), "weights")
        for name, weight in own.items():
            device.put(weights + offsets[name], weight.data)
        engine.release_pages()
        shared = {} if beside is None else dict(beside._memory.weights)
        _, pool = caches(plan, engine.kv_cache, self.num_blocks, 0)
        base = device.alloc(max(pool, 1), f"the KV cache of {self.num_blocks} blocks")
        arena = device.alloc(max(plan.arena_bytes, 1), "activations")
        for address, size in ((base, pool), (arena, plan.arena_bytes)):
            device.fill(address, 0, size)
        self._tables: dict[bytes, int] = {}
        self._draws = device.alloc(drawn, "what tokens are drawn with")
        self._scratch_bytes = self.memory.scratch
        self._memory = Memory(
            arena=arena,
            inputs=device.alloc(inputs, "the inputs of a step"),
            weights=(shared | {name: weights + offset for name, offset in offsets.items()}),
            caches=caches(plan, engine.kv_cache, self.num_blocks, base)[0],
            scratch=device.alloc(max(self._scratch_bytes, 1), "the scratch memory of a step"),
            table=self._table,
        )
        self._moves = Moves(device, self._memory, inputs)

    def _grow(self, size: int) -> None:
        self._scratch_bytes = size
        fields = {**vars(self._memory), "scratch": self.device.alloc(size, "the scratch memory of a step")}
        self._memory = Memory(**fields)

    def _table(self, data: bytes) -> int:
        if data not in self._tables:
            self._tables[data] = self.device.alloc(len(data), "a table")
            self.device.put(self._tables[data], np.frombuffer(data, np.uint8))
        return self._tables[data]

    def _load(self, launches: list[Launch]) -> None:
        """Load kernels that are met for the first time."""
        images = {}
        for launch in launches:
            name = launch.kernel.name
            if name in self._loaded or name in images:
                continue
            image = self.engine.read(targets.kernel_file(self._arch, name))
            if image is None or self._known.get(name) != targets.fingerprint(launch.kernel):
                raise EngineError(
                    f"{self.engine.path}: built by llmc {self.engine.manifest.llmc}, it lacks kernel {name} as this "
                    f"version has it; build it anew with: {targets.rebuild(self.engine)}"
                )
            images[name] = image
        if images:
            self.device.load(images)
            self._loaded |= images.keys()


def _kernels(engine: Engine) -> Mapping[str, str]:
    found: Mapping[str, str] = json.loads(engine.read(targets.KERNELS) or b"{}")
    return found
