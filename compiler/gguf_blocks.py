"""The blocks of quantized GGUF tensors as codes and scales.

ggml stores 32 or 256 numbers in a block, with a scale for 16 or 32 of them. All types here are small integers times a
float32, plus an offset for those with a minimum, so that the formats of llmc hold them exactly. The layouts are in
https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmc.compiler.gguf_file import BlockTensor
from llmc.quantization.base import Quantized, Scheme

Bytes = NDArray[np.uint8]
Decoded = tuple[Bytes, NDArray[np.float32], NDArray[np.float32] | None]
"""Codes [n, size of a block], scales [n, groups], offsets [n, groups] of n blocks."""

NONLINEAR = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8)
"""What the codes of IQ4_NL and IQ4_XS stand for."""

E2M1 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)
"""Twice the 4-bit floats of MXFP4."""


@dataclass(frozen=True)
class Blocks:
    """How a type is decoded, and the form that its numbers have then."""

    format: str
    group: int
    offset: bool
    narrow: bool
    """Whether the scales are stored as float16, so that they need no more."""

    decode: Callable[[Bytes], Decoded]


def quantized(tensor: BlockTensor) -> BlockTensor:
    """The tensor as one that gives its codes, if it is a matrix of a type that is known here."""
    if tensor.type.name not in TYPES or len(tensor.shape) < 2:
        return tensor
    return QuantizedBlocks(tensor.file, tensor.name, tensor.type, tensor.shape, tensor.begin, tensor.row_bytes)


@dataclass(frozen=True, eq=False)
class QuantizedBlocks(BlockTensor):
    """A QuantizedSource: a tensor whose blocks are read as codes and scales."""

    order = None
    x_scale = ()

    @property
    def _blocks(self) -> Blocks:
        return TYPES[self.type.name]

    @property
    def scheme(self) -> Scheme:
        """Format and group."""
        return Scheme(self._blocks.format, self._blocks.group, not self._blocks.offset)

    @property
    def zero(self) -> str | None:
        """Types with a minimum have offsets."""
        return "float32" if self._blocks.offset else None

    @property
    def scale_dtype(self) -> str:
        """What holds every scale."""
        return "float16" if self._blocks.narrow else "float32"

    def quantized_rows(self, start: int, stop: int) -> Quantized:
        """Read and decode the blocks of these rows."""
        count = self._blocks_of_row
        blocks = self.raw(start, stop).reshape((stop - start) * count, self.row_bytes // count)
        codes, scale, zero = self._blocks.decode(blocks)
        shape = (stop - start, self.shape[-1] // self._blocks.group)
        return Quantized(
            self._blocks.format,
            self._blocks.group,
            self.shape[-1],
            codes.reshape(stop - start, self.shape[-1]),
            scale.astype(np.float32).reshape(shape),
            None if zero is None else zero.astype(np.float32).reshape(shape),
        )

    def scale_rows(self, start: int, stop: int) -> tuple[NDArray[Any], NDArray[Any] | None]:
        """Scales and offsets of these rows."""
        found = self.quantized_rows(start, stop)
        return found.scale, found.zero

    @property
    def _blocks_of_row(self) -> int:
        from gguf.constants import GGML_QUANT_SIZES

        return self.shape[-1] // int(GGML_QUANT_SIZES[self.type][0])


def _half(data: Bytes) -> NDArray[np.float32]:
    """Float16 [n, 2 bytes] -> [n, 1]."""
    return np.ascontiguousarray(data).view(np.float16).astype(np.float32)


def _fields(data: Bytes, bits: int, run: int) -> Bytes:
    """Fields of so many bits: of each run of bytes first the lowest field of each, then the next, ... -> [n, all]."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    fields = data.reshape(len(data), data.shape[1] // run, 1, run) >> shifts & np.uint8((1 << bits) - 1)
    return fields.reshape(len(data), data.shape[1] * 8 // bits)


def _signed(codes: NDArray[Any], middle: int) -> Bytes:
    """Codes of which ``middle`` means 0 -> those of int8, where 128 does."""
    return codes + np.uint8(128 - middle)


def _q4_0(data: Bytes) -> Decoded:
    return _fields(data[:, 2:], 4, 16), _half(data[:, :2]), None


def _q4_1(data: Bytes) -> Decoded:
    return _fields(data[:, 4:], 4, 16), _half(data[:, :2]), _half(data[:, 2:4])


def _fifth_bit(data: Bytes) -> Bytes:
    """The highest bit of 32 codes of 5 bits, one after another in 4 bytes."""
    return np.unpackbits(data, axis=1, bitorder="little") << np.uint8(4)


def _q5_0(data: Bytes) -> Decoded:
    codes = _fields(data[:, 6:], 4, 16) | _fifth_bit(data[:, 2:6])
    return _signed(codes, 16), _half(data[:, :2]), None


def _q5_1(data: Bytes) -> Decoded:
    codes = _fields(data[:, 8:], 4, 16) | _fifth_bit(data[:, 4:8])
    return codes, _half(data[:, :2]), _half(data[:, 2:4])


def _q8_0(data: Bytes) -> Decoded:
    return _signed(data[:, 2:], 0), _half(data[:, :2]), None


def _q2_k(data: Bytes) -> Decoded:
    """16 bytes of scales and minima of 4 bits, 64 of codes, and what the scales and the minima are multiplied by."""
    scale, least = _half(data[:, 80:82]), _half(data[:, 82:84])
    codes = _fields(data[:, 16:80], 2, 32)
    return codes, scale * (data[:, :16] & 15), -(least * (data[:, :16] >> 4))


def _q3_k(data: Bytes) -> Decoded:
    """32 bytes with the third bit of the codes (0 means minus 4), 64 with the others, 12 of scales of 6 bits."""
    codes = _fields(data[:, 32:96], 2, 32) | _fields(data[:, :32], 1, 32) << np.uint8(2)
    scales = _fields(data[:, 96:104], 4, 8) | _fields(data[:, 104:108], 2, 4) << np.uint8(4)
    return codes + np.uint8(8 - 4), _half(data[:, 108:110]) * (scales.astype(np.float32) - 32), None


def _scales_and_minima(data: Bytes) -> tuple[Bytes, Bytes]:
    """Eight each, of 6 bits, in 12 bytes: the first four in the low bits of 4 bytes each.

    Of the others, the last 4 bytes have the low bits, and the top bits of the first 8 bytes the high ones.
    """
    scales, minima, low = data[:, :4], data[:, 4:8], data[:, 8:]
    return (
        np.concatenate([scales & 63, low & 15 | scales >> 6 << 4], 1),
        np.concatenate([minima & 63, low >> 4 | minima >> 6 << 4], 1),
    )


def _q4_k(data: Bytes) -> Decoded:
    scales, minima = _scales_and_minima(data[:, 4:16])
    return _fields(data[:, 16:], 4, 32), _half(data[:, :2]) * scales, -(_half(data[:, 2:4]) * minima)


def _q5_k(data: Bytes) -> Decoded:
    scales, minima = _scales_and_minima(data[:, 4:16])
    codes = _fields(data[:, 48:], 4, 32) | _fields(data[:, 16:48], 1, 32) << np.uint8(4)
    return codes, _half(data[:, :2]) * scales, -(_half(data[:, 2:4]) * minima)


def _q6_k(data: Bytes) -> Decoded:
    """128 bytes with the low 4 bits of the codes, 64 with the high 2, 16 signed scales, and their scale."""
    codes = _fields(data[:, :128], 4, 64) | _fields(data[:, 128:192], 2, 32) << np.uint8(4)
    scales = data[:, 192:208].view(np.int8)
    return _signed(codes, 32), _half(data[:, 208:]) * scales.astype(np.float32), None


def _iq4_nl(data: Bytes) -> Decoded:
    return _signed(NONLINEAR[_fields(data[:, 2:], 4, 16)].view(np.uint8), 0), _half(data[:, :2]), None


def _iq4_xs(data: Bytes) -> Decoded:
    """Eight scales of 6 bits: the high 2 in two bytes, the low 4 in four."""
    low, high = _fields(data[:, 4:8], 4, 1), _fields(data[:, 2:4], 2, 1)
    scales = (low | high << np.uint8(4)).astype(np.float32) - 32
    codes = NONLINEAR[_fields(data[:, 8:], 4, 16)].view(np.uint8)
    return _signed(codes, 0), _half(data[:, :2]) * scales, None


def _mxfp4(data: Bytes) -> Decoded:
    """An exponent plus 127, and 4-bit floats; they are doubled here, and so the scale is halved."""
    scale = np.ldexp(np.float32(1), data[:, :1].astype(np.int32) - 128).astype(np.float32)
    return _signed(E2M1[_fields(data[:, 1:], 4, 16)].view(np.uint8), 0), scale, None


TYPES: Mapping[str, Blocks] = {
    "Q4_0": Blocks("int4", 32, False, True, _q4_0),
    "Q4_1": Blocks("int4", 32, True, True, _q4_1),
    "Q5_0": Blocks("int8", 32, False, True, _q5_0),
    "Q5_1": Blocks("int8", 32, True, True, _q5_1),
    "Q8_0": Blocks("int8", 32, False, True, _q8_0),
    "Q2_K": Blocks("int4", 16, True, False, _q2_k),
    "Q3_K": Blocks("int4", 16, False, False, _q3_k),
    "Q4_K": Blocks("int4", 32, True, False, _q4_k),
    "Q5_K": Blocks("int8", 32, True, False, _q5_k),
    "Q6_K": Blocks("int8", 16, False, False, _q6_k),
    "IQ4_NL": Blocks("int8", 32, False, True, _iq4_nl),
    "IQ4_XS": Blocks("int8", 32, False, False, _iq4_xs),
    "MXFP4": Blocks("int8", 32, False, False, _mxfp4),
}
