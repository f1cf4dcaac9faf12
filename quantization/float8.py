"""Float8 numbers of the kind E4M3FN: 4 bits of exponent, 3 of mantissa, no infinities, 448 the largest."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

LARGEST = 448.0


def decode_e4m3(codes: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    """Bit patterns -> their values; 0x7f and 0xff are NaN."""
    return _VALUES[codes]


def encode_e4m3(values: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    """The nearest numbers, halves to even; what is beyond 448 becomes 448, and NaN 0x7f."""
    values = np.asarray(values, np.float32)
    # A step is 2^-3 of the power of two at or below, and 2^-9 from 2^-6 down, where numbers are subnormal.
    exponent = np.maximum(np.frexp(np.abs(values))[1] - 1, -6)
    magnitude = np.minimum(np.ldexp(np.rint(np.ldexp(np.abs(values), 3 - exponent)), exponent - 3), np.float32(LARGEST))
    codes = np.searchsorted(_VALUES[:0x7F], magnitude).astype(np.uint8)
    codes = np.where(np.isnan(values), np.uint8(0x7F), codes)
    sign = np.signbit(values).astype(np.uint8) << np.uint8(7)
    return np.asarray(codes | sign, np.uint8)


def _values() -> npt.NDArray[np.float32]:
    codes = np.arange(256)
    exponent, mantissa = (codes >> 3) & 15, codes & 7
    normal = np.ldexp(1 + mantissa / 8, exponent - 7)
    magnitude = np.where(exponent > 0, normal, np.ldexp(mantissa / 8, -6))
    values = np.where(codes & 128, -magnitude, magnitude).astype(np.float32)
    values[[0x7F, 0xFF]] = np.nan
    return values


_VALUES = _values()
