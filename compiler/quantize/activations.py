"""What the steps of a calibration run leave for later steps: in memory, or in files where it is large."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmc.compiler.staging import disk_errors

MEMORY_BYTES = 256 << 20
"""Activations are kept in memory up to so many bytes; what comes on top goes to files, which a machine with room keeps
in its page cache: more here makes no build quicker."""

FILES = "activations"
STATE = "state.json"


class Activations:
    """Arrays by name of a buffer and number of a chunk.

    Args:
        folder: for the files; it exists.
        chunks: how many there are.
        limit: bytes that may be in memory. A buffer is there with all chunks, which are no larger than the first one
            that is put, or in a file.
    """

    def __init__(self, folder: Path, chunks: int, limit: int = MEMORY_BYTES) -> None:
        self._folder = folder / FILES
        self._chunks = chunks
        self._limit = limit
        self._memory: dict[str, list[NDArray[Any] | None]] = {}
        self._reserved: dict[str, int] = {}
        self._files: dict[str, _File] = {}
        self._bytes = 0
        self._count = 0
        self.most = 0
        """Bytes that were in memory at a time, at most."""

    @property
    def names(self) -> Sequence[str]:
        """The buffers that are kept."""
        return sorted([*self._memory, *self._files])

    @property
    def nbytes(self) -> int:
        """Bytes of all of them, about."""
        return self._bytes + sum(file.nbytes for file in self._files.values())

    def get(self, name: str, chunk: int) -> NDArray[Any]:
        """An array that the caller may change: what is to stay has to be put back."""
        if name in self._files:
            return self._files[name].read(chunk)
        array = self._memory[name][chunk]
        assert array is not None, f"{name} of chunk {chunk} is read before it is written"
        return array

    def put(self, name: str, chunk: int, array: NDArray[Any]) -> None:
        """Keep an array, whose memory now belongs here.

        Raises:
            ResourceError: the disk is full.
        """
        if name not in self._files and name not in self._memory:
            expected = array.nbytes * self._chunks
            if sum(self._reserved.values()) + expected > self._limit:
                self._folder.mkdir(exist_ok=True)
                self._count += 1
                self._files[name] = _File(self._folder / f"{self._count}.bin", self._chunks)
            else:
                self._memory[name], self._reserved[name] = [None] * self._chunks, expected
        if name in self._files:
            self._files[name].write(chunk, array)
            return
        assert array.nbytes * self._chunks <= self._reserved[name], f"{name}: chunk {chunk} is larger than the first"
        before = self._memory[name][chunk]
        self._bytes += array.nbytes - (0 if before is None else before.nbytes)
        self.most = max(self.most, self._bytes)
        self._memory[name][chunk] = array

    def drop(self, name: str) -> None:
        """Forget a buffer that nothing reads any more."""
        if name in self._files:
            self._files.pop(name).remove()
        else:
            del self._reserved[name]
            self._bytes -= sum(array.nbytes for array in self._memory.pop(name) if array is not None)

    def clear(self) -> None:
        """Forget all."""
        for name in self.names:
            self.drop(name)

    # ------------------------------------------------------------------------------------------------ resuming
    def save(self, folder: Path, position: int) -> None:
        """Write all arrays to a file, so that a later run can go on after so many steps.

        Raises:
            ResourceError: the disk is full.
        """
        entries: list[dict[str, Any]] = []
        data = folder / f"state-{position}.bin"
        with disk_errors(data), open(data, "wb") as file:
            for name in self.names:
                for chunk in range(self._chunks):
                    array = self.get(name, chunk)
                    entries.append({"name": name, "chunk": chunk, "dtype": array.dtype.name, "size": array.size})
                    file.write(np.ascontiguousarray(array).view(np.uint8).data)
            file.flush()
            os.fsync(file.fileno())
        text = json.dumps({"position": position, "chunks": self._chunks, "arrays": entries})
        with disk_errors(folder / STATE):
            temporary = folder / (STATE + ".part")
            temporary.write_text(text)
            os.replace(temporary, folder / STATE)
            for old in folder.glob("state-*.bin"):
                if old != data:
                    old.unlink()

    def load(self, folder: Path) -> int | None:
        """Read back what ``save`` wrote; returns the position, or None if there is nothing that fits."""
        try:
            state: Mapping[str, Any] = json.loads((folder / STATE).read_text())
            data = folder / f"state-{state['position']}.bin"
            sizes = [np.dtype(entry["dtype"]).itemsize * entry["size"] for entry in state["arrays"]]
            if state["chunks"] != self._chunks or data.stat().st_size != sum(sizes):
                return None
        except (OSError, ValueError, KeyError, TypeError):
            return None
        with open(data, "rb") as file:
            for entry, size in zip(state["arrays"], sizes, strict=True):
                array = np.frombuffer(bytearray(file.read(size)), entry["dtype"])
                self.put(entry["name"], entry["chunk"], array)
        return int(state["position"])

    @staticmethod
    def forget(folder: Path) -> None:
        """Remove what ``save`` wrote."""
        for file in [folder / STATE, *folder.glob("state-*.bin")]:
            file.unlink(missing_ok=True)


class _File:
    """The arrays of one buffer; they are read and written by calls, so that they don't count as memory."""

    def __init__(self, path: Path, chunks: int) -> None:
        self.path = path
        self.nbytes = 0
        self._places: list[tuple[int, int, str] | None] = [None] * chunks
        with disk_errors(path):
            self._file = open(path, "w+b", buffering=0)  # noqa: SIM115 - closed by remove

    def write(self, chunk: int, array: NDArray[Any]) -> None:
        place = self._places[chunk]
        if place is None:
            place = self._places[chunk] = (self.nbytes, array.size, array.dtype.name)
            self.nbytes += array.nbytes
        view = memoryview(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        begin = place[0]
        with disk_errors(self.path):
            while view:
                count = os.pwrite(self._file.fileno(), view[: 1 << 30], begin)
                view, begin = view[count:], begin + count

    def read(self, chunk: int) -> NDArray[Any]:
        place = self._places[chunk]
        assert place is not None, f"{self.path} of chunk {chunk} is read before it is written"
        begin, size, dtype = place
        array = np.empty(size, dtype)
        view = memoryview(array.view(np.uint8).data)
        while view:
            count = os.preadv(self._file.fileno(), [view[: 1 << 30]], begin)
            assert count, f"{self.path} was cut short"
            view, begin = view[count:], begin + count
        return array

    def remove(self) -> None:
        self._file.close()
        self.path.unlink(missing_ok=True)
