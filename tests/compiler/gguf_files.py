"""Writes small GGUF files, byte by byte or with the gguf library, whole and broken."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

KINDS = {bool: (7, "<?"), int: (4, "<I"), float: (6, "<f")}


def string(text: str | bytes) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def value(item: Any) -> bytes:
    if isinstance(item, str):
        return struct.pack("<I", 8) + string(item)
    if isinstance(item, list):
        if isinstance(item[0], str):
            return struct.pack("<IIQ", 9, 8, len(item)) + b"".join(map(string, item))
        kind, format = KINDS[type(item[0])]
        return struct.pack("<IIQ", 9, kind, len(item)) + b"".join(struct.pack(format, i) for i in item)
    kind, format = KINDS[type(item)]
    return struct.pack("<I", kind) + struct.pack(format, item)


def tensor_entry(name: str, shape: Sequence[int], kind: int, offset: int) -> bytes:
    dims = struct.pack(f"<{len(shape)}Q", *reversed(shape))
    return string(name) + struct.pack("<I", len(shape)) + dims + struct.pack("<IQ", kind, offset)


def gguf_bytes(
    metadata: Mapping[str, Any],
    tensors: Mapping[str, tuple[Sequence[int], int, bytes]],
    *,
    version: int = 3,
    magic: bytes = b"GGUF",
    tensor_count: int | None = None,
    metadata_count: int | None = None,
    shift: int = 0,
    alignment: int = 32,
) -> bytes:
    """A file. ``tensors``: name -> (shape, type, data). ``shift`` moves the offset of every tensor but the first."""
    entries, data = b"", b""
    for number, (name, (shape, kind, raw)) in enumerate(tensors.items()):
        data += b"\0" * (-len(data) % alignment)
        entries += tensor_entry(name, shape, kind, len(data) + (shift if number else 0))
        data += raw
    counts = (
        len(tensors) if tensor_count is None else tensor_count,
        len(metadata) if metadata_count is None else metadata_count,
    )
    head = magic + struct.pack("<IQQ", version, *counts)
    head += b"".join(string(key) + value(item) for key, item in metadata.items()) + entries
    return head + b"\0" * (-len(head) % alignment) + data


def f32(array: NDArray[Any]) -> tuple[Sequence[int], int, bytes]:
    return array.shape, 0, array.astype(np.float32).tobytes()


def write_gguf(path: Path, architecture: str, metadata: Mapping[str, Any], tensors: Mapping[str, Any]) -> Path:
    """With the gguf library. A tensor is an array (stored as it is) or (array, quantization type)."""
    import gguf

    writer = gguf.GGUFWriter(path, architecture)
    for key, item in metadata.items():
        if isinstance(item, bool):
            writer.add_bool(key, item)
        elif isinstance(item, int):
            writer.add_uint32(key, item)
        elif isinstance(item, float):
            writer.add_float32(key, item)
        elif isinstance(item, list):
            writer.add_array(key, item)
        else:
            writer.add_string(key, item)
    for name, item in tensors.items():
        if isinstance(item, tuple):
            array, kind = item
            writer.add_tensor(name, gguf.quants.quantize(array.astype(np.float32), kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, item)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
