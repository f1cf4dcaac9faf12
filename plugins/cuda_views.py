"""Strided views as the params of the small CUDA kernels have them: see csrc/cuda/strided.cuh."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from functools import cache
from typing import Any

from llmc.errors import KernelError
from llmc.plugins.cuda import Call, Kernel, Launch, Params, Tensor

AXES = 4
"""Axes that the kernels walk, after merging."""

THREADS = 256

TYPES = {
    "float32": "F32",
    "bfloat16": "BF16",
    "float16": "F16",
    "int32": "int32_t",
    "int64": "int64_t",
    "bool": "Bool",
}
"""What the kernels call dtypes."""

SHORT = {"float32": "f32", "bfloat16": "bf16", "float16": "f16", "int32": "i32", "int64": "i64", "bool": "b"}
"""What the names of kernels call dtypes."""

FLOATS = ("float32", "bfloat16", "float16")

Axes = list[tuple[int, tuple[int, ...]]]
"""Sizes, and the stride in each view."""


@cache
def params_type(name: str, pointers: tuple[str, ...], sizes: tuple[str, ...], floats: tuple[str, ...] = ()) -> Any:
    """A struct of pointers, int64 sizes and floats."""
    fields: list[tuple[str, Any]] = [(field, ctypes.c_void_p) for field in pointers]
    fields += [(field, ctypes.c_int64) for field in sizes]
    fields += [(field, ctypes.c_float) for field in floats]
    return type(name, (Params,), {"_fields_": fields})


def merged(shape: Sequence[int], *strides: Sequence[int], axes: int = AXES) -> Axes:
    """The axes of views of one shape: those of one element are left out, neighbours that follow on are one.

    Raises:
        KernelError: more than ``axes`` are left.
    """
    found: Axes = []
    for axis in range(len(shape) - 1, -1, -1):
        size, steps = shape[axis], tuple(s[axis] for s in strides)
        if size == 1:
            continue
        if found and all(step == inner * found[0][0] for step, inner in zip(steps, found[0][1], strict=True)):
            found[0] = (found[0][0] * size, found[0][1])
        else:
            found.insert(0, (size, steps))
    if len(found) > axes:
        raise KernelError(f"views of {len(found)} axes that don't merge; CUDA kernels walk {axes}")
    return [(1, (0,) * len(strides))] * (axes - len(found)) + found


def broadcast(tensor: Tensor, shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a view under a shape that it broadcasts to."""
    missing = len(shape) - len(tensor.shape)
    pairs = zip(tensor.shape, tensor.strides, shape[missing:], strict=True)
    return (0,) * missing + tuple(0 if size == 1 != wanted else stride for size, stride, wanted in pairs)


def count(shape: Sequence[int]) -> int:
    """Elements."""
    return math.prod(shape)


def numbers(prefix: str, given: Sequence[int]) -> dict[str, int]:
    """``{"n0": ..., "n1": ...}``."""
    return {f"{prefix}{i}": value for i, value in enumerate(given)}


def names(prefixes: str, first: int = 0, axes: int = AXES) -> tuple[str, ...]:
    """``("n0", "n1", ..., "a0", ...)``."""
    return tuple(f"{prefix}{i}" for prefix in prefixes for i in range(first, axes))


def walk_params(axes: Axes, prefixes: str) -> dict[str, int]:
    """The sizes as n0, n1, ... and the strides of each view, by its letter."""
    found = numbers("n", [size for size, _ in axes])
    for which, prefix in enumerate(prefixes):
        found |= numbers(prefix, [steps[which] for _, steps in axes])
    return found


def types(*tensors: Tensor) -> str:
    """The template arguments."""
    for tensor in tensors:
        if tensor.dtype not in TYPES:
            raise KernelError(f"CUDA kernels have no {tensor.dtype} here")
    return ", ".join(TYPES[tensor.dtype] for tensor in tensors)


def short(*tensors: Tensor) -> str:
    """The same for names."""
    return "_".join(SHORT[tensor.dtype] for tensor in tensors)


def blocks(work: int, threads: int = THREADS) -> tuple[int, int, int]:
    """A grid of one axis, with a thread for each piece of work."""
    return -(-work // threads), 1, 1


def launch(kernel: Kernel, grid: tuple[int, int, int], shared: int = 0, **values: Any) -> list[Launch]:
    """The launch, or none where there is nothing to do."""
    return [Launch(kernel, kernel.params(**values), grid, shared)] if min(grid) > 0 else []


def given(call: Call, index: int) -> Tensor | None:
    """An input that may be absent."""
    return call.inputs[index] if index < len(call.inputs) else None


def required(call: Call, index: int) -> Tensor:
    """An input that is there."""
    tensor = call.inputs[index]
    assert tensor is not None, f"input {index} is absent"
    return tensor
