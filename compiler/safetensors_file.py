"""Tensors of a safetensors file as weight sources, read a range of rows at a time."""

from __future__ import annotations

import math
import os
import weakref
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmc.compiler.model_directory import ModelDirectory
from llmc.compiler.weights import numpy_dtype
from llmc.errors import CheckpointError
from llmc.runtime.safetensors_file import Header, TensorInfo, read_header


class OpenFile:
    """A file that stays open for as long as someone reads from it."""

    def __init__(self, directory: ModelDirectory, name: str) -> None:
        self.where = str(directory.path / name)
        self.fd = directory.open(name)
        self.size = os.fstat(self.fd).st_size
        weakref.finalize(self, os.close, self.fd)

    def read_into(self, buffer: NDArray[np.uint8], position: int) -> None:
        """Fill the buffer with the bytes from ``position`` on.

        Raises:
            CheckpointError: the file ends before that, or the disk fails.
        """
        view = memoryview(buffer.data)
        while view:
            try:
                count = os.preadv(self.fd, [view[: 1 << 30]], position)
            except OSError as problem:
                raise CheckpointError(f"{self.where}: reading at byte {position} failed ({problem.strerror})") from None
            if not count:
                size, needed = os.fstat(self.fd).st_size, position + len(view)
                raise CheckpointError(f"{self.where}: expected {needed} bytes or more, found {size}; it was truncated")
            view, position = view[count:], position + count


@dataclass(frozen=True, eq=False)
class FileTensor:
    """A plain tensor in a file: its rows are one range of bytes. ``begin`` counts from the file's start."""

    file: OpenFile
    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.shape) * numpy_dtype(self.dtype).itemsize

    def rows(self, start: int, stop: int) -> NDArray[Any]:
        """Read into a new array."""
        shape = (stop - start, *self.shape[1:]) if self.shape else ()
        result = np.empty(shape, numpy_dtype(self.dtype))
        width = math.prod(self.shape[1:]) * result.itemsize
        if result.nbytes:
            self.file.read_into(result.reshape(-1).view(np.uint8), self.begin + start * width)
        return result


class SafetensorsFile:
    """An open file and its checked header."""

    def __init__(self, directory: ModelDirectory, name: str) -> None:
        """Open the file and check its header.

        Raises:
            CheckpointError: it can't be opened, or is no proper safetensors file.
        """
        self.name = name
        self._file = OpenFile(directory, name)
        self.header: Header = read_header(self._file.fd, self._file.where, CheckpointError)

    def tensor(self, name: str) -> FileTensor:
        """One of its tensors."""
        info: TensorInfo = self.header.tensors[name]
        return FileTensor(self._file, name, info.dtype, info.shape, info.begin)
