"""Views of quantized weights: joined, stacked, cut or permuted by rows, they are quantized still.

The views of weights.py say nothing about codes; ``find_quantized`` sees through those that only move rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmc.compiler.quantized_weights import Plain, QuantizedSource, in_order, is_quantized
from llmc.compiler.weights import Cast, Concat, Reshape, Sized, Slice, Stack, Transpose, WeightSource, numpy_dtype
from llmc.quantization.base import BITS, Quantized, Scheme

Places = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Rows(Sized):
    """Rows of quantized weights in any order, in one form that holds all of them exactly.

    ``index``, of the shape of the leading axes: where a row is, counted through ``parts`` one after another.
    """

    parts: tuple[QuantizedSource, ...]
    index: NDArray[np.int64]
    scheme: Scheme
    zero: str | None

    @property
    def order(self) -> NDArray[np.int64] | None:
        """That of the parts."""
        return self.parts[0].order

    @property
    def x_scale(self) -> tuple[float, ...]:
        """That of the parts if they have one in common."""
        first, *others = {part.x_scale for part in self.parts}
        return () if others else first

    @property
    def shape(self) -> tuple[int, ...]:
        """Leading axes and columns."""
        return (*self.index.shape, self.parts[0].shape[-1])

    @property
    def dtype(self) -> str:
        """That of the parts."""
        return self.parts[0].dtype

    def rows(self, start: int, stop: int) -> NDArray[Any]:
        """Dequantized."""
        inner = math.prod(self.index.shape[1:])
        values = self.quantized_rows(start * inner, stop * inner).dequantize().astype(numpy_dtype(self.dtype))
        return in_order(values, self.order).reshape(stop - start, *self.shape[1:])

    @property
    def scale_dtype(self) -> str:
        """Float16 if that does for all parts."""
        return "float16" if all(part.scale_dtype == "float16" for part in self.parts) else "float32"

    def quantized_rows(self, start: int, stop: int) -> Quantized:
        """Reads each stretch of neighbouring rows, or the range that holds them where that is not much more."""
        codes = np.empty((stop - start, self.shape[-1]), np.uint8)
        scale, zero = self._no_scales(start, stop)
        for part, rows, picked, low, high in self._reads(start, stop):
            read = _converted(part.quantized_rows(low, high), self.scheme, self.zero)
            codes[rows], scale[rows] = read.codes[picked], read.scale[picked]
            if zero is not None and read.zero is not None:
                zero[rows] = read.zero[picked]
        return Quantized(self.scheme.format, self.scheme.group, self.shape[-1], codes, scale, zero)

    def scale_rows(self, start: int, stop: int) -> tuple[NDArray[Any], NDArray[Any] | None]:
        """Likewise."""
        scale, zero = self._no_scales(start, stop)
        for part, rows, picked, low, high in self._reads(start, stop):
            form, columns = part.scheme, self.shape[-1]
            no_codes = np.empty((high - low, 0), np.uint8)
            found = Quantized(form.format, form.group, columns, no_codes, *part.scale_rows(low, high))
            read = _converted(found, self.scheme, self.zero)
            scale[rows] = read.scale[picked]
            if zero is not None and read.zero is not None:
                zero[rows] = read.zero[picked]
        return scale, zero

    def _no_scales(self, start: int, stop: int) -> tuple[NDArray[Any], NDArray[Any] | None]:
        shape = (stop - start, self.scheme.groups(self.shape[-1]))
        zero = None if self.zero is None else np.empty(shape, numpy_dtype(self.zero))
        return np.empty(shape, np.float32), zero

    def _reads(self, start: int, stop: int) -> Iterator[tuple[QuantizedSource, Places, Places, int, int]]:
        """(part, rows of the result, where they are in what is read, first row to read, end)."""
        wanted = self.index.reshape(-1)[start:stop]
        ends = np.cumsum([_count(part) for part in self.parts])
        home = np.searchsorted(ends, wanted, side="right")
        for number in np.unique(home):
            part, places = self.parts[number], np.flatnonzero(home == number)
            local = wanted[places] - (ends[number] - _count(part))
            for here, low, high in _stretches(local):
                yield part, places[here], local[here] - low, low, high


def find_quantized(source: WeightSource) -> QuantizedSource | None:
    """The source as quantized rows; None if it holds other numbers, or not in one form, or its columns were moved."""
    if is_quantized(source):
        return source
    found = _trace(source)
    if found is None or found.columns_axis != found.index.ndim:
        return None
    parts, index = _used(found)
    form = _common_form(parts)
    return None if form is None else Rows(parts, index, *form)


def _used(found: _Traced) -> tuple[tuple[QuantizedSource, ...], Places]:
    """Without the parts of which no row is left."""
    ends = np.cumsum([_count(part) for part in found.parts])
    home = np.searchsorted(ends, found.index, side="right")
    numbers = np.unique(home)
    if len(numbers) in (0, len(found.parts)):
        return found.parts, found.index
    parts = tuple(found.parts[number] for number in numbers)
    sizes = [_count(part) for part in parts]
    moved = np.zeros(len(found.parts), np.int64)
    moved[numbers] = np.cumsum([0, *sizes[:-1]]) - (ends[numbers] - sizes)
    return parts, found.index + moved[home]


def key_of_order(source: QuantizedSource) -> bytes | None:
    """Equal for sources whose columns are in one order."""
    return None if source.order is None else source.order.tobytes()


def quantized_parts(source: WeightSource) -> tuple[QuantizedSource, ...]:
    """What a source is made of, if that is rows or columns of quantized weights; else nothing."""
    found = _trace(source)
    return () if found is None else found.parts


def dequantized(source: WeightSource) -> WeightSource:
    """The source as its numbers only, if it is quantized."""
    return Plain(source) if quantized_parts(source) else source


def recast(source: QuantizedSource, scheme: Scheme) -> QuantizedSource:
    """The same numbers in another format and group, which ``common_scheme`` found."""
    if source.scheme == scheme:
        return source
    lead = source.shape[:-1]
    index = np.arange(math.prod(lead), dtype=np.int64).reshape(lead)
    return Rows((source,), index, replace(scheme, symmetric=source.zero is None), source.zero)


def common_scheme(sources: Sequence[QuantizedSource]) -> Scheme | None:
    """A format and group that hold the numbers of all exactly; zero points are not looked at."""
    formats = {source.scheme.format for source in sources}
    if "fp8" in formats and len(formats) > 1:
        return None
    group = math.gcd(*(source.scheme.group for source in sources))  # 0 is one group, which can be cut anywhere
    return Scheme("int8" if "int8" in formats else next(iter(formats)), group)


@dataclass(frozen=True, eq=False)
class _Traced:
    """Rows of parts; the axis of the columns is where it would be inserted into ``index``."""

    parts: tuple[QuantizedSource, ...]
    index: NDArray[np.int64]
    columns_axis: int


def _trace(source: WeightSource) -> _Traced | None:
    if is_quantized(source):
        lead = source.shape[:-1]
        return _Traced((source,), np.arange(math.prod(lead), dtype=np.int64).reshape(lead), len(lead))
    tracer = _TRACERS.get(type(source))
    return None if tracer is None else tracer(source)


def _trace_cast(source: Cast) -> _Traced | None:
    """Codes and scales don't depend on the dtype that the graph gives the numbers."""
    return _trace(source.source) if numpy_dtype(source.to).kind not in "iub" else None


def _trace_concat(source: Concat) -> _Traced | None:
    return _joined(source.parts, source.axis)


def _joined(parts: tuple[WeightSource, ...], axis: int) -> _Traced | None:
    found = [_trace(part) for part in parts]
    first = found[0]
    indices: list[NDArray[np.int64]] = []
    pieces: list[QuantizedSource] = []
    begin = 0
    for each in found:
        if first is None or each is None or each.columns_axis != first.columns_axis or axis == each.columns_axis:
            return None
        if each.parts[0].shape[-1] != first.parts[0].shape[-1]:
            return None
        indices.append(each.index + begin)
        pieces += each.parts
        begin += sum(map(_count, each.parts))
    assert first is not None, "a Concat has parts"
    place = axis - (axis > first.columns_axis)
    return _Traced(tuple(pieces), np.concatenate(indices, place), first.columns_axis)


def _trace_stack(source: Stack) -> _Traced | None:
    return _joined(tuple(Reshape(part, (1, *part.shape)) for part in source.parts), 0)


def _trace_transpose(source: Transpose) -> _Traced | None:
    found = _trace(source.source)
    if found is None:
        return None
    axis = found.columns_axis
    order = [i - (i > axis) for i in source.permutation if i != axis]
    return replace(found, index=found.index.transpose(order), columns_axis=source.permutation.index(axis))


def _trace_reshape(source: Reshape) -> _Traced | None:
    """Only what leaves the columns alone, as the last axis or as the first."""
    found = _trace(source.source)
    if found is None or not source.sizes:
        return None
    width = found.parts[0].shape[-1]
    if found.columns_axis == found.index.ndim and source.sizes[-1] == width:
        return replace(found, index=found.index.reshape(source.sizes[:-1]), columns_axis=len(source.sizes) - 1)
    if found.columns_axis == 0 and source.sizes[0] == width:
        return replace(found, index=found.index.reshape(source.sizes[1:]))
    return None


def _trace_slice(source: Slice) -> _Traced | None:
    found = _trace(source.source)
    if found is None:
        return None
    cuts = [*source.slices, *[slice(None)] * (len(source.source.shape) - len(source.slices))]
    width = found.parts[0].shape[-1]
    if range(width)[cuts.pop(found.columns_axis)] != range(width):
        return None
    return replace(found, index=found.index[tuple(cuts)])


_TRACERS: dict[type, Callable[[Any], _Traced | None]] = {
    Cast: _trace_cast,
    Concat: _trace_concat,
    Stack: _trace_stack,
    Transpose: _trace_transpose,
    Reshape: _trace_reshape,
    Slice: _trace_slice,
}


def _common_form(parts: tuple[QuantizedSource, ...]) -> tuple[Scheme, str | None] | None:
    """Format, group and zero points that hold the rows of all parts exactly, if there are such.

    int4 codes are int8 codes too; None as zero points means the middle; a group may be cut into smaller ones.
    """
    zeros = {part.zero for part in parts}
    scheme = common_scheme(parts)
    if scheme is None or ("float32" in zeros and len(zeros) > 1) or len({key_of_order(part) for part in parts}) > 1:
        return None
    zero = "uint8" if "uint8" in zeros else next(iter(zeros))
    return replace(scheme, symmetric=zero is None), zero


def _converted(rows: Quantized, scheme: Scheme, zero: str | None) -> Quantized:
    """The same numbers in a form that ``_common_form`` found."""
    codes, scale = rows.codes, rows.scale
    zeros: NDArray[Any] | None = rows.zero
    if (rows.zero is None) != (zero is None):
        zeros = np.full(scale.shape, 1 << (BITS[rows.format] - 1), np.uint8)
    elif rows.format == "int4" and scheme.format == "int8" and zero is None:
        codes = codes + np.uint8((1 << 7) - (1 << 3))
    if scheme.group and scheme.group != rows.group:
        times = -(-(rows.group or rows.columns) // scheme.group)
        count = scheme.groups(rows.columns)
        scale = np.repeat(scale, times, axis=1)[:, :count]
        zeros = None if zeros is None else np.repeat(zeros, times, axis=1)[:, :count]
    return Quantized(scheme.format, scheme.group, rows.columns, codes, scale, zeros)


def _stretches(rows: NDArray[np.int64]) -> list[tuple[NDArray[np.int64], int, int]]:
    """(positions in ``rows``, first row, end): one range that is read if at least a quarter of it is wanted."""
    if not len(rows):
        return []
    low, high = int(rows.min()), int(rows.max()) + 1
    if high - low <= 4 * len(rows):
        return [(np.arange(len(rows)), low, high)]
    cuts = np.flatnonzero(np.diff(rows) != 1) + 1
    pieces = np.split(np.arange(len(rows)), cuts)
    return [(piece, int(rows[piece[0]]), int(rows[piece[-1]]) + 1) for piece in pieces]


def _count(source: WeightSource) -> int:
    return math.prod(source.shape[:-1])
