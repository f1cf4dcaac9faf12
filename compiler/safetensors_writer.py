"""Writes safetensors files piece by piece; a tensor begins at a multiple of 64 bytes if those before it allow it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

from llmc.errors import CompileError
from llmc.runtime.safetensors_file import DTYPES

ALIGNMENT = 64

_CODES = {name: code for code, (name, _) in DTYPES.items()}


class Tensor(Protocol):
    """What is written: its bytes come in order, so that it never has to be in memory as a whole."""

    @property
    def name(self) -> str:
        """Unique in the file."""
        ...

    @property
    def dtype(self) -> str:
        """The name of the numpy or ml_dtypes dtype."""
        ...

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes in all."""
        ...

    def chunks(self) -> Iterator[Any]:
        """C-contiguous arrays with the bytes in order."""
        ...


def order(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Those that end at a multiple of 64 bytes first, since the format allows no gaps; otherwise as given."""
    return sorted(tensors, key=lambda tensor: -_alignment(tensor.nbytes))


def pieces(tensors: Sequence[Tensor]) -> Iterator[Any]:
    """The file, for ``Staging.write_stream``.

    Raises:
        CompileError: a tensor does not give as many bytes as it announced, or its dtype can't be stored.
    """
    yield header(tensors)
    for tensor in tensors:
        found = 0
        for chunk in tensor.chunks():
            found += chunk.nbytes
            yield chunk.reshape(-1).view("uint8").data
        if found != tensor.nbytes:
            raise CompileError(f"weight {tensor.name!r} gives {found} bytes instead of {tensor.nbytes}")


def header(tensors: Sequence[Tensor]) -> bytes:
    """Length and JSON, padded with spaces so that the data begin at a multiple of 64 bytes."""
    entries = {}
    begin = 0
    for tensor in tensors:
        if tensor.dtype not in _CODES:
            raise CompileError(f"weight {tensor.name!r} is {tensor.dtype}, which safetensors files can't hold")
        end = begin + tensor.nbytes
        entries[tensor.name] = {
            "dtype": _CODES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
        begin = end
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def _alignment(nbytes: int) -> int:
    return min(ALIGNMENT, nbytes & -nbytes) if nbytes else ALIGNMENT
