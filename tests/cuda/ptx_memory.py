"""The memories that PTX sees: global memory with exact bounds of every buffer, and shared memory of each block."""

from typing import Any

import numpy as np
from ptx_parser import PtxError

GRAIN = 256
BASE = 0x7000_0000_0000
SHARED = 0x1000_0000_0000
"""Where shared memory begins among generic addresses."""


class Global:
    """Buffers in one array; a grain of it belongs to one buffer."""

    def __init__(self, size: int = 1 << 26) -> None:
        self.bytes = np.zeros(size, np.uint8)
        self.known = np.zeros(size, bool)
        self._owner = np.full(size // GRAIN, -1, np.int32)
        self._buffers: list[tuple[int, int, bool, str]] = []
        self._top = GRAIN

    def alloc(self, size: int, name: str, writable: bool, known: bool) -> int:
        """The address of a new buffer."""
        start, room = self._top, (size + 2 * GRAIN - 1) // GRAIN * GRAIN
        if start + room > len(self.bytes):
            raise MemoryError("the interpreter's memory is used up")
        self.bytes[start : start + size] = 0xFF
        self.known[start : start + size] = known
        self._owner[start // GRAIN : (start + room) // GRAIN] = len(self._buffers)
        self._buffers.append((start, start + size, writable, name))
        self._top = start + room
        return BASE + start

    def view(self, address: int, size: int) -> np.ndarray:
        """The bytes there."""
        return self.bytes[address - BASE : address - BASE + size]

    def index(self, addresses: np.ndarray, size: int, write: bool) -> np.ndarray:
        """Where so many bytes stand for each address.

        Raises:
            PtxError: one is misaligned, or not within a buffer that may be accessed so.
        """
        verb = "write" if write else "read"
        if (addresses % np.uint64(size)).any():
            raise PtxError(f"misaligned {verb} of {size} bytes of global memory")
        offsets = addresses.astype(np.int64) - BASE
        outside = (offsets < 0) | (offsets + size > len(self.bytes))
        owners = np.where(outside, -1, self._owner[np.clip(offsets, 0, len(self.bytes) - 1) // GRAIN])
        if (owners < 0).any():
            raise PtxError(f"{verb} of {size} bytes outside of every buffer")
        for owner in np.unique(owners):
            start, end, writable, name = self._buffers[owner]
            mine = offsets[owners == owner]
            if (mine < start).any() or (mine + size > end).any():
                raise PtxError(f"{verb} of {size} bytes outside of every buffer (near {name!r})")
            if write and not writable:
                raise PtxError(f"write of {size} bytes to read-only {name!r}")
        places: np.ndarray = offsets[:, None] + np.arange(size)
        if write:
            self.known[places] = True
        elif not self.known[places].all():
            raise PtxError("read of global memory that nobody has written")
        return places


class Shared:
    """The shared memory of all blocks of a launch, one behind the other."""

    def __init__(self, size: int, blocks: int) -> None:
        self.size = size
        self.bytes = np.full(size * blocks, 0xFF, np.uint8)
        self.known = np.zeros(size * blocks, bool)

    def index(self, blocks: np.ndarray, addresses: np.ndarray, size: int, write: bool) -> np.ndarray:
        """Where so many bytes stand for each address of a block.

        Raises:
            PtxError: one is misaligned, out of bounds, or read before anybody has written it.
        """
        verb, offsets = "write" if write else "read", addresses.astype(np.int64)
        if (offsets % size).any():
            raise PtxError(f"misaligned {verb} of {size} bytes of shared memory")
        if (offsets < 0).any() or (offsets + size > self.size).any():
            raise PtxError(f"{verb} of {size} bytes at shared[{int(offsets.max())}], there are {self.size}")
        places: np.ndarray = (blocks * self.size + offsets)[:, None] + np.arange(size)
        if write:
            self.known[places] = True
        elif not self.known[places].all():
            raise PtxError("read of shared memory that nobody has written")
        return places


def as_bytes(array: Any) -> np.ndarray:
    """The bytes of an array, in order."""
    data: np.ndarray = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return data
