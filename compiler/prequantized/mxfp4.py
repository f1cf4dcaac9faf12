"""MXFP4 as gpt-oss stores its experts: 4-bit floats E2M1 in blocks of 32 with a power of two.

A parameter [E, K, N] has ``..._blocks`` uint8 [E, N, K / 32, 16], two codes a byte, the first in the lower half, and
``..._scales`` uint8 [E, N, K / 32]: exponents plus 127. The codes are halves of small integers, so they are kept as
int8 with half the scale: exactly.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmc.compiler.prequantized.base import Kind, Options, Tensors
from llmc.compiler.quantized_weights import grouped
from llmc.compiler.weights import Reshape, Sized, Transpose, WeightSource

BLOCK = 32
DOUBLED = np.array([0, 1, 2, 3, 4, 6, 8, 12], np.int16)
"""Twice the values of the codes 0 to 7; 8 to 15 are their negatives."""

INT8_CODES = np.concatenate([128 + DOUBLED, 128 - DOUBLED]).astype(np.uint8)


def _read(options: Options, tensors: Tensors) -> None:
    options.ignore("modules_to_not_convert", "dequantize")
    for stem in tensors.stems("_blocks"):
        tensors.put(stem, _weight(options, tensors, stem))


def _weight(options: Options, tensors: Tensors, stem: str) -> WeightSource:
    blocks = tensors.take(f"{stem}_blocks", "uint8", (None, None, None, BLOCK // 2))
    scales = tensors.take(f"{stem}_scales", "uint8", blocks.shape[:3], "for the blocks that are there")
    experts, rows, groups = scales.shape
    codes = _Codes(Reshape(blocks, (experts * rows, groups * BLOCK // 2)))
    halves = _Halves(Reshape(scales, (experts * rows, groups)))
    weight = grouped(codes, halves, None, "int8", BLOCK, (experts, rows, groups * BLOCK), options.dtype)
    return Transpose(weight, (0, 2, 1))


@dataclass(frozen=True, eq=False)
class _Codes(Sized):
    """Bytes of two codes as codes of int8."""

    packed: WeightSource
    dtype = "uint8"

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.packed.shape[0], self.packed.shape[1] * 2)

    def rows(self, start: int, stop: int) -> NDArray[Any]:
        pairs = self.packed.rows(start, stop)
        return INT8_CODES[np.stack([pairs & 15, pairs >> 4], 2).reshape(len(pairs), -1)]


@dataclass(frozen=True, eq=False)
class _Halves(Sized):
    """Half the powers of two, whose exponents are stored."""

    exponents: WeightSource
    dtype = "float32"

    @property
    def shape(self) -> tuple[int, ...]:
        return self.exponents.shape

    def rows(self, start: int, stop: int) -> NDArray[Any]:
        exponents = self.exponents.rows(start, stop).astype(np.int32) - 128
        return np.ldexp(np.float32(1), exponents).astype(np.float32)


MXFP4 = Kind("mxfp4", _read)
