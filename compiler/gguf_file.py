"""Reads GGUF files: metadata and tensors, with every count, size and offset checked before it is used.

The format is described in https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Blocks of quantized numbers are
turned into float32 by the gguf library, a few rows at a time.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from llmc.compiler.model_directory import ModelDirectory
from llmc.compiler.safetensors_file import FileTensor, OpenFile
from llmc.errors import CheckpointError

VERSIONS = (2, 3)
MAX_NAME_BYTES = 65_535
MAX_RANK = 4

SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<B", 10: "<Q", 11: "<q", 12: "<d"}
FLOAT32, BOOL, STRING, ARRAY = 6, 7, 8, 9

PLAIN = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""Types that hold numbers as they are, by the name that the gguf library gives them."""

BLOCKS = (
    *("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"),
    *("IQ4_NL", "IQ4_XS", "MXFP4"),
)
"""Types that hold blocks of quantized numbers."""

MIN_ENTRY_BYTES = {"metadata": 13, "tensors": 24, "strings": 8}
"""No entry is smaller, so a count that is too large for the file is refused before anything is made for it."""


@dataclass(frozen=True, eq=False)
class BlockTensor:
    """A quantized tensor, read as float32. A row is a whole number of blocks."""

    file: OpenFile
    name: str
    type: Any
    shape: tuple[int, ...]
    begin: int
    row_bytes: int

    dtype = "float32"

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor as float32."""
        return math.prod(self.shape) * 4

    def rows(self, start: int, stop: int) -> NDArray[Any]:
        """Read the blocks of these rows and dequantize them."""
        from gguf.quants import dequantize

        if len(self.shape) < 2:
            whole: NDArray[Any] = dequantize(self.raw(0, 1), self.type).reshape(self.shape)
            return whole[start:stop]
        if start == stop:
            return np.empty((0, *self.shape[1:]), np.float32)
        inner = math.prod(self.shape[1:-1])
        rows: NDArray[Any] = dequantize(self.raw(start * inner, stop * inner), self.type)
        return rows.reshape((stop - start, *self.shape[1:]))

    def raw(self, start: int, stop: int) -> NDArray[np.uint8]:
        """The bytes of these rows, leading axes merged."""
        raw = np.empty((stop - start, self.row_bytes), np.uint8)
        if raw.size:
            self.file.read_into(raw.reshape(-1), self.begin + start * self.row_bytes)
        return raw


@dataclass(frozen=True)
class GgufFile:
    """The metadata and the tensors of a file; ``types`` counts the bytes stored in each type."""

    where: str
    metadata: Mapping[str, Any]
    tensors: Mapping[str, FileTensor | BlockTensor]
    types: Mapping[str, int]

    @staticmethod
    def open(directory: ModelDirectory, name: str) -> GgufFile:
        """Read and check everything but the numbers.

        Raises:
            CheckpointError: the file is damaged, or holds something that is not supported.
        """
        file = OpenFile(directory, name)
        with os.fdopen(os.dup(file.fd), "rb", buffering=1 << 20) as stream:
            return _read(_Reader(stream, file.size, file.where), file)


class _Reader:
    """Reads little-endian values; never past the end of the file."""

    def __init__(self, stream: BinaryIO, size: int, where: str) -> None:
        self.where = where
        self.position = 0
        self._stream = stream
        self._size = size

    def fail(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self.where}: byte {self.position}: {what}")

    def bytes(self, count: int) -> bytes:
        if count > self._size - self.position:
            raise self.fail(f"{count} bytes are announced, but the file has only {self._size} bytes; truncated?")
        self.position += count
        return self._stream.read(count)

    def value(self, format: str) -> Any:
        return struct.unpack(format, self.bytes(struct.calcsize(format)))[0]

    def count(self, kind: str) -> int:
        count: int = self.value("<Q")
        if count > (self._size - self.position) // MIN_ENTRY_BYTES[kind]:
            raise self.fail(f"{count} {kind} do not fit into the file")
        return count

    def string(self, limit: int | None = None) -> str:
        length: int = self.value("<Q")
        if limit is not None and length > limit:
            raise self.fail(f"a name of {length} bytes; at most {limit} are allowed")
        try:
            return self.bytes(length).decode()
        except UnicodeDecodeError:
            raise self.fail("a text that is not UTF-8") from None


def _read(reader: _Reader, file: OpenFile) -> GgufFile:
    if reader.bytes(4) != b"GGUF":
        raise CheckpointError(f"{reader.where}: does not begin with 'GGUF'; this is no GGUF file")
    if (version := reader.value("<I")) not in VERSIONS:
        kind = "big-endian files are" if version > 1 << 16 else f"GGUF version {version} is"
        raise CheckpointError(f"{reader.where}: {kind} not supported; versions 2 and 3 are, little-endian")
    tensor_count = reader.count("tensors")
    metadata = _read_metadata(reader, reader.count("metadata"))
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or not 8 <= alignment <= 1 << 20 or alignment & (alignment - 1):
        raise CheckpointError(f"{reader.where}: general.alignment {alignment!r} is no power of two from 8 to 1048576")
    entries = [_read_tensor(reader, alignment) for _ in range(tensor_count)]
    begin = -(-reader.position // alignment) * alignment
    _check_layout(entries, begin, alignment, file)
    tensors: dict[str, FileTensor | BlockTensor] = {}
    types: dict[str, int] = {}
    for entry in entries:
        if entry.name in tensors:
            raise CheckpointError(f"{reader.where}: two tensors are named {entry.name!r}")
        tensors[entry.name] = entry.source(file, begin)
        types[entry.type.name] = types.get(entry.type.name, 0) + entry.nbytes
    return GgufFile(reader.where, metadata, tensors, types)


def _read_metadata(reader: _Reader, count: int) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for _ in range(count):
        key = reader.string(MAX_NAME_BYTES)
        if key in metadata:
            raise reader.fail(f"the key {key!r} occurs twice")
        metadata[key] = _read_value(reader, reader.value("<I"))
    return metadata


def _read_value(reader: _Reader, kind: int) -> Any:
    if kind == STRING:
        return reader.string()
    if kind in SCALARS:
        return _tidy(reader.value(SCALARS[kind]), kind)
    if kind != ARRAY:
        raise reader.fail(f"unknown kind of value {kind}")
    kind = reader.value("<I")
    if kind == STRING:
        return [reader.string() for _ in range(reader.count("strings"))]
    if kind not in SCALARS:
        raise reader.fail(f"an array of values of kind {kind}, which is not supported")
    count: int = reader.value("<Q")
    width = struct.calcsize(SCALARS[kind])
    values = np.frombuffer(reader.bytes(count * width), np.dtype(SCALARS[kind]))
    return values.astype(bool).tolist() if kind == BOOL else values.tolist()


def _tidy(value: Any, kind: int) -> Any:
    """A float32 becomes the shortest decimal that means it: 1e-05, not 9.999999747378752e-06."""
    if kind == FLOAT32 and math.isfinite(value):
        return float(str(np.float32(value)))
    return bool(value) if kind == BOOL else value


@dataclass(frozen=True)
class _Entry:
    name: str
    shape: tuple[int, ...]
    type: Any
    offset: int
    row_bytes: int

    @property
    def nbytes(self) -> int:
        return self.row_bytes * math.prod(self.shape[:-1])

    def source(self, file: OpenFile, data_begin: int) -> FileTensor | BlockTensor:
        begin = data_begin + self.offset
        if self.type.name in PLAIN:
            return FileTensor(file, self.name, PLAIN[self.type.name], self.shape, begin)
        return BlockTensor(file, self.name, self.type, self.shape, begin, self.row_bytes)


def _read_tensor(reader: _Reader, alignment: int) -> _Entry:
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    name = reader.string(MAX_NAME_BYTES)
    rank = reader.value("<I")
    if not 1 <= rank <= MAX_RANK:
        raise reader.fail(f"tensor {name!r} has {rank} dimensions; 1 to {MAX_RANK} are allowed")
    shape = tuple(reversed([reader.value("<Q") for _ in range(rank)]))  # stored innermost first
    number, offset = reader.value("<I"), reader.value("<Q")
    known = {t.value: t for t in GGMLQuantizationType if t.name in PLAIN or t.name in BLOCKS}
    if number not in known:
        names = {t.value: t.name for t in GGMLQuantizationType}
        raise CheckpointError(
            f"{reader.where}: tensor {name!r} has the type {names.get(number, number)}, which is not supported; "
            f"supported: {', '.join((*PLAIN, *BLOCKS))}"
        )
    block, block_bytes = GGML_QUANT_SIZES[known[number]]
    if any(size == 0 for size in shape) or shape[-1] % block:
        raise reader.fail(f"tensor {name!r}: {list(shape)} is no shape for {known[number].name} (blocks of {block})")
    if math.prod(shape) * 8 >= 1 << 63:
        raise reader.fail(f"tensor {name!r}: the sizes {list(shape)} overflow 64 bits")
    if offset % alignment:
        raise reader.fail(f"tensor {name!r}: offset {offset} is no multiple of {alignment}")
    return _Entry(name, shape, known[number], offset, shape[-1] // block * block_bytes)


def _check_layout(entries: list[_Entry], begin: int, alignment: int, file: OpenFile) -> None:
    """The tensors follow each other, each padded to the alignment; the padding of the last may be missing."""
    expected = end = 0
    for entry in sorted(entries, key=lambda entry: entry.offset):
        if entry.offset != expected:
            kind = "overlaps the tensor before it" if entry.offset < expected else "leaves a hole before it"
            raise CheckpointError(
                f"{file.where}: tensor {entry.name!r} {kind} (offset {entry.offset}, expected {expected})"
            )
        end = entry.offset + entry.nbytes
        expected = -(-end // alignment) * alignment
    if not entries:
        raise CheckpointError(f"{file.where}: holds no tensors")
    if file.size < begin + end:
        raise CheckpointError(f"{file.where}: expected {begin + end} bytes, found {file.size}; is it truncated?")
    if file.size > begin + expected:
        raise CheckpointError(f"{file.where}: expected at most {begin + expected} bytes, found {file.size}")
