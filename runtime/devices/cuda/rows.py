"""Rows of values between this machine and a device: float32 here, what the plan says there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from llmc.runtime.plan import DTYPES

if TYPE_CHECKING:
    from llmc.plugins.cuda import Tensor
    from llmc.runtime.devices.cuda.device import Device

NOTHING = np.zeros(0, np.uint8)


class Rows:
    """Keeps the memory that a device copies from and to, by the name of the value."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._memory: dict[str, NDArray[np.uint8]] = {}

    def send(self, name: str, to: Tensor, rows: NDArray[np.float32]) -> None:
        """Copy rows to the beginning of a value, which is contiguous."""
        data = rounded(to.dtype, rows)
        memory = self._room(name, len(data))
        memory[:] = data
        self._device.send(to.address, memory)

    def fetch(self, name: str, found: Tensor, count: int, wanted: NDArray[np.bool_] | None) -> None:
        """Have the first rows of a value copied, or some of them; they are there after the next wait."""
        size = _bytes(found, count)
        if not size or not (wanted is None or wanted.any()):
            return
        memory, row = self._room(name, size), found.strides[0] * DTYPES[found.dtype]
        for begin, end in [(0, size)] if wanted is None else _runs(wanted, row, size):
            self._device.fetch(memory[begin:end], found.address + begin)

    def rows(self, name: str, found: Tensor, count: int) -> NDArray[np.float32]:
        """What `fetch` has brought, valid until its next call; no row if that was nothing."""
        size, data = _bytes(found, count), self._memory.get(name, NOTHING)
        kind, columns = np.dtype(np.uint16 if found.dtype == "bfloat16" else found.dtype), found.shape[1]
        if not size or size > len(data):
            return np.zeros((0, columns), np.float32)
        steps = (found.strides[0] * kind.itemsize, kind.itemsize)
        rows: NDArray[Any] = np.lib.stride_tricks.as_strided(data[:size].view(kind), (count, columns), steps)
        if found.dtype == "bfloat16":
            return (rows.astype(np.uint32) << 16).view(np.float32)
        return rows.astype(np.float32, copy=False)

    def _room(self, name: str, size: int) -> NDArray[np.uint8]:
        if size > len(self._memory.get(name, NOTHING)):
            self._memory[name] = self._device.host(size)
        return self._memory[name][:size]


def rounded(dtype: str, rows: NDArray[np.float32]) -> NDArray[np.uint8]:
    """The bytes of rows as floats of a dtype, rounded to the nearest, ties to even."""
    if dtype != "bfloat16":
        return np.ascontiguousarray(rows, dtype).reshape(-1).view(np.uint8)
    bits = np.ascontiguousarray(rows, np.float32).reshape(-1).view(np.uint32)
    near = bits + (0x7FFF + (bits >> 16 & 1))
    kept = np.where((bits & 0x7FFFFFFF) > 0x7F800000, bits | 0x400000, near)  # NaN stays one
    return (kept >> 16).astype(np.uint16).view(np.uint8)


def _bytes(found: Tensor, count: int) -> int:
    """From the first number of the first row to the last one of the last."""
    return ((count - 1) * found.strides[0] + found.shape[1]) * DTYPES[found.dtype] if count else 0


def _runs(wanted: NDArray[np.bool_], row_bytes: int, size: int) -> Iterator[tuple[int, int]]:
    """Bytes from and to which rows are wanted, that stand one after the other."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], wanted.view(np.int8), [0]])))
    for begin, end in edges.reshape(-1, 2):
        yield int(begin) * row_bytes, min(int(end) * row_bytes, size)
