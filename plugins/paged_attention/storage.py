"""How keys and values are stored: the types of the cache, the numbers that come back from each, and bytes.

The native side is csrc/kv_layout.h (pages) and kv_codes.h (numbers). Nothing here knows torch: the runtime asks for
sizes, the references for ``round_trip``.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

KV_DTYPES = ("float32", "bfloat16", "float16", "float8_e4m3", "int8", "int4")
"""What keys and values can be stored as."""

ALIASES = {"fp8": "float8_e4m3"}
"""Other names that users may write."""

QUANTIZED = ("float8_e4m3", "int8", "int4")
"""Those that are codes with scales."""

POSITIONS = 16
"""Of a page; sizes are those of whole pages."""

GROUP = 64
"""Dims of int4 that share a step and a least value."""

NIBBLE_DIMS = 32
"""Dims of a value whose int4 codes fill 16 bytes."""

REACHES = np.exp2(np.log2(448) - np.arange(8) / 8).astype(np.float32)
"""What the largest number of a row of E4M3 may become."""

LARGEST = np.float32(448)
"""Of the numbers of E4M3."""

SMALLEST = np.float32(2.0**-100)
"""A row without a larger number is stored as zeros where it gets a scale."""

Array = NDArray[np.float32]


def bytes_per_position(dtype: str, key_dim: int, value_dim: int) -> int:
    """Bytes of the key and the value of one kv head at one position, scales included."""
    if dtype == "int4":
        scales = 4 * (-(-key_dim // GROUP) + -(-value_dim // GROUP))
        return -(-key_dim // 2) + -(-key_dim // 8) + -(-value_dim // NIBBLE_DIMS) * 16 + scales
    if dtype in ("float8_e4m3", "int8"):
        return key_dim + value_dim + 2 * 4
    if dtype == "bfloat16":  # keys in pairs of dims
        return (-(-key_dim // 2) * 2 + value_dim) * 2
    return (key_dim + value_dim) * np.dtype(dtype).itemsize


def round_trip(
    x: Array,
    dtype: str,
    *,
    keys: bool,
    center: Array | None = None,
    scale: Array | None = None,
    feedback: Array | None = None,
) -> Array:
    """The numbers that attention reads where ``x`` [..., dims] was stored, each row [dims] a head's at one position.

    What is stored is (x - center) * scale, where these [heads, dims] are given. ``feedback`` [heads, dims, dims] says
    how keys of float8_e4m3 are rounded; other types do without.

    - bfloat16, float16: rounded to nearest, ties to even.
    - int8: scale = max|x| / 127, code = x * (127 / max|x|) rounded to nearest even; a scale for each row.
    - float8_e4m3: the same with one of REACHES in place of 127, that with the least error, and codes of E4M3, y -> c;
      then the scale is multiplied by sum(y y) / sum(y c), so that the error has no part along the row, which alone
      would change its attention most. With ``feedback``, dims are rounded one after the other, and the error of dim d,
      times feedback[d], is taken from all of y: 1 for dim d itself, none for those before, and for those behind what
      makes up for it best where queries are what they mostly are.
    - int4: for each 64 dims step = (max - min) / 15 and min, both rounded to float16, code = (x - min) * (1 / step)
      rounded and clamped to 0 .. 15; the number is step * code + min. Keys have codes of 5 bits, 0 .. 31: with 4 they
      cost a small model 3 % of perplexity, values 0.2 %.
    - All three rotate keys (see ``rotate``) before and back after, so that few large dims spoil no others, and int4
      values too. Kernels rotate queries and results in place of what they read. Large dims that hardly change, as in
      the keys of Qwen2.5, are what ``center`` is for.

    A row with a number that is not finite becomes NaN in full (int4: its group), also where float16 is too small.
    """
    if dtype not in KV_DTYPES:
        raise ValueError(f"there is no KV dtype {dtype!r}")
    x = np.asarray(x, np.float32)
    if center is not None or scale is not None:
        moved = x if center is None else x - center
        moved = round_trip(moved if scale is None else moved * scale, dtype, keys=keys, feedback=feedback)
        moved = moved if scale is None else moved / scale
        return moved if center is None else moved + center
    if dtype == "float32":
        return x
    with np.errstate(over="ignore", invalid="ignore"):
        if dtype in ("bfloat16", "float16"):
            return _rounded(x, dtype)
        rotated = keys or dtype == "int4"
        stored = rotate(x) if rotated else x
        result = _int4(stored, 31 if keys else 15) if dtype == "int4" else _scaled(stored, dtype, feedback)
        return rotate(result) if rotated else result


def rotate(x: Array) -> Array:
    """Orthogonal, and its own inverse: Hadamard's matrix for each block of dims, the largest powers of two that fit."""
    blocks, start, dims = [], 0, x.shape[-1]
    while start < dims:
        size = 1 << ((dims - start).bit_length() - 1)
        block = np.asarray(x[..., start : start + size], np.float32)
        for _ in range(size.bit_length() - 1):
            even, odd = block[..., 0::2], block[..., 1::2]
            block = np.concatenate([even + odd, even - odd], -1)
        blocks.append(block * np.float32(size**-0.5))
        start += size
    return np.concatenate(blocks, -1)


def _rounded(x: Array, dtype: str) -> Array:
    """To the nearest number of a float type."""
    import ml_dtypes  # not in the runtime, which asks for sizes only

    return x.astype(np.float16 if dtype == "float16" else getattr(ml_dtypes, dtype)).astype(np.float32)


def _scaled(x: Array, dtype: str, feedback: Array | None) -> Array:
    """Codes with one scale for each row."""
    finite = np.isfinite(x).all(-1, keepdims=True)
    largest = np.abs(np.where(finite, x, 0)).max(-1, keepdims=True)
    stored = finite & (largest >= SMALLEST)
    largest = np.where(stored, largest, 1)
    most = np.float32(127) if dtype == "int8" else _best_reach(np.where(stored, x, 0), largest)
    inverse = most / largest
    scale = np.where(stored, largest / most, np.where(finite, 0, np.nan)).astype(np.float32)
    y = (np.where(stored, x, 0) * inverse).astype(np.float32)
    if dtype == "int8":
        return np.rint(y) * scale
    codes = _rounded(y, "float8_e4m3fn") if feedback is None else _fed_back(y, feedback)
    exact = y.astype(np.float64)
    own, shared = (exact * exact).sum(-1, keepdims=True), (exact * codes).sum(-1, keepdims=True)
    along = np.divide(own, shared, out=np.ones_like(own), where=stored).astype(np.float32)
    return np.asarray(codes * (scale * along), np.float32)


def _fed_back(y: Array, feedback: Array) -> Array:
    """Numbers of E4M3 in place of y, each dim's error fed to those behind it."""
    for dim in range(y.shape[-1]):
        given = y[..., dim : dim + 1]
        error = given - _rounded(np.clip(given, -LARGEST, LARGEST), "float8_e4m3fn")
        y = y - error * feedback[..., dim, :]
    return y


def _best_reach(x: Array, largest: Array) -> Array:
    """That of REACHES with the least squared error, the codes taken for numbers of 4 bits; the first, if equal."""
    errors = []
    for reach in REACHES:
        y = (x * (reach / largest)).astype(np.float32)
        shifted = y * np.float32((1 << 20) + 1)
        rounded = shifted - (shifted - y)
        errors.append(np.square((rounded - y).astype(np.float64)).sum(-1, keepdims=True) / np.float64(reach) ** 2)
    return np.asarray(REACHES[np.argmin(errors, axis=0)])


def _int4(x: Array, most: int) -> Array:
    """Codes 0 .. most with a step and a least value for each group."""
    result = np.empty_like(x)
    for start in range(0, x.shape[-1], GROUP):
        group = x[..., start : start + GROUP]
        finite = np.isfinite(group).all(-1, keepdims=True)
        given = np.where(finite, group, 0)
        least, largest = given.min(-1, keepdims=True), given.max(-1, keepdims=True)
        step = ((largest - least) / np.float32(most)).astype(np.float16).astype(np.float32)
        least = least.astype(np.float16).astype(np.float32)
        finite = finite & np.isfinite(step) & np.isfinite(least)
        inverse = np.divide(1, step, out=np.zeros_like(step), where=step > 0)
        codes = np.rint(np.clip((given - least) * inverse, 0, most))
        result[..., start : start + GROUP] = np.where(finite, codes * step + least, np.nan)
    return result
