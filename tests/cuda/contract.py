"""The contract of CUDA kernels: on the samples of an op, `launches` of plugins/<op>/cuda.py agree with the reference.

`check_op` runs them on the emulator. The reference computes in float64 from the inputs as the kernels get them, that
is after their conversion to the dtype of activations.
"""

import dataclasses
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import torch
from emulator import Emulator
from sass import Recorder

from llmc.plugins import Op, Sample, all_ops
from llmc.plugins.cuda import BatchTensors, Cache, Call, Launch, Tensor

ACTIVATIONS = ("bfloat16", "float16", "float32")
NUMPY = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float32": np.float32}
# What an output may be off by, relative to its size, is some of these; float32 leaves room for sums in any order.
ROUNDING = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-19}
NO_BATCH = BatchTensors(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0)

Pack = Callable[[str, Sample, list[Any]], list[Any]]
Paged = Callable[[Emulator, Sample, str], tuple[BatchTensors, tuple[Cache, ...]]]


@dataclasses.dataclass(frozen=True)
class Contract:
    """How the samples of an op become calls.

    ``keep``: inputs and outputs, by name, that stay float32 (tables, router scores, logits). ``pack(dtype, sample,
    inputs)``: the inputs as a plan for CUDA stores them. ``paged``: the batch and the caches of samples with a context.
    ``units``: roundings of the dtype that an output may be off, of its own size and of the largest of its row.
    ``samples``: instead of the op's. ``dtypes``: of activations.
    """

    op: str
    keep: tuple[str, ...] = ()
    pack: Pack | None = None
    paged: Paged | None = None
    units: float = 3.0
    samples: Callable[[np.random.Generator], Iterator[Sample]] | None = None
    dtypes: tuple[str, ...] = ACTIVATIONS
    capability: int = 90


def launches_of(op: str, call: Call) -> list[Launch]:
    """What plugins/<op>/cuda.py makes of a call."""
    made: list[Launch] = importlib.import_module(f"llmc.plugins.{op}.cuda").launches(call)
    return made


def check_op(contract: Contract, dtype: str, *, mode: str = "checked") -> list[str]:
    """Run every sample; gives the names of the kernels that ran.

    Raises:
        AssertionError: a kernel disagrees with the reference, or did what it may not.
    """
    op = all_ops()[contract.op]
    cases = []
    for sample in (contract.samples or op.plan_samples)(np.random.default_rng(7)):
        sample = converted(op, contract, sample, dtype)
        cases.append((sample, reference(op, contract, sample, dtype)))
    with Recorder() as recorder, Emulator(mode) as device:
        for sample, expected in cases:
            run(contract, sample, dtype, recorder, [(e.shape, e.dtype.name) for e in expected])
        device.prepare(recorder.kernels.values())
    for number, (sample, expected) in enumerate(cases):
        message = f"llmc::{op.name} in {dtype}, sample {number}: {dict(sample.attributes)}"
        # All orders of threads and blocks take their turn; the first sample has to give the same bits in all of them.
        orders = (0, 1, 2) if number == 0 else (number % 3,)
        first: list[np.ndarray] | None = None
        for order in orders:
            with Emulator(mode, order=order, seed=number) as device:
                try:
                    found = run(contract, sample, dtype, device, [(e.shape, e.dtype.name) for e in expected])
                except AssertionError as error:
                    raise AssertionError(f"{message}: {error}") from error
            for name, one, other in zip(op.outputs, found, expected, strict=True):
                compare(one, other, contract.units, f"{message}, output {name}")
            for one, other in zip(found, first or found, strict=True):
                assert one.tobytes() == other.tobytes(), f"{message}: the order of threads changes the result"
            first = found
    return list(recorder.kernels)


def run(
    contract: Contract,
    sample: Sample,
    dtype: str,
    device: Emulator,
    outputs: Sequence[tuple[tuple[int, ...], str]],
) -> list[np.ndarray]:
    """The outputs of one sample, whose inputs have been converted."""
    op = all_ops()[contract.op]
    arrays = list(sample.inputs)
    if contract.pack:
        arrays = contract.pack(dtype, sample, arrays)
    inputs = tuple(
        None if a is None else device.tensor(a, name)
        for a, name in zip(arrays, [*op.plan_inputs, *(f"packed {i}" for i in range(len(arrays)))], strict=False)
    )
    batch, caches = contract.paged(device, sample, dtype) if contract.paged and sample.context else (NO_BATCH, ())
    targets = tuple(device.empty(shape, kind, name) for (shape, kind), name in zip(outputs, op.outputs, strict=True))
    call = call_of(device, inputs, targets, sample.attributes, batch, caches, contract.capability)
    for launch in launches_of(op.name, call):
        device.launch(launch)
    return [device.get(t.address, t.shape, t.dtype) for t in targets]


def call_of(
    device: Emulator,
    inputs: tuple[Tensor | None, ...],
    outputs: tuple[Tensor, ...],
    attributes: Mapping[str, Any],
    batch: BatchTensors = NO_BATCH,
    caches: tuple[Cache, ...] = (),
    capability: int = 90,
) -> Call:
    """A call with scratch memory and tables on the device."""
    tables: dict[bytes, int] = {}

    def table(data: bytes) -> int:
        if data not in tables:
            tables[data] = device.put(np.frombuffer(data, np.uint8), "table")
        return tables[data]

    def scratch(size: int) -> int:
        return device.alloc(size, "scratch")

    return Call(inputs, outputs, attributes, batch, caches, scratch, capability, table)


def converted(op: Op, contract: Contract, sample: Sample, dtype: str) -> Sample:
    """The sample with float32 inputs in the dtype of activations, but for those to keep."""
    inputs = [
        a if a is None or a.dtype != np.float32 or name in contract.keep else _as(a, NUMPY[dtype])
        for name, a in zip(op.plan_inputs, sample.inputs, strict=False)
    ]
    return dataclasses.replace(sample, inputs=tuple(inputs))


def _as(array: np.ndarray, dtype: Any) -> np.ndarray:
    """Converted, with the same strides in elements."""
    if array.flags.c_contiguous or array.size == 0:
        return array.astype(dtype)
    strides = [stride // array.itemsize for stride in array.strides]
    memory = np.zeros(1 + sum((n - 1) * s for n, s in zip(array.shape, strides, strict=True)), dtype)
    size = memory.dtype.itemsize
    view = np.lib.stride_tricks.as_strided(memory, array.shape, [s * size for s in strides])
    view[...] = array.astype(dtype)
    return view


def reference(op: Op, contract: Contract, sample: Sample, dtype: str) -> list[np.ndarray]:
    """What the reference gives in float64, in the dtypes that a plan for CUDA has."""
    inputs = [_wide(a) for a in sample.inputs]
    if sample.context is None:
        outputs = op.reference(*inputs, **sample.attributes)
    else:
        with dataclasses.replace(sample.context, cache=dict(sample.context.cache)):
            outputs = op.reference(*inputs, **sample.attributes)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    results = []
    for name, y in zip(op.outputs, outputs, strict=True):
        y = y.numpy()
        if y.dtype == np.float64:
            kind = np.float32 if name in contract.keep else NUMPY[dtype]
            with np.errstate(over="ignore"):
                y = Expected.of(y, np.dtype(kind))
        results.append(y)
    return results


class Expected(np.ndarray):
    """Values in the dtype of an output, with ``exact``: the same in float64."""

    exact: np.ndarray

    @staticmethod
    def of(exact: np.ndarray, dtype: np.dtype[Any]) -> "Expected":
        """``exact``, rounded to ``dtype``."""
        y: Expected = exact.astype(dtype).view(Expected)
        y.exact = exact
        return y


def _wide(array: np.ndarray | None) -> torch.Tensor | None:
    if array is None:
        return None
    if array.dtype in (ml_dtypes.bfloat16, np.float16, np.float32):
        return torch.from_numpy(array.astype(np.float64))
    return torch.from_numpy(array.copy())


def compare(found: np.ndarray, expected: np.ndarray, units: float, message: str) -> None:
    """Floats within ``units`` roundings of their own size and of the largest of their row; others equal.

    Raises:
        AssertionError: they differ by more.
    """
    if not isinstance(expected, Expected):
        np.testing.assert_array_equal(found, expected, err_msg=message)
        return
    same = np.asarray(found == expected) | (np.isnan(found) & np.isnan(expected))  # an infinity may be a rounded number
    exact, rounding, found = expected.exact, ROUNDING[expected.dtype.name], found.astype(np.float64)
    finite = np.where(np.isfinite(exact), np.abs(exact), 0.0)
    largest = finite.max(axis=-1, keepdims=True, initial=0.0) if finite.ndim else finite
    allowed = units * rounding * (finite + largest) + 1e-30
    bad = ~same & ~(np.abs(found - exact) <= allowed)
    if bad.any():
        place = tuple(int(i) for i in np.argwhere(bad)[0])
        raise AssertionError(
            f"{message}: {int(bad.sum())} of {bad.size} are off, first {list(place)}: {found[place]:.8g} instead of "
            f"{exact[place]:.8g} +- {allowed[place]:.2g}"
        )
