"""Runs a plan with the references of the ops instead of kernels: slow, and right by definition."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from llmc.compiler.safetensors_writer import Tensor as StoredTensor
from llmc.compiler.weights import numpy_dtype
from llmc.errors import EngineError
from llmc.plugins import all_ops
from llmc.plugins.linear import packing
from llmc.plugins.paged_attention.step import Step as AttentionStep
from llmc.plugins.paged_attention.storage import round_trip
from llmc.plugins.quantized_linear import packing as quantized
from llmc.runtime.batch import Batch
from llmc.runtime.plan import Plan, Step, Storage, Value

if TYPE_CHECKING:
    from llmc.runtime.engine import Engine

_TORCH = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int32": torch.int32,
    "int64": torch.int64,
    "bool": torch.bool,
    "uint8": torch.uint8,
}
Observer = Callable[[Step, Sequence[Tensor | None], Sequence[Tensor]], None]


class ReferenceExecutor:
    """Implements ``runtime.batch.Executor`` on torch tensors.

    Args:
        plan: what to run.
        weights: each tensor as stored, bfloat16 as ml_dtypes has it.
        num_blocks: blocks of the KV cache.
        block_size: positions of a block.
        kv_dtype: what keys and values are stored as (``plugins/paged_attention/storage.py``).
        observe: called after each step with its inputs and outputs, which are only valid during the call.
    """

    def __init__(
        self,
        plan: Plan,
        weights: Mapping[str, NDArray[Any]],
        *,
        num_blocks: int,
        block_size: int = 16,
        kv_dtype: str = "float32",
        observe: Observer | None = None,
    ) -> None:
        if plan.state_slots:
            raise EngineError("the reference executor has no recurrent ops")
        self._plan = plan
        self._arena = torch.from_numpy(np.zeros(plan.arena_bytes, np.uint8))
        self._weights = {name: _tensor(array) for name, array in weights.items()}
        self._kv_dtype = kv_dtype
        self._pages = [
            tuple(torch.zeros(num_blocks, block_size, slot.kv_heads, size) for size in (slot.key_dim, slot.value_dim))
            for slot in plan.kv_slots
        ]
        self._observe = observe
        self._batch: Batch | None = None

    def step(self, batch: Batch) -> NDArray[np.float32]:
        """Logits [N, vocabulary]."""
        self._batch = batch
        rows = tuple(enumerate(np.diff(batch.cu_seqlens).tolist()))
        cache = _PagedCache(self._pages, batch)
        with torch.no_grad(), AttentionStep(rows, cache, batch.tree_mask):
            for step in self._plan.steps:
                self._run(step)
        return self.read(self._plan.logits)

    def read(self, name: str) -> NDArray[Any]:
        """A copy of a value after the last step; another value may have taken its memory."""
        return self._view(self._plan.value(name)).numpy().copy()

    def copy_block(self, source: int, target: int) -> None:
        """Copy a block of the cache, in all slots."""
        for keys, values in self._pages:
            keys[target] = keys[source]
            values[target] = values[source]

    def _run(self, step: Step) -> None:
        op = all_ops()[step.op]
        values = [None if name is None else self._plan.value(name) for name in step.inputs]
        inputs = [None if value is None else self._view(value) for value in values]
        outputs = [self._view(self._plan.value(name)) for name in step.outputs]
        _unpack(step, inputs, outputs)
        if step.op == "paged_attention":
            inputs[1:3] = [
                self._stored(inputs[i], (*inputs, *[None] * 6)[3 + 2 * i :][:2], keys=i == 1) for i in (1, 2)
            ]
        absent = [None] * (len(op.plan_inputs) - len(inputs))
        results = op.reference(*inputs, *absent, **step.attributes)
        results = results if isinstance(results, tuple) else (results,)
        for output, result in zip(outputs, results, strict=True):
            if output.shape != result.shape:
                raise EngineError(f"{step.op}: gives {list(result.shape)} where {list(output.shape)} is expected")
            output.copy_(result)
        if self._observe is not None:
            self._observe(step, inputs, outputs)

    def _stored(self, x: Tensor | None, constants: Sequence[Tensor | None], *, keys: bool) -> Tensor | None:
        """Keys or values as they come back from the cache, which holds them less a center and times a scale."""
        if x is None:
            return None
        center, scale = (None if constant is None else constant.numpy() for constant in constants)
        return torch.from_numpy(round_trip(x.numpy(), self._kv_dtype, keys=keys, center=center, scale=scale))

    def _view(self, value: Value) -> Tensor:
        batch = self._batch
        assert batch is not None, "no step has been run"
        tokens, rows = len(batch.input_ids), len(batch.logit_rows)
        shape = [dim.at(tokens, rows) for dim in value.shape]
        strides = [dim.at(tokens, rows) for dim in value.strides]
        offset = value.offset.at(tokens, rows)
        if value.storage is Storage.ARENA:
            assert isinstance(value.base, int), f"{value.name} has no offset"
            base = self._arena[value.base :]
            item = numpy_dtype(value.dtype).itemsize
            base = base[: len(base) // item * item].view(_TORCH[value.dtype])
        elif value.storage is Storage.BATCH:
            base = torch.from_numpy(np.ascontiguousarray(getattr(batch, str(value.base))))
        else:
            base = self._weights[str(value.base)]
        return base.as_strided(shape, strides, base.storage_offset() + offset)


class _PagedCache(MutableMapping[tuple[int, Hashable], tuple[Any, Any]]):
    """What the reference of attention reads and extends, kept in pages that the block tables name."""

    def __init__(self, pages: Sequence[tuple[Tensor, ...]], batch: Batch) -> None:
        self._pages = pages
        self._batch = batch
        self._lengths = dict.fromkeys(
            ((slot, s) for slot in range(len(pages)) for s in range(len(batch.num_computed))), -1
        )

    def __getitem__(self, key: tuple[int, Hashable]) -> tuple[Tensor, Tensor]:
        length = self._length(key)
        if not length:
            raise KeyError(key)
        keys, values = (page[self._places(key, 0, length)].float() for page in self._pages[key[0]])
        return keys, values

    def __setitem__(self, key: tuple[int, Hashable], stored: tuple[Tensor, Tensor]) -> None:
        start, length = self._length(key), len(stored[0])
        places = self._places(key, start, length)
        for page, new in zip(self._pages[key[0]], stored, strict=True):
            page[places] = new[start:].to(page.dtype)
        self._lengths[key] = length  # type: ignore[index]

    def __delitem__(self, key: tuple[int, Hashable]) -> None:
        raise KeyError(key)

    def __iter__(self) -> Iterator[tuple[int, Hashable]]:
        return iter(self._lengths)

    def __len__(self) -> int:
        return len(self._lengths)

    def _length(self, key: tuple[int, Hashable]) -> int:
        """Positions that are written: those of earlier steps, and those of this one once they are stored."""
        slot, sequence = key
        written = self._lengths[slot, sequence]  # type: ignore[index]
        return int(self._batch.num_computed[sequence]) if written < 0 else written  # type: ignore[call-overload]

    def _places(self, key: tuple[int, Hashable], start: int, stop: int) -> tuple[Tensor, Tensor]:
        positions = torch.arange(start, stop)
        size = self._pages[key[0]][0].shape[1]
        table = torch.from_numpy(self._batch.block_tables[key[1]]).long()  # type: ignore[call-overload]
        return table[positions // size], positions % size


def for_engine(engine: Engine, *, num_blocks: int) -> ReferenceExecutor:
    """The executor of a loaded engine."""
    arrays = {name: weight.array for name, weight in engine.weights.items()}
    typed = {name: array.view(numpy_dtype(engine.weights[name].dtype)) for name, array in arrays.items()}
    cache = engine.kv_cache
    return ReferenceExecutor(
        engine.plan, typed, num_blocks=num_blocks, block_size=cache.block_size, kv_dtype=cache.dtype
    )


def stored_weights(packed: Mapping[str, StoredTensor]) -> dict[str, NDArray[Any]]:
    """The weights of a lowered model in memory, as they would be read from the engine; for small models."""
    return {
        name: np.concatenate([chunk.reshape(-1) for chunk in weight.chunks()]).reshape(weight.shape)
        for name, weight in packed.items()
    }


def _tensor(array: NDArray[Any]) -> Tensor:
    """Shares the memory, which may be mapped and read-only: no op writes to a weight."""
    array = np.ascontiguousarray(array)
    narrow = array.dtype.name == "bfloat16"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        tensor = torch.from_numpy(array.view(np.uint16) if narrow else array)
    return tensor.view(torch.bfloat16) if narrow else tensor


def _unpack(step: Step, inputs: list[Tensor | None], outputs: Sequence[Tensor]) -> None:
    """Replace packed weights by matrices, as the references have them."""
    x, y = inputs[0], outputs[0]
    assert x is not None, f"{step.op} has inputs"
    given = step.attributes
    if step.op == "linear":
        inputs[1] = _unpacked(inputs[1], y.shape[-1], x.shape[-1])
    elif step.op == "quantized_linear":
        _unpack_codes(inputs, (1, 2, 3), given, y.shape[-1], x.shape[-1])
    elif step.op == "embedding":
        table = inputs[1]
        assert table is not None, "embedding has a table"
        if given.get("format", "plain") != "plain":
            _unpack_codes(inputs, (1, 2, 3), given, table.shape[0] * packing.PANEL, y.shape[-1])
        elif table.ndim > 2:
            inputs[1] = _unpacked(table, table.shape[0] * packing.PANEL, y.shape[-1])
    elif step.op == "moe":
        _unpack_experts(inputs, given, x.shape[-1])


def _unpack_experts(inputs: list[Tensor | None], given: Mapping[str, Any], hidden: int) -> None:
    gate_up, down, bias = inputs[3], inputs[4], inputs[5] if len(inputs) > 5 else None
    assert gate_up is not None and down is not None, "moe has five inputs"
    halves = 2 if given["gated"] else 1
    inner = int(given.get("inner", 0)) or (
        bias.shape[1] // halves if bias is not None else int(np.prod(down.shape[2:])) // packing.PANEL
    )
    if given.get("format", "plain") != "plain":
        inner = inner if given.get("inner") or bias is not None else inner * (2 if given["format"] == "int4" else 1)
        _unpack_codes(inputs, (3, 7, 8), given, inner * halves, hidden)
        _unpack_codes(inputs, (4, 9, 10), given, hidden, inner)
        return
    inputs[3] = torch.stack([_unpacked(expert, inner * halves, hidden) for expert in gate_up])
    inputs[4] = torch.stack([_unpacked(expert, hidden, inner) for expert in down])


def _unpacked(packed: Tensor | None, rows: int, columns: int) -> Tensor:
    assert packed is not None, "a required input is absent"
    axes = (0, 2, 1, 3) if packed.ndim == 4 else (0, 2, 1)
    return packed.permute(axes).reshape(packed.shape[0] * packing.PANEL, -1)[:rows, :columns]


def _unpack_codes(
    inputs: list[Tensor | None], places: tuple[int, int, int], given: Mapping[str, Any], rows: int, columns: int
) -> None:
    """Codes, scales and zeros as matrices, or as one for each expert."""
    format, group = str(given["format"]), int(given["group"])

    def unpacked(packed: Tensor, codes: bool) -> Tensor:
        if packed.ndim > (4 if codes else 3):
            return torch.stack([unpacked(expert, codes) for expert in packed])
        array = packed.numpy()
        matrix = (
            quantized.unpack(format, group, array, rows, columns) if codes else quantized.unpack_scales(array, rows)
        )
        return torch.from_numpy(np.ascontiguousarray(matrix))

    for number, place in enumerate(places):
        if place < len(inputs) and (packed := inputs[place]) is not None:
            inputs[place] = unpacked(packed, number == 0)
