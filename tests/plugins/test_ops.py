"""The contract: on every sample, the kernels of every instruction set agree with the op's reference."""

import ctypes
import dataclasses
import mmap
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from llmc.plugins import Op, Sample, all_ops, kernels
from llmc.plugins.linear.packing import pack
from llmc.plugins.quantized_linear import packing as quantized
from llmc.runtime.batch import Batch

BLOCK = 16
CASES = [pytest.param(op, isa, id=f"{op.name}-{isa}") for op in all_ops().values() for isa in kernels.isas()]


def test_every_op_has_a_kernel() -> None:
    assert set(kernels.ops()) == set(all_ops())


@pytest.mark.parametrize(("op", "isa"), CASES)
def test_kernel_agrees_with_reference(op: Op, isa: str) -> None:
    for number, (sample, expected) in enumerate(_expected(op.name)):
        for inputs in _forms(op.name, sample):
            found = [_filled(array) for array in expected]
            batch, kv = (None, None) if sample.context is None else _paged(sample)
            kernels.run_op(
                op.name, inputs, found, sample.attributes, isa=isa, threads=1 + number % 2, batch=batch, kv=kv
            )
            for name, one, other in zip(op.outputs, found, expected, strict=True):
                message = f"llmc::{op.name} on {isa}, output {name} of sample {number}: {dict(sample.attributes)}"
                np.testing.assert_allclose(one, other, op.rtol, op.atol, equal_nan=True, err_msg=message)


@pytest.mark.skipif(sys.platform != "linux", reason="mprotect is called as Linux has it")
@pytest.mark.parametrize(("op", "isa"), CASES)
def test_kernel_stays_within_its_arrays(op: Op, isa: str) -> None:
    """Every array lies at a page that can't be touched, and inputs can't be written: a mistake is a crash."""
    for number, (sample, expected) in enumerate(_expected(op.name)):
        for inputs in _forms(op.name, sample):
            at_end = number % 3 != 0
            guarded = [None if array is None else _guarded(array, at_end, writable=False) for array in inputs]
            found = [_guarded(array, at_end, writable=True) for array in expected]
            batch, kv = (None, None) if sample.context is None else _paged(sample)
            kernels.run_op(op.name, guarded, found, sample.attributes, isa=isa, threads=2, batch=batch, kv=kv)
            for one, other in zip(found, expected, strict=True):
                np.testing.assert_allclose(one, other, op.rtol, op.atol, equal_nan=True)


@pytest.mark.parametrize("op", [pytest.param(op, id=op.name) for op in all_ops().values()])
def test_unknown_attributes_are_refused(op: Op) -> None:
    sample = next(op.samples(np.random.default_rng(0)))
    with pytest.raises(kernels.KernelError, match=rf"llmc::{op.name}: .*surprise"):
        kernels.run_op(op.name, [], [], {**sample.attributes, "surprise": 1})


@cache
def _expected(name: str) -> list[tuple[Sample, list[np.ndarray]]]:
    """Samples with what the reference gives in float64, in the dtypes that it gives for the inputs as they are."""
    op, results = all_ops()[name], []
    for sample in op.plan_samples(np.random.default_rng(7)):
        plain, wide = (_reference(op, sample, [_tensor(a, double) for a in sample.inputs]) for double in (False, True))
        results.append((sample, [w.astype(p.dtype) for p, w in zip(plain, wide, strict=True)]))
    return results


def _reference(op: Op, sample: Sample, inputs: Sequence[Any]) -> list[np.ndarray]:
    if sample.context is None:
        outputs = op.reference(*inputs, **sample.attributes)
    else:
        with dataclasses.replace(sample.context, cache=dict(sample.context.cache)):
            outputs = op.reference(*inputs, **sample.attributes)
    return [y.numpy() for y in (outputs if isinstance(outputs, tuple) else (outputs,))]


def _filled(like: np.ndarray) -> np.ndarray:
    """Memory in which what a kernel leaves out shows."""
    return np.frombuffer(bytearray(b"\xaa" * like.nbytes), like.dtype).reshape(like.shape)


def _guarded(array: np.ndarray, at_end: bool, *, writable: bool) -> np.ndarray:
    """A copy between two pages that can't be touched, and at one of them."""
    page, size = mmap.PAGESIZE, array.nbytes
    room = -(-max(size, 1) // page) * page
    memory = mmap.mmap(-1, room + 2 * page)
    start = page + (room - size if at_end else 0)
    copy = np.frombuffer(memory, array.dtype, array.size, start).reshape(array.shape)
    copy[...] = array if not writable else _filled(array)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    mprotect = ctypes.CDLL(None, use_errno=True).mprotect
    mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    for begin, length, rights in ((0, page, 0), (page, room, access), (page + room, page, 0)):
        assert mprotect(address + begin, length, rights) == 0, f"mprotect: errno {ctypes.get_errno()}"
    return copy


def _tensor(array: np.ndarray | None, double: bool) -> torch.Tensor | None:
    if array is None:
        return None
    if array.dtype == ml_dtypes.bfloat16:  # stays: it tells linear to round x
        return torch.from_numpy(array.view(np.uint16)).view(torch.bfloat16)
    return torch.from_numpy(array.astype(np.float64) if double and array.dtype == np.float32 else array.copy())


def _forms(op: str, sample: Sample) -> list[list[Any]]:
    """The inputs as kernels take them: weights packed, or either way where the op takes both."""
    given = list(sample.inputs)
    if sample.attributes.get("format", "plain") != "plain":
        return [_quantized(op, given, sample.attributes)]
    if op in ("linear", "embedding"):
        packed = [given[0], pack(given[1]), *given[2:]]
        return [packed] if op == "linear" else [given, packed]
    if op == "moe":
        return [[*given[:3], *(np.stack([pack(expert) for expert in weight]) for weight in given[3:5]), *given[5:]]]
    return [given]


def _quantized(op: str, given: list[Any], attributes: Mapping[str, Any]) -> list[Any]:
    """Codes, scales and zeros packed; those of experts one by one."""
    places = {"quantized_linear": [(1, 2, 3)], "embedding": [(1, 2, 3)], "moe": [(3, 7, 8), (4, 9, 10)]}[op]
    for places_of_one in places:
        weight, scale, zero = (given[i] if i < len(given) else None for i in places_of_one)
        lead = weight.shape[:-2]
        codes = weight.reshape(-1, *weight.shape[-2:])
        packed = [quantized.pack(attributes["format"], attributes["group"], matrix) for matrix in codes]
        given[places_of_one[0]] = np.stack(packed).reshape(*lead, *packed[0].shape)
        for place, values in zip(places_of_one[1:], (scale, zero), strict=True):
            if values is None:
                continue
            dtype = (
                "uint8"
                if values.dtype == np.uint8
                else quantized.scale_dtype(values)
                if place in (2, 7, 9)
                else "float32"
            )
            packed = [quantized.pack_scales(matrix, dtype) for matrix in values.reshape(-1, *values.shape[-2:])]
            given[place] = np.stack(packed).reshape(*lead, *packed[0].shape)
    return given


def _paged(sample: Sample) -> tuple[Batch, kernels.Kv]:
    """The sample's rows as a batch, and its cache in scattered blocks."""
    step = sample.context
    _, k, v = sample.inputs[:3]
    rows = [count for _, count in step.rows]
    past = [len(step.cache[0, name][0]) if (0, name) in step.cache else 0 for name, _ in step.rows]
    needed = [-(-(p + r) // BLOCK) for p, r in zip(past, rows, strict=True)]
    tables = np.zeros((len(rows), max(needed)), np.int32)
    ids = iter(np.random.default_rng(1).permutation(sum(needed) + 1))
    kv = kernels.Kv([(k.shape[1], k.shape[2], v.shape[2])], "float32", BLOCK, sum(needed) + 1)
    for block in range(sum(needed) + 1):
        kv.poison_block(block)
    keys = kv.keys(0).reshape(-1, k.shape[1], BLOCK // 16, k.shape[2], 16)
    values = kv.values(0).reshape(-1, k.shape[1], BLOCK, v.shape[2])
    for number, (name, _) in enumerate(step.rows):
        tables[number, : needed[number]] = [next(ids) for _ in range(needed[number])]
        for position in range(past[number]):
            block, slot = tables[number, position // BLOCK], position % BLOCK
            keys[block, :, slot // 16, :, slot % 16] = _as_stored(step.cache[0, name][0][position], sample.inputs[5:7])
            values[block, :, slot] = _as_stored(step.cache[0, name][1][position], sample.inputs[7:9])
    starts = np.concatenate([[0], np.cumsum(rows)]).astype(np.int32)
    positions = np.concatenate([np.arange(p, p + r) for p, r in zip(past, rows, strict=True)]).astype(np.int32)
    empty = np.zeros(0, np.int32)
    return Batch(empty, positions, empty, starts, np.array(past, np.int32), tables, step.tree_mask), kv


def _as_stored(x: np.ndarray, shift: Sequence[np.ndarray | None]) -> np.ndarray:
    """What the cache holds of keys or values: without their center, times their scale."""
    center, scale = (*shift, None, None)[:2]
    x = x if center is None else x - center
    return x if scale is None else x * scale
