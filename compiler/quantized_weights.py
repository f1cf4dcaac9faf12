"""Weights that a checkpoint stores as integers or 8-bit floats with scales: sources that give the codes themselves."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol, TypeGuard

import numpy as np
from numpy.typing import NDArray

from llmc.compiler import weights
from llmc.compiler.weights import Elementwise, Sized, WeightSource, numpy_dtype
from llmc.quantization.base import Quantized, Scheme

MAX_GROUP = 256
"""Larger groups are stored as several with the same scale."""

GROUP_STEP = 16


class QuantizedSource(WeightSource, Protocol):
    """A weight [..., rows, columns] of codes, read in ranges of all its rows.

    ``zero`` says what its zero points are: None, "uint8", or "float32" (offsets). The columns of ``quantized_rows`` may
    be in another ``order`` than those of the weight.
    """

    @property
    def scheme(self) -> Scheme:
        """Format and group. A group divides the columns, but for the last of a row."""
        ...

    @property
    def zero(self) -> str | None:
        """None (symmetric, or fp8), "uint8" or "float32"."""
        ...

    @property
    def order(self) -> NDArray[np.int64] | None:
        """None, or for each column of ``quantized_rows`` which one of the weight it is."""
        ...

    @property
    def x_scale(self) -> tuple[float, ...]:
        """The scale that the checkpoint has for its inputs, and their zero point if that is not 0; or ()."""
        ...

    @property
    def scale_dtype(self) -> str:
        """What holds every scale exactly: float16 or float32."""
        ...

    def quantized_rows(self, start: int, stop: int) -> Quantized:
        """Rows ``start:stop`` of all its rows, leading axes merged."""
        ...

    def scale_rows(self, start: int, stop: int) -> tuple[NDArray[Any], NDArray[Any] | None]:
        """Scales and zero points of these rows, without the codes where that is less work."""
        ...


def is_quantized(source: WeightSource) -> TypeGuard[QuantizedSource]:
    """Whether a source gives codes. Nothing is read."""
    return hasattr(source, "quantized_rows")


def grouped(
    codes: WeightSource,
    scale: WeightSource,
    zeros: WeightSource | None,
    format: str,
    group: int,
    sizes: tuple[int, ...],
    to: str,
    order: NDArray[np.int64] | None = None,
) -> WeightSource:
    """Codes [R, K] with scales and zero points [R, G], as a tensor of ``sizes`` whose numbers are rounded to ``to``.

    With an ``order`` [K], column i of the codes is column ``order[i]`` of the tensor. A QuantizedSource where the
    engine has groups of that size, else the numbers only.
    """
    count = max(-(-group // MAX_GROUP), 1)
    parts = next((n for n in range(count, group // GROUP_STEP + 1) if group % (n * GROUP_STEP) == 0), 0)
    if parts > 1:
        width = -(-sizes[-1] * parts // group)
        scale, group = Repeated(scale, parts, width), group // parts
        zeros = None if zeros is None else Repeated(zeros, parts, width)
    weight = Grouped(codes, scale, zeros, format, group, sizes, to, order)
    return weight if parts or not group else Plain(weight)


def with_x_scale(weight: WeightSource, x_scale: tuple[float, ...]) -> WeightSource:
    """What ``grouped`` returned, with a scale for its inputs, which nothing rounds if it gives numbers only."""
    return replace(weight, x_scale=x_scale) if isinstance(weight, Grouped) else weight


@dataclass(frozen=True, eq=False)
class Grouped(Sized):
    """See ``grouped``.

    Its numbers are ``Quantized.dequantize`` rounded to ``to``: the product of a small integer and a scale of ``to`` is
    exact before that, so that this is what a library gets that computes in ``to``.
    """

    codes: WeightSource
    scale: WeightSource
    zeros: WeightSource | None
    format: str
    group: int
    sizes: tuple[int, ...]
    to: str
    order: NDArray[np.int64] | None = None
    x_scale: tuple[float, ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes."""
        return self.sizes

    @property
    def dtype(self) -> str:
        """Of the dequantized numbers."""
        return self.to

    @property
    def scheme(self) -> Scheme:
        """Format and group."""
        return Scheme(self.format, self.group, self.zeros is None)

    @property
    def zero(self) -> str | None:
        """The dtype of the zero points."""
        return None if self.zeros is None else self.zeros.dtype

    @cached_property
    def scale_dtype(self) -> str:
        """Float16 if the checkpoint has that, or numbers that fit."""
        if self.scale.dtype == "float16":
            return "float16"
        scale = weights.read(self.scale).astype(np.float32)
        with np.errstate(over="ignore"):
            return "float16" if np.array_equal(scale.astype(np.float16).astype(np.float32), scale) else "float32"

    def rows(self, start: int, stop: int) -> NDArray[Any]:
        """Dequantized."""
        inner = math.prod(self.sizes[1:-1])
        with np.errstate(over="ignore"):  # infinities are found where the engine is written
            values = self.quantized_rows(start * inner, stop * inner).dequantize().astype(numpy_dtype(self.to))
        return in_order(values, self.order).reshape(stop - start, *self.sizes[1:])

    def quantized_rows(self, start: int, stop: int) -> Quantized:
        """As they are."""
        scale, zero = self.scale_rows(start, stop)
        return Quantized(self.format, self.group, self.sizes[-1], self.codes.rows(start, stop), scale, zero)

    def scale_rows(self, start: int, stop: int) -> tuple[NDArray[Any], NDArray[Any] | None]:
        """They are tensors of their own."""
        zero = None if self.zeros is None else self.zeros.rows(start, stop)
        return self.scale.rows(start, stop).astype(np.float32), zero


def in_order(values: NDArray[Any], order: NDArray[np.int64] | None) -> NDArray[Any]:
    """Columns back where they belong: column i becomes column ``order[i]``."""
    if order is None:
        return values
    result = np.empty_like(values)
    result[:, order] = values
    return result


@dataclass(frozen=True, eq=False)
class Repeated(Sized):
    """Each column ``times`` times, ``width`` columns in all."""

    source: WeightSource
    times: int
    width: int

    @property
    def shape(self) -> tuple[int, ...]:
        """With more columns."""
        return (self.source.shape[0], self.width)

    @property
    def dtype(self) -> str:
        """That of the source."""
        return self.source.dtype

    def rows(self, start: int, stop: int) -> NDArray[Any]:
        """A copy."""
        return np.repeat(self.source.rows(start, stop), self.times, axis=1)[:, : self.width]


def describe(source: QuantizedSource) -> str:
    """How it is stored, for people: ``int4 in groups of 128 with zero points``."""
    groups = f" in groups of {source.scheme.group}" if source.scheme.group else " by row"
    zeros = {None: "", "uint8": " with zero points", "float32": " with offsets"}
    order = "" if source.order is None else " in act-order"
    return source.scheme.format + groups + zeros[source.zero] + order


@dataclass(frozen=True, eq=False)
class Plain(Elementwise):
    """A quantized weight as its dequantized numbers only."""

    @property
    def dtype(self) -> str:
        """That of the source."""
        return self.source.dtype

    def rows(self, start: int, stop: int) -> NDArray[Any]:
        """Those of the source."""
        return self.source.rows(start, stop)
