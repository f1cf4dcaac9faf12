"""The packed layout of quantized weights [rows, columns]: panels of 16 rows, as plugins/linear has them.

    int8    uint8 [ceil(rows / 16), lines, 16, 4]: a line has 4 columns of 16 rows
    int4    uint8 [ceil(rows / 16), lines, 16, 4]: a line has 8 columns; byte j holds column j in its low 4 bits and
            column j + 4 in its high ones
    fp8     uint8 [ceil(rows / 16), lines, 16, 2]: a line has 2 columns
    scale   float16 or float32 [ceil(rows / 16), G, 16]; zero uint8 or float32 of the same shape

Each group of columns begins a new line; columns and rows that are missing have the code, scale and zero 0. Experts have
one more axis in front. A tied embedding reads the same tensor.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from llmc.errors import KernelError

PANEL = 16
"""Rows of a panel."""

LINE = {"int8": 4, "int4": 8, "fp8": 2}
"""Formats, and the columns of a line."""

CODES = {"int8": 256, "int4": 16, "fp8": 256}
"""How many codes there are."""

MIDDLE = {"int8": 128, "int4": 8}
"""The code of 0 where there are no zeros."""

BLOCK = 512
"""Most columns that are summed as integers: their sums are exact in float32."""

Array = NDArray[Any]


@dataclass(frozen=True)
class Block:
    """Columns [begin, end) that share the scale of the weight ``group`` and the scale of x ``unit``."""

    begin: int
    end: int
    group: int
    unit: int


def blocks(columns: int, group: int, x_group: int = 0) -> list[Block]:
    """The blocks over which products are summed: pieces of at most 512 columns of each unit of each group."""
    found = []
    x_group = x_group if x_group < columns else 0
    group = group or max(columns, 1)
    unit, number = x_group or columns, -1
    for g, start in enumerate(range(0, columns, group)):
        stop = min(columns, start + group)
        for first in range(start, stop, min(unit, group)):
            last = min(stop, first + min(unit, group))
            number += 1
            found += [Block(b, min(last, b + BLOCK), g, number if x_group else 0) for b in range(first, last, BLOCK)]
    return found


def check_format(format: str, group: int) -> None:
    """Refuse what there is no layout for.

    Raises:
        KernelError: the format is unknown, or the group is negative.
    """
    if format not in LINE:
        raise KernelError(f"there is no quantized format {format!r}; choose one of {', '.join(LINE)}")
    if group < 0:
        raise KernelError(f"a group of {group} columns; give their number, or 0 for one scale per row")


def groups(columns: int, group: int) -> int:
    """Scales of a row."""
    return -(-columns // group) if group else 1


def lines(format: str, columns: int, group: int) -> int:
    """Lines of a panel."""
    check_format(format, group)
    if not group or group >= columns:
        return -(-columns // LINE[format])
    return columns // group * -(-group // LINE[format]) + -(-(columns % group) // LINE[format])


def packed_shape(format: str, rows: int, columns: int, group: int) -> tuple[int, ...]:
    """The shape of the packed codes (uint8)."""
    return -(-rows // PANEL), lines(format, columns, group), PANEL, 2 if format == "fp8" else 4


def scale_shape(rows: int, columns: int, group: int) -> tuple[int, ...]:
    """The shape of packed scales and zeros."""
    return -(-rows // PANEL), groups(columns, group), PANEL


def scale_dtype(scale: Array) -> str:
    """The smallest dtype that holds these scales exactly: float16 or float32."""
    with np.errstate(over="ignore"):
        return "float16" if np.array_equal(scale.astype(np.float16).astype(np.float32), scale) else "float32"


def pack(format: str, group: int, codes: Array) -> Array:
    """Pack codes [rows, columns], uint8, one per byte.

    Raises:
        KernelError: they are not such an array, a code is beyond the format, or NaN (fp8).
    """
    check_format(format, group)
    if codes.ndim != 2 or codes.dtype != np.uint8:
        raise KernelError(f"codes to pack must be uint8 [rows, columns], found {codes.dtype} {list(codes.shape)}")
    if format == "int4" and codes.size and codes.max() > 15:
        raise KernelError(f"an int4 code is 0 to 15, found {codes.max()}")
    if format == "fp8" and ((codes & 0x7F) == 0x7F).any():
        raise KernelError("an fp8 code is NaN; the weights it comes from are damaged")
    rows, columns = codes.shape
    shape = packed_shape(format, rows, columns, group)
    padded = _pad_groups(codes, group, LINE[format])
    if rows % PANEL:
        padded = np.concatenate([padded, np.zeros((-rows % PANEL, padded.shape[1]), np.uint8)])
    if format == "int4":
        halves = padded.reshape(shape[0], PANEL, shape[1], 2, 4)
        packed = (halves[:, :, :, 0] | halves[:, :, :, 1] << 4).transpose(0, 2, 1, 3)
    else:
        packed = padded.reshape(shape[0], PANEL, shape[1], LINE[format]).transpose(0, 2, 1, 3)
    return np.ascontiguousarray(packed)


def pack_scales(values: Array, dtype: str) -> Array:
    """Pack scales or zeros [rows, G], as ``dtype``: float16, float32, or for zeros uint8.

    Raises:
        KernelError: they are not such an array, not finite, or ``dtype`` does not hold them exactly.
    """
    if values.ndim != 2 or dtype not in ("float16", "float32", "uint8"):
        raise KernelError(f"scales to pack must be [rows, G], found {list(values.shape)} as {dtype}")
    with np.errstate(over="ignore", invalid="ignore"):
        cast = values.astype(dtype)
    if not np.isfinite(values).all() or not np.array_equal(cast.astype(np.float64), values.astype(np.float64)):
        raise KernelError(f"scales or zeros are not finite, or not all {dtype} numbers")
    rows, count = values.shape
    packed = np.zeros((-(-rows // PANEL), PANEL, count), cast.dtype)
    packed.reshape(-1, count)[:rows] = cast
    return np.ascontiguousarray(packed.transpose(0, 2, 1))


def unpack(format: str, group: int, packed: Array, rows: int, columns: int) -> Array:
    """The codes [rows, columns]."""
    return _unpack_panels(format, group, packed.transpose(0, 2, 1, 3), columns).reshape(-1, columns)[:rows]


def unpack_scales(packed: Array, rows: int) -> Array:
    """Scales or zeros [rows, G], in their dtype."""
    return packed.transpose(0, 2, 1).reshape(-1, packed.shape[1])[:rows]


def pack_stream(
    read: Callable[[int, int], Array], format: str, group: int, rows: int, columns: int, chunk_bytes: int = 16 << 20
) -> Iterator[Array]:
    """Packed panels of codes that are read in row ranges, ``chunk_bytes`` of them or one panel at a time.

    Concatenated, the pieces are ``pack`` of the whole.
    """
    step = max(1, chunk_bytes // max(1, PANEL * columns)) * PANEL
    for start in range(0, rows, step):
        yield pack(format, group, read(start, min(rows, start + step)))


def dequantize(format: str, group: int, codes: Array, scale: Array, zero: Array | None) -> NDArray[np.float32]:
    """The numbers that codes [..., columns] with scales and zeros [..., G] stand for, computed in float32."""
    check_format(format, group)
    columns = codes.shape[-1]
    spread = np.arange(columns) // (group or max(columns, 1))
    wide: NDArray[np.float32] = scale.astype(np.float32)[..., spread]
    numbers: NDArray[np.float32]
    if format == "fp8":
        numbers = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
        return numbers * wide
    numbers = codes.astype(np.float32)
    if zero is None:
        return (numbers - np.float32(MIDDLE[format])) * wide
    if zero.dtype == np.uint8:
        return (numbers - zero.astype(np.float32)[..., spread]) * wide
    offsets: NDArray[np.float32] = zero.astype(np.float32)[..., spread]
    return numbers * wide + offsets


def dequantize_rows(
    format: str, group: int, packed: Array, scale: Array, zero: Array | None, ids: Array, columns: int
) -> NDArray[np.float32]:
    """Rows ``ids`` of a packed weight: [*ids.shape, columns] float32. Reads only these (embedding)."""
    panel, lane = ids // PANEL, ids % PANEL
    codes = _unpack_panels(format, group, packed[panel, :, lane], columns)
    zeros = None if zero is None else zero[panel, :, lane]
    return dequantize(format, group, codes, scale[panel, :, lane], zeros)


def _pad_groups(codes: Array, group: int, line: int) -> Array:
    """Each group made a multiple of a line wide, with zeros."""
    rows, columns = codes.shape
    group = min(group, columns) or columns
    whole = columns // group if group else 0
    parts = []
    for first, count, width in ((0, whole, group), (whole * group, 1, columns - whole * group)):
        if count and width:
            part = codes[:, first : first + count * width].reshape(rows, count, width)
            if width % line:
                part = np.concatenate([part, np.zeros((rows, count, -width % line), np.uint8)], 2)
            parts.append(part.reshape(rows, -1))
    return parts[0] if len(parts) == 1 else np.concatenate([np.zeros((rows, 0), np.uint8), *parts], 1)


def _unpack_panels(format: str, group: int, packed: Array, columns: int) -> Array:
    """[..., lines, 4 or 2] -> [..., columns]."""
    check_format(format, group)
    if format == "int4":
        packed = np.concatenate([packed & 15, packed >> 4], -1)
    line = LINE[format]
    flat = packed.reshape(*packed.shape[:-2], -1)
    group = min(group, columns) or columns
    if not group or (group % line == 0):
        return flat[..., :columns]
    width = -(-group // line) * line
    picked = np.concatenate([np.arange(group) + g * width for g in range(groups(columns, group))])[:columns]
    return flat[..., picked]
