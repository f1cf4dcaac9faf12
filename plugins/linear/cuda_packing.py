"""The packed layout of bfloat16 and float16 weights for CUDA; see plugins/cuda_packing.py. Float32 stays as it is."""

from __future__ import annotations

import numpy as np

from llmc.plugins.cuda_packing import Array, Layout, fragment_shape, fragments, from_fragments


def layout(rows: int, columns: int) -> Layout:
    """Of a weight [rows, columns]."""
    return Layout(rows, columns, "plain", 16)


def pack(weight: Array) -> Array:
    """Pack [rows, columns] of float16 or (ml_dtypes) bfloat16; the dtype stays."""
    where = layout(*weight.shape)
    return np.ascontiguousarray(fragments(where, weight)).reshape(where.shape)


def unpack(packed: Array, rows: int, columns: int) -> Array:
    """The weight [rows, columns]."""
    where = layout(rows, columns)
    return from_fragments(where, packed.reshape(fragment_shape(where)))
