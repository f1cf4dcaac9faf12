"""The one reader of safetensors headers: nothing in a file is used before every size and offset has been checked.

The format: 8 bytes with the length of the header, the header (JSON), the data. See
https://github.com/huggingface/safetensors#format.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from llmc.errors import EngineError, LlmcError
from llmc.runtime import strict

MAX_HEADER_BYTES = 100_000_000

MAX_RANK = 64

DTYPES = {
    "F64": ("float64", 8),
    "F32": ("float32", 4),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "F8_E4M3": ("float8_e4m3fn", 1),
    "F8_E5M2": ("float8_e5m2", 1),
    "I64": ("int64", 8),
    "I32": ("int32", 4),
    "I16": ("int16", 2),
    "I8": ("int8", 1),
    "U64": ("uint64", 8),
    "U32": ("uint32", 4),
    "U16": ("uint16", 2),
    "U8": ("uint8", 1),
    "BOOL": ("bool", 1),
}
"""Name in the file: (name of the numpy or ml_dtypes dtype, bytes of an element)."""


@dataclass(frozen=True)
class TensorInfo:
    """One tensor: its dtype as numpy names it, its sizes, and where its bytes ``begin:end`` are in the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True)
class Header:
    """What a file holds: its tensors by name, in the order of their data, and its metadata."""

    tensors: Mapping[str, TensorInfo]
    metadata: Mapping[str, str]
    data_begin: int


def read_header(fd: int, where: str, error: type[LlmcError] = EngineError) -> Header:
    """Read and check the header of an open file.

    Raises:
        error: the file is no safetensors file, contradicts itself, or is not as long as it says.
    """
    size = os.fstat(fd).st_size
    if size < 8:
        raise error(f"{where}: {size} bytes are too few for a safetensors file")
    length = int.from_bytes(os.pread(fd, 8, 0), "little")
    if length > MAX_HEADER_BYTES:
        raise error(f"{where}: the header is said to have {length} bytes; at most {MAX_HEADER_BYTES} are read")
    if 8 + length > size:
        raise error(f"{where}: the header ends at byte {8 + length}, but the file has {size} bytes; is it truncated?")
    text = os.pread(fd, length, 8)
    if not text.startswith(b"{"):
        raise error(f"{where}: the header does not begin with '{{'; this is no safetensors file")
    content = strict.parse_json(text, f"{where}: header", error)
    metadata = _metadata(content.pop("__metadata__", None), where, error)
    data_begin = 8 + length
    tensors = [_tensor(name, entry, data_begin, where, error) for name, entry in content.items()]
    tensors.sort(key=lambda tensor: (tensor.begin, tensor.end))
    _check_layout(tensors, data_begin, size, where, error)
    return Header({tensor.name: tensor for tensor in tensors}, metadata, data_begin)


def _metadata(value: object, where: str, error: type[LlmcError]) -> dict[str, str]:
    if value is None:
        return {}
    if not isinstance(value, dict) or not all(isinstance(v, str) for v in value.values()):
        raise error(f"{where}: __metadata__ must map strings to strings")
    return value


def _tensor(name: str, entry: object, data_begin: int, where: str, error: type[LlmcError]) -> TensorInfo:
    spot = f"{where}: tensor {name!r}"
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise error(f"{spot}: must have exactly dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise error(f"{spot}: dtype {dtype!r} is not supported; supported: {', '.join(DTYPES)}")
    if not isinstance(shape, list) or len(shape) > MAX_RANK or not all(_is_size(n) for n in shape):
        raise error(f"{spot}: {shape!r:.80} is no shape")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(_is_size(n) for n in offsets):
        raise error(f"{spot}: data_offsets {offsets!r:.80} are no range")
    name_of_dtype, nbytes = DTYPES[dtype]
    if offsets[0] % nbytes:
        raise error(f"{spot}: begins at byte {offsets[0]} of the data, which is no multiple of its {nbytes}-byte items")
    for n in shape:
        nbytes *= n
        if nbytes >= 1 << 63:
            raise error(f"{spot}: the sizes {shape!r:.80} overflow 64 bits")
    begin, end = offsets
    if begin > end or end - begin != nbytes:
        raise error(f"{spot}: {dtype} {shape} takes {nbytes} bytes, but its range {begin}:{end} has {end - begin}")
    return TensorInfo(name, name_of_dtype, tuple(shape), data_begin + begin, data_begin + end)


def _is_size(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def _check_layout(tensors: list[TensorInfo], begin: int, size: int, where: str, error: type[LlmcError]) -> None:
    end = begin
    for tensor in tensors:
        if tensor.begin != end:
            kind = "overlaps the tensor before it" if tensor.begin < end else "leaves a hole before it"
            raise error(f"{where}: tensor {tensor.name!r} {kind}: it begins at byte {tensor.begin}, expected {end}")
        end = tensor.end
    if end != size:
        what = "is it truncated?" if size < end else "there are bytes that belong to no tensor"
        raise error(f"{where}: expected {end} bytes, found {size}; {what}")
