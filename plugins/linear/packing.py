"""The packed layout of weights [rows, columns] that are multiplied: panels of 16 rows, so one vector holds 16 outputs.

    float32, float16   [ceil(rows / 16), columns, 16]
    bfloat16           [ceil(rows / 16), ceil(columns / 2), 16, 2]: pairs of columns, as dot products take them

Missing rows and the missing column of an odd number are zero. Linear, moe (one more axis) and embedding share it.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

PANEL = 16
"""Rows of a panel."""

DTYPES = ("float32", "bfloat16", "float16")
"""What can be packed."""


def packed_shape(rows: int, columns: int, dtype: str) -> tuple[int, ...]:
    """The shape of the packed form."""
    assert dtype in DTYPES, f"{dtype} weights have no packed form"
    panels = -(-rows // PANEL)
    return (panels, -(-columns // 2), PANEL, 2) if dtype == "bfloat16" else (panels, columns, PANEL)


def pack(weight: NDArray[Any]) -> NDArray[Any]:
    """Pack [rows, columns] of float32, float16 or (ml_dtypes) bfloat16; the dtype stays."""
    rows, columns = weight.shape
    dtype = weight.dtype
    shape = packed_shape(rows, columns, dtype.name)
    if dtype.name == "bfloat16" and columns % 2:
        weight = np.concatenate([weight, np.zeros((rows, 1), dtype)], 1)
    words = np.ascontiguousarray(weight)
    words = words.view(np.uint32) if dtype.name != "float16" else words.view(np.uint16)
    packed = np.zeros((shape[0], words.shape[1], PANEL), words.dtype)
    full = rows // PANEL
    packed[:full] = words[: full * PANEL].reshape(full, PANEL, words.shape[1]).transpose(0, 2, 1)
    if full < shape[0]:
        packed[full, :, : rows - full * PANEL] = words[full * PANEL :].T
    return packed.view(dtype).reshape(shape)


def unpack(packed: NDArray[Any], rows: int, columns: int) -> NDArray[Any]:
    """The weight [rows, columns]. bfloat16 is told by its rank, so it may come as uint16."""
    if packed.ndim == 4:
        panels, pairs, _, _ = packed.shape
        return packed.transpose(0, 2, 1, 3).reshape(panels * PANEL, pairs * 2)[:rows, :columns]
    return packed.transpose(0, 2, 1).reshape(-1, packed.shape[1])[:rows, :columns]


def unpack_rows(packed: NDArray[Any], ids: NDArray[Any], columns: int) -> NDArray[Any]:
    """Rows ``ids`` of the weight: [*ids.shape, columns]. Reads only these (embedding)."""
    picked = packed[ids // PANEL, :, ids % PANEL]
    return picked.reshape(*ids.shape, -1)[..., :columns]


def pack_stream(
    read: Callable[[int, int], NDArray[Any]], rows: int, columns: int, chunk_bytes: int = 16 << 20
) -> Iterator[NDArray[Any]]:
    """Packed panels of a weight that is read in row ranges, ``chunk_bytes`` of it or one panel at a time.

    Concatenated, the pieces are ``pack`` of the whole.
    """
    probe = read(0, 0)
    step = max(1, chunk_bytes // max(1, PANEL * columns * probe.dtype.itemsize)) * PANEL
    for start in range(0, rows, step):
        yield pack(read(start, min(rows, start + step)))
