"""Runs engines on the CPU: hands the plan and the mapped weights to native code, then one call for each batch."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterable
from collections.abc import Sequence as ListOf
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from llmc import debug
from llmc.errors import EngineError, KernelError, ResourceError
from llmc.plugins import _kernels, kernels
from llmc.runtime import resources
from llmc.runtime.batch import Batch
from llmc.runtime.devices.timeline import Timeline
from llmc.runtime.engine import Engine
from llmc.runtime.lora import input_factors
from llmc.runtime.plan import ADAPTER_INPUTS, BATCH_INPUTS, Dim, Plan, Storage, Value

POISON = False
"""Default of CpuExecutor's ``poison``; tests turn it on."""


class Observer(Protocol):
    """Something that wants to know when steps ran."""

    def add(self, batch: Batch, begin_ns: int, end_ns: int, steps: ListOf[tuple[int, int, int]]) -> None:
        """One run of the plan, and (step, begin, end) of each of its steps, in nanoseconds of ``perf_counter_ns``."""
        ...


class CpuExecutor:
    """Implements ``runtime.batch.Executor`` for engines with the target cpu.

    Memory for the arena and the KV cache is reserved here and taken when it is first written. One batch runs at a time;
    the global interpreter lock is free while it does.

    Args:
        engine: what to run; its weights are used where they are mapped.
        num_blocks: blocks of the KV cache.
        threads: default: the physical cores that this process may use.
        isa: one of ``llmc.plugins.kernels.isas()``; default: the best. Logits have the same bits for any batch and any
            number of threads, but not on another instruction set.
        poison: fill the arena before each batch, and the cache at the start, with NaN, so that what is read without
            having been written shows.

    Raises:
        EngineError: the plan names something that this version does not have.
        KernelError: the instruction set is not available here.
        ResourceError: there is no memory for the arena or the KV cache.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        num_blocks: int,
        threads: int | None = None,
        isa: str | None = None,
        poison: bool | None = None,
    ) -> None:
        plan = engine.plan
        if plan.state_slots:
            raise EngineError(f"{engine.path}: the plan keeps recurrent state, which this version can't run")
        self.isa = kernels.best_isa() if isa is None else isa
        if self.isa not in kernels.isas():
            raise KernelError(f"isa {self.isa!r} is not available here; choose one of {', '.join(kernels.isas())}")
        self.threads = resources.physical_cores() if threads is None else threads
        self.plan = plan
        self.num_blocks = num_blocks
        self.beside: list[CpuExecutor] = []
        """Others that keep something of the same positions in blocks of the same numbers."""
        self._index = {value.name: number for number, value in enumerate(plan.values)}
        self._logits = self._index[plan.logits]
        self._head = plan.head
        self._engine = engine
        poison = POISON if poison is None else poison
        self._native = self._make(engine, poison)
        if poison:
            self.poison_blocks(range(num_blocks))
        path = debug.trace_file()
        self._observers: list[Observer] = []
        if path is not None:
            self.observe(Timeline(path, plan.steps))

    def step(self, batch: Batch) -> NDArray[np.float32]:
        """Logits [N, vocabulary]; the array is the executor's own and valid until the next step.

        Raises:
            KernelError: the batch contradicts itself or the engine's limits, or a token id is out of range. Says which
                op of which module found it.
        """
        self.run(batch)
        return self._native.view(self._logits)

    def step_greedily(self, batch: Batch) -> tuple[NDArray[np.float32], list[int], list[float]]:
        """The same, and of each row the first of its largest logits, and this; NaN is the largest.

        Raises:
            KernelError: as step.
        """
        self.run(batch, choose_from=self._logits)
        return self._native.view(self._logits), *self._native.chosen()

    def embed(self, batch: Batch, *, logits: bool) -> tuple[NDArray[np.float32], NDArray[np.float32] | None]:
        """What goes into the head of the model, [N, hidden size], a copy; and logits as of `step` if asked for.

        Raises:
            KernelError: as step; or the plan has no head.
        """
        if self._head is None:
            raise KernelError("the plan has no product that makes the logits, and so no embeddings")
        self.run(batch, self._head)
        rows = self.read(str(self.plan.steps[self._head].inputs[0]))
        if (factors := self._head_factors) is not None:  # a calibrated method has folded them into the norm
            rows *= factors
        if not logits:
            return rows, None
        self._native.resume(self._head, len(self.plan.steps))
        return rows, self._native.view(self._logits)

    @functools.cached_property
    def _head_factors(self) -> NDArray[np.float32] | None:
        return None if self._head is None else input_factors(self._engine, self.plan.steps[self._head])

    def run(self, batch: Batch, upto: int | None = None, choose_from: int = -1) -> None:
        """Run the first ``upto`` steps of the plan, by default all."""
        count = len(self.plan.steps) if upto is None else upto
        begin = time.perf_counter_ns()
        inputs = batch.input_ids, batch.logit_rows, kernels.native_batch(batch)
        self._native.run(*inputs, count, batch.adapters, choose_from)
        if self._observers:
            end, times = time.perf_counter_ns(), self._native.take_times()
            for observer in self._observers:
                observer.add(batch, begin, end, times)

    def run_on(self, batch: Batch, name: str, rows: NDArray[np.float32], begin: int = 0) -> NDArray[np.float32]:
        """Logits of a plan whose steps from ``begin`` on read a value that is written from outside; until the next run.

        Steps before are left away.
        """
        self.run(batch, 0)
        self._native.view(self._index[name])[:] = rows
        self._native.resume(begin, len(self.plan.steps))
        return self._native.view(self._logits)

    def features(self) -> NDArray[np.float32]:
        """What the plan calls features, [T, width] of the last batch, side by side; a copy."""
        return np.concatenate([self.read(name) for name in self.plan.features], axis=1)

    def observe(self, observer: Observer) -> None:
        """Tell it of every run from now on, and when each step of the plan began and ended."""
        self._observers.append(observer)
        self._native.trace(True)

    def forget(self, observer: Observer) -> None:
        """The contrary of `observe`."""
        self._observers.remove(observer)
        self._native.trace(bool(self._observers))

    def read(self, name: str) -> NDArray[Any]:
        """A copy of a value as of the last run, for debugging; bfloat16 comes as the uint16 of its bits.

        Later steps reuse the memory of earlier ones: run with ``upto`` = the step that writes the value, plus one.
        """
        if name not in self._index:
            raise KernelError(f"the plan has no value {name!r}")
        return self._native.view(self._index[name]).copy()

    def copy_block(self, source: int, target: int) -> None:
        """Copy a block of the KV cache, in all slots."""
        self._native.copy_block(source, target)

    def move_positions(self, blocks: NDArray[np.int32], sources: NDArray[np.int32], targets: NDArray[np.int32]) -> None:
        """Copy what the cache holds of positions of a sequence with these blocks, one after the other, in all slots."""
        self._native.move_positions(blocks, sources, targets)

    def poison_blocks(self, blocks: Iterable[int]) -> None:
        """Fill blocks of the KV cache with NaN, also of those beside."""
        for block in blocks:
            for executor in (self, *self.beside):
                executor._native.poison_block(block)

    def _make(self, engine: Engine, poison: bool) -> _kernels.Executor:
        plan = engine.plan
        weights = {name: number for number, name in enumerate(engine.weights)}
        try:
            return _kernels.Executor(
                values=[_value(value, weights) for value in plan.values],
                steps=self._steps(plan),
                arena_bytes=plan.arena_bytes,
                weights=[weight.data for weight in engine.weights.values()],
                kv_slots=[(slot.kv_heads, slot.key_dim, slot.value_dim) for slot in plan.kv_slots],
                kv_dtype=engine.kv_cache.dtype,
                block_size=engine.kv_cache.block_size,
                blocks=self.num_blocks,
                threads=self.threads,
                isa=self.isa,
                poison=poison,
            )
        except KernelError as error:
            raise EngineError(f"{engine.path}: {error}") from error
        except MemoryError as error:
            raise ResourceError(
                f"no memory for {plan.arena_bytes} bytes of activations and {self.num_blocks} blocks of KV cache; use "
                "fewer blocks or smaller limits"
            ) from error

    def _steps(self, plan: Plan) -> list[tuple[str, str, list[int], list[int], dict[str, Any]]]:
        """(op, module, inputs, outputs, attributes), values by number."""
        return [
            (
                step.op,
                step.module,
                [-1 if name is None else self._index[name] for name in step.inputs],
                [self._index[name] for name in step.outputs],
                dict(step.attributes),
            )
            for step in plan.steps
        ]


def _value(
    value: Value, weights: dict[str, int]
) -> tuple[str, str, int, str, list[tuple[int, int, int]], list[tuple[int, int, int]], tuple[int, int, int]]:
    """(name, storage, base, dtype, shape, strides, offset), the base as a number."""
    if value.storage is Storage.ARENA:
        base = value.base
    else:
        inputs = (*BATCH_INPUTS, *ADAPTER_INPUTS)
        base = weights[str(value.base)] if value.storage is Storage.WEIGHT else inputs.index(str(value.base))
    assert isinstance(base, int), f"value {value.name} of the arena has no offset"
    shape, strides = ([_size(dim) for dim in dims] for dims in (value.shape, value.strides))
    return value.name, value.storage.value, base, value.dtype, shape, strides, _size(value.offset)


def _size(dim: Dim) -> tuple[int, int, int]:
    return dim.constant, dim.tokens, dim.rows
