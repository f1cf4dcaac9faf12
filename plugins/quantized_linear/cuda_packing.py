"""The packed layout of quantized weights for CUDA; see plugins/cuda_packing.py.

codes   uint8 [panels, chunks, 4, bytes of a step]. int4 in steps of 16: word h of a lane holds tiles 2 h and
        2 h + 1, its bits from 4 i + 16 q on column q of pair i % 2 of tile i / 2 of these, so that a mask gives the
        pair as two 16-bit numbers. int4 in steps of 32: the first 16 columns in the low halves of bytes, the others
        in the high ones. int8 in steps of 32: the code minus 128.
scale   float16 or float32 [panels, G, 32]; zero uint8 or float32 of the same shape
"""

from __future__ import annotations

import numpy as np

from llmc.errors import KernelError
from llmc.plugins.cuda_packing import PANEL, Array, Layout, fragment_shape, fragments, from_fragments, step_of
from llmc.plugins.quantized_linear.packing import check_format, groups


def layout(format: str, group: int, compute: str, x_group: int, rows: int, columns: int, capability: int) -> Layout:
    """Of a weight [rows, columns] that is multiplied as ``compute`` and ``x_group`` of llmc::quantized_linear say."""
    block = x_group if 0 < x_group < columns else group
    return Layout(rows, columns, format, step_of(format, compute, capability), block)


def pack(where: Layout, codes: Array) -> Array:
    """Pack codes [rows, columns], uint8, one per byte.

    Raises:
        KernelError: a code is beyond the format, or NaN (fp8).
    """
    check_format(where.format, max(where.block, 0))
    if codes.shape != (where.rows, where.columns) or codes.dtype != np.uint8:
        raise KernelError(f"codes to pack must be uint8 [rows, columns], found {codes.dtype} {list(codes.shape)}")
    if where.format == "int4" and codes.size and codes.max() > 15:
        raise KernelError(f"an int4 code is 0 to 15, found {codes.max()}")
    if where.format == "fp8" and ((codes & 0x7F) == 0x7F).any():
        raise KernelError("an fp8 code is NaN; the weights it comes from are damaged")
    if where.format == "int8" and where.step == 32:
        codes = codes ^ np.uint8(0x80)
    parts = fragments(where, codes)
    if where.format == "int4" and where.step == 16:  # ..., tile, half, q -> q, tile, half: ascending bits of a word
        parts = parts.transpose(0, 1, 2, 4, 5, 3, 8, 6, 7)
        parts = parts[..., 0] | parts[..., 1] << 4
    elif where.step == 16:
        parts = parts.transpose(0, 1, 2, 4, 5, 3, 6, 7, 8)
    elif where.format == "int4":
        parts = parts.transpose(0, 1, 2, 4, 5, 3, 6, 8, 7)
        parts = parts[..., 0] | parts[..., 1] << 4
    return np.ascontiguousarray(parts).reshape(where.shape)


def unpack(where: Layout, packed: Array) -> Array:
    """The codes [rows, columns]."""
    panels, chunks, steps, tiles, g, t, two, halves, pairs = fragment_shape(where)
    if where.format == "int4":
        packed = np.stack([packed & 15, packed >> 4], -1)
    if where.format == "int4" and where.step == 16:
        parts = packed.reshape(panels, chunks, steps, g, t, tiles, pairs, two, halves).transpose(
            0, 1, 2, 5, 3, 4, 7, 8, 6
        )
    elif where.step == 16:
        parts = packed.reshape(panels, chunks, steps, g, t, tiles, two, halves, pairs).transpose(
            0, 1, 2, 5, 3, 4, 6, 7, 8
        )
    elif where.format == "int4":
        parts = packed.reshape(panels, chunks, steps, g, t, tiles, two, pairs, halves).transpose(
            0, 1, 2, 5, 3, 4, 6, 8, 7
        )
    else:
        parts = packed.reshape(fragment_shape(where))
    codes = from_fragments(where, parts)
    return codes ^ np.uint8(0x80) if where.format == "int8" and where.step == 32 else codes


def scale_shape(rows: int, columns: int, group: int) -> tuple[int, int, int]:
    """The shape of packed scales and zeros."""
    return -(-rows // PANEL), groups(columns, group), PANEL


def pack_scales(values: Array, dtype: str) -> Array:
    """Pack scales or zeros [rows, G], as ``dtype``: float16, float32, or for zeros uint8.

    Raises:
        KernelError: ``dtype`` does not hold them exactly, or they are not finite.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        cast = values.astype(dtype)
    if not np.isfinite(values).all() or not np.array_equal(cast.astype(np.float64), values.astype(np.float64)):
        raise KernelError(f"scales or zeros are not finite, or not all {dtype} numbers")
    rows, count = values.shape
    packed = np.zeros((-(-rows // PANEL) * PANEL, count), cast.dtype)
    packed[:rows] = cast
    return np.ascontiguousarray(packed.reshape(-1, PANEL, count).transpose(0, 2, 1))


def unpack_scales(packed: Array, rows: int) -> Array:
    """Scales or zeros [rows, G], in their dtype."""
    return packed.transpose(0, 2, 1).reshape(-1, packed.shape[1])[:rows]
