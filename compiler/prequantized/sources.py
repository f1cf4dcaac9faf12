"""Sources that unpack and rearrange what quantized checkpoints store, as they are read."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmc.compiler import weights
from llmc.compiler.quantized_weights import grouped
from llmc.compiler.weights import Sized, WeightSource


class Recent:
    """The arrays that were asked for last, so that a matrix that is read by columns is read once."""

    def __init__(self, count: int) -> None:
        self._arrays: OrderedDict[int, tuple[Any, NDArray[Any]]] = OrderedDict()
        self._count = count

    def get(self, key: Any, make: Callable[[], NDArray[Any]]) -> NDArray[Any]:
        """What ``make`` returned for this object, now or before."""
        if id(key) in self._arrays:
            self._arrays.move_to_end(id(key))
        else:
            self._arrays[id(key)] = (key, make())
            if len(self._arrays) > self._count:
                self._arrays.popitem(last=False)
        return self._arrays[id(key)][1]


@dataclass(frozen=True, eq=False)
class Made(Sized):
    """A small tensor that is computed as a whole when it is asked for, and kept for a while."""

    make: Callable[[], NDArray[Any]]
    sizes: tuple[int, ...]
    to: str
    recent: Recent

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes."""
        return self.sizes

    @property
    def dtype(self) -> str:
        """Of the result."""
        return self.to

    def rows(self, start: int, stop: int) -> NDArray[Any]:
        """Of the whole."""
        array = self.recent.get(self, self.make)
        assert array.shape == self.sizes, f"made {array.shape}, expected {self.sizes}"
        return array[start:stop]


def transposed(source: WeightSource, recent: Recent) -> WeightSource:
    """A matrix [a, b] as [b, a]; it is read as a whole."""
    rows, columns = source.shape
    return Made(lambda: np.ascontiguousarray(weights.read(source).T), (columns, rows), source.dtype, recent)


@dataclass(frozen=True, eq=False)
class Unpacked(Sized):
    """Codes of ``bits`` each in rows of int32 words, the first in the lowest bits, as uint8 [rows, columns].

    Codes of 3 bits run across the borders of words. ``order``: which of the codes of a word comes first, ...
    """

    words: WeightSource
    bits: int
    columns: int
    order: tuple[int, ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """Rows and codes."""
        return (self.words.shape[0], self.columns)

    @property
    def dtype(self) -> str:
        """One code a byte."""
        return "uint8"

    def rows(self, start: int, stop: int) -> NDArray[Any]:
        """Unpacked."""
        return unpack(self.words.rows(start, stop), self.bits, self.columns, self.order)


def unpack(words: NDArray[Any], bits: int, columns: int, order: Sequence[int] = ()) -> NDArray[np.uint8]:
    """See ``Unpacked``: int32 [rows, words] -> uint8 [rows, columns]."""
    data = np.ascontiguousarray(words).view(np.uint8)
    if bits == 8:
        codes = data
    elif 8 % bits == 0:
        shifts = np.arange(0, 8, bits, dtype=np.uint8)
        codes = (data[:, :, None] >> shifts & np.uint8((1 << bits) - 1)).reshape(len(data), -1)
    else:
        ones = np.unpackbits(data, axis=1, bitorder="little")
        whole = ones[:, : ones.shape[1] // bits * bits].reshape(len(ones), -1, bits)
        codes = np.packbits(whole, axis=2, bitorder="little")[:, :, 0]
    if order:
        codes = codes.reshape(len(codes), -1, len(order))[:, :, list(order)].reshape(len(codes), -1)
    return codes[:, :columns]


def words(count: int, bits: int) -> int:
    """Of 32 bits, that hold so many codes."""
    return -(-count * bits // 32)


@dataclass(frozen=True, eq=False)
class ByColumn(Sized):
    """Scales or zero points [R, G] as [R, K]: ``groups`` [K] says which group a column is in."""

    source: WeightSource
    groups: NDArray[np.int64]

    @property
    def shape(self) -> tuple[int, ...]:
        """One for each column."""
        return (self.source.shape[0], len(self.groups))

    @property
    def dtype(self) -> str:
        """That of the source."""
        return self.source.dtype

    def rows(self, start: int, stop: int) -> NDArray[Any]:
        """Of each column."""
        return self.source.rows(start, stop)[:, self.groups]


@dataclass(frozen=True, eq=False)
class Columns(Sized):
    """Columns of codes in another order."""

    source: WeightSource
    order: NDArray[np.int64]

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the source."""
        return self.source.shape

    @property
    def dtype(self) -> str:
        """That of the source."""
        return self.source.dtype

    def rows(self, start: int, stop: int) -> NDArray[Any]:
        """A copy."""
        return self.source.rows(start, stop)[:, self.order]


@dataclass(frozen=True)
class ActOrder:
    """Columns whose groups are not their neighbours. ``groups`` [K]: the group of each column."""

    groups: NDArray[np.int64]
    size: int

    @property
    def order(self) -> NDArray[np.int64] | None:
        """The columns group by group; None if the groups have not the sizes that groups of neighbours would have."""
        order = np.argsort(self.groups, kind="stable")
        regular = np.array_equal(self.groups[order], np.arange(len(order)) // (self.size or len(order)))
        return order if regular else None


def ordered(
    order: ActOrder | None,
    codes: WeightSource,
    scale: WeightSource,
    zeros: WeightSource | None,
    format: str,
    group: int,
    sizes: tuple[int, ...],
    to: str,
) -> WeightSource:
    """``grouped``, for columns that are in act-order."""
    if order is None:
        return grouped(codes, scale, zeros, format, group, sizes, to)
    if (columns := order.order) is not None:
        return grouped(Columns(codes, columns), scale, zeros, format, group, sizes, to, columns)
    zeros = None if zeros is None else ByColumn(zeros, order.groups)
    return grouped(codes, ByColumn(scale, order.groups), zeros, format, 1, sizes, to)


@dataclass(frozen=True, eq=False)
class Spread(Sized):
    """A matrix [r, G] as [rows, G]: each of its rows ``times`` times."""

    source: WeightSource
    times: int
    count: int

    @property
    def shape(self) -> tuple[int, ...]:
        """More rows."""
        return (self.count, self.source.shape[1])

    @property
    def dtype(self) -> str:
        """That of the source."""
        return self.source.dtype

    def rows(self, start: int, stop: int) -> NDArray[Any]:
        """Repeated."""
        if start == stop:
            return self.source.rows(0, 0)
        low = start // self.times
        found = self.source.rows(low, (stop - 1) // self.times + 1)
        return found[np.arange(start, stop) // self.times - low]


@dataclass(frozen=True, eq=False)
class Bits(Sized):
    """Numbers of 8 bits as uint8, ``plus`` added to them (modulo 256): signed codes plus 128 are unsigned ones."""

    source: WeightSource
    plus: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the source."""
        return self.source.shape

    @property
    def dtype(self) -> str:
        """One code a byte."""
        return "uint8"

    def rows(self, start: int, stop: int) -> NDArray[Any]:
        """Their bits."""
        bits = self.source.rows(start, stop).view(np.uint8)
        return bits + np.uint8(self.plus) if self.plus else bits
