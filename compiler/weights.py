"""Weights that stay where they are: lazy sources, read a range of rows at a time, and lazy views of them."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Protocol, runtime_checkable

import ml_dtypes
import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from llmc.errors import CompileError

CHUNK_BYTES = 16 << 20
"""What readers ask for at a time, so that memory does not grow with the size of a tensor."""


@runtime_checkable
class WeightSource(Protocol):
    """A tensor that is read in pieces.

    ``dtype`` is a numpy name (``float32``, ``int64``, ``bool``, ...) or one of ml_dtypes (``bfloat16``, ...).
    """

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes; () for a scalar."""
        ...

    @property
    def dtype(self) -> str:
        """The dtype of the arrays that ``rows`` returns."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        ...

    def rows(self, start: int, stop: int) -> NDArray[Any]:
        """Rows ``start:stop`` of the first axis, 0 <= start <= stop <= shape[0]. A scalar has one row, which is itself.

        The array may be a read-only view; callers don't write to it.
        """
        ...


def numpy_dtype(name: str) -> np.dtype[Any]:
    """The dtype of that name, those of ml_dtypes included."""
    try:
        return np.dtype(name)
    except TypeError:
        if hasattr(ml_dtypes, name):
            dtype: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name))
            return dtype
        raise CompileError(f"weights: unknown dtype {name!r}") from None


def read(source: WeightSource) -> NDArray[Any]:
    """The whole tensor as an array; for tensors that are known to be small."""
    return source.rows(0, source.shape[0] if source.shape else 1)


def stream(source: WeightSource, chunk_bytes: int = CHUNK_BYTES) -> Iterator[NDArray[Any]]:
    """The tensor in row ranges of at most ``chunk_bytes``, or of one row where a row is larger."""
    count = source.shape[0] if source.shape else 1
    step = max(1, chunk_bytes * count // source.nbytes) if source.nbytes else max(1, count)
    for start in range(0, count, step):
        yield source.rows(start, min(count, start + step))


class Sized:
    """``nbytes`` from shape and dtype."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes."""
        raise NotImplementedError

    @property
    def dtype(self) -> str:
        """The dtype's name."""
        raise NotImplementedError

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.shape) * numpy_dtype(self.dtype).itemsize


@dataclass(frozen=True, eq=False)
class Elementwise(Sized):
    """A number for each of a source's; in float32, which the build rounds once, if a class does not say otherwise."""

    source: WeightSource

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the source."""
        return self.source.shape

    @property
    def dtype(self) -> str:
        """That of what is computed."""
        return "float32"


@dataclass(frozen=True, eq=False)
class Array(Sized):
    """A tensor in memory."""

    array: NDArray[Any]

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes."""
        return self.array.shape

    @property
    def dtype(self) -> str:
        """The dtype's name."""
        return self.array.dtype.name

    def rows(self, start: int, stop: int) -> NDArray[Any]:
        """A view."""
        return self.array[start:stop] if self.array.ndim else self.array


@dataclass(frozen=True, eq=False)
class Concat(Sized):
    """Parts one after another along an axis."""

    parts: tuple[WeightSource, ...]
    axis: int = 0

    def __post_init__(self) -> None:
        first = self.parts[0]
        if not 0 <= self.axis < len(first.shape):
            raise CompileError(
                f"weights: can't concatenate tensors of shape {list(first.shape)} along axis {self.axis}"
            )
        for part in self.parts[1:]:
            same = [a == b for i, (a, b) in enumerate(zip(part.shape, first.shape, strict=False)) if i != self.axis]
            if part.dtype != first.dtype or len(part.shape) != len(first.shape) or not all(same):
                raise CompileError(
                    f"weights: can't concatenate {part.dtype} {list(part.shape)} to {first.dtype} {list(first.shape)} "
                    f"along axis {self.axis}"
                )

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes."""
        shape = list(self.parts[0].shape)
        shape[self.axis] = sum(part.shape[self.axis] for part in self.parts)
        return tuple(shape)

    @property
    def dtype(self) -> str:
        """That of the parts."""
        return self.parts[0].dtype

    def rows(self, start: int, stop: int) -> NDArray[Any]:
        """Reads only the parts that the rows touch."""
        if self.axis:
            return np.concatenate([part.rows(start, stop) for part in self.parts], self.axis)
        pieces = []
        begin = 0
        for part in self.parts:
            end = begin + part.shape[0]
            low, high = max(start, begin), min(stop, end)
            if low < high:
                pieces.append(part.rows(low - begin, high - begin))
            begin = end
        if not pieces:
            return self.parts[0].rows(0, 0)
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)


@dataclass(frozen=True, eq=False)
class Stack(Sized):
    """Parts of one shape, as the rows of a new first axis (experts)."""

    parts: tuple[WeightSource, ...]

    def __post_init__(self) -> None:
        first = self.parts[0]
        for part in self.parts[1:]:
            if part.dtype != first.dtype or part.shape != first.shape:
                raise CompileError(
                    f"weights: can't stack {part.dtype} {list(part.shape)} on {first.dtype} {list(first.shape)}"
                )

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes."""
        return (len(self.parts), *self.parts[0].shape)

    @property
    def dtype(self) -> str:
        """That of the parts."""
        return self.parts[0].dtype

    def rows(self, start: int, stop: int) -> NDArray[Any]:
        """Reads only these parts."""
        if start == stop:
            return np.empty((0, *self.shape[1:]), numpy_dtype(self.dtype))
        return np.stack([read(part) for part in self.parts[start:stop]])


@dataclass(frozen=True, eq=False)
class Transpose(Sized):
    """Axes reordered: axis i of the result is axis ``permutation[i]`` of the source.

    Where the first axis moves, every call walks over the whole source, in bounded memory.
    """

    source: WeightSource
    permutation: tuple[int, ...]

    def __post_init__(self) -> None:
        if sorted(self.permutation) != list(range(len(self.source.shape))):
            raise CompileError(f"weights: {self.permutation} is no order of the axes of {list(self.source.shape)}")

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes."""
        return tuple(self.source.shape[axis] for axis in self.permutation)

    @property
    def dtype(self) -> str:
        """That of the source."""
        return self.source.dtype

    def rows(self, start: int, stop: int) -> NDArray[Any]:
        """Contiguous, unless the first axis stays."""
        if not self.permutation or self.permutation[0] == 0:
            return self.source.rows(start, stop).transpose(self.permutation)
        axis = self.permutation[0]
        if start == stop:
            return np.empty((0, *self.shape[1:]), numpy_dtype(self.dtype))
        cut = (slice(None),) * axis + (slice(start, stop),)
        shape = list(self.source.shape)
        shape[axis] = stop - start
        result = np.empty([shape[axis] for axis in self.permutation], numpy_dtype(self.dtype))
        by_source_axis = result.transpose(np.argsort(self.permutation))
        row = 0
        for chunk in stream(self.source):
            by_source_axis[row : row + len(chunk)] = chunk[cut]
            row += len(chunk)
        return result


@dataclass(frozen=True, eq=False)
class Cast(Elementwise):
    """Converted to another dtype, rounding to nearest even."""

    to: str

    @property
    def dtype(self) -> str:
        """The new one."""
        return numpy_dtype(self.to).name

    def rows(self, start: int, stop: int) -> NDArray[Any]:
        """Converted rows."""
        with np.errstate(over="ignore"):  # infinities are found where the engine is written
            return self.source.rows(start, stop).astype(numpy_dtype(self.to), copy=False)


@dataclass(frozen=True, eq=False)
class Reshape(Sized):
    """The same elements in row-major order, with other sizes."""

    source: WeightSource
    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        if math.prod(self.sizes) != math.prod(self.source.shape):
            raise CompileError(f"weights: {list(self.source.shape)} has not as many elements as {list(self.sizes)}")

    @property
    def shape(self) -> tuple[int, ...]:
        """The new sizes."""
        return self.sizes

    @property
    def dtype(self) -> str:
        """That of the source."""
        return self.source.dtype

    def rows(self, start: int, stop: int) -> NDArray[Any]:
        """Reads only the source rows that hold the elements."""
        if not self.sizes or not self.source.shape:
            flat = read(self.source).reshape(self.sizes)
            return flat[start:stop] if self.sizes else flat
        width, source_width = math.prod(self.sizes[1:]), math.prod(self.source.shape[1:])
        if start == stop or not width:
            return np.empty((stop - start, *self.sizes[1:]), numpy_dtype(self.dtype))
        first, last = start * width // source_width, -(-stop * width // source_width)
        skip = start * width - first * source_width
        flat = self.source.rows(first, last).reshape(-1)
        return flat[skip : skip + (stop - start) * width].reshape(stop - start, *self.sizes[1:])


@dataclass(frozen=True, eq=False)
class Slice(Sized):
    """A Python slice for each of the first axes; the others are whole."""

    source: WeightSource
    slices: tuple[slice, ...]

    @property
    def _ranges(self) -> list[range]:
        whole = [slice(None)] * (len(self.source.shape) - len(self.slices))
        cuts = [*self.slices, *whole]
        return [range(n)[cut] for n, cut in zip(self.source.shape, cuts, strict=True)]

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes that are left."""
        return tuple(len(r) for r in self._ranges)

    @property
    def dtype(self) -> str:
        """That of the source."""
        return self.source.dtype

    def rows(self, start: int, stop: int) -> NDArray[Any]:
        """Reads the smallest range of source rows that holds them."""
        wanted = self._ranges[0][start:stop]
        cut = self.slices[1:]
        if not len(wanted):
            return self.source.rows(0, 0)[(slice(None), *cut)]
        low, high = min(wanted[0], wanted[-1]), max(wanted[0], wanted[-1]) + 1
        block = self.source.rows(low, high)[:: abs(wanted.step)]
        return (block if wanted.step > 0 else block[::-1])[(slice(None), *cut)]


class SourceTensor(ir.LazyTensor):
    """An initializer of the graph that stands for a source: nothing is read before someone asks for the numbers."""

    __slots__ = ("source",)

    def __init__(self, source: WeightSource, name: str | None = None) -> None:
        dtype = ir.DataType.from_numpy(numpy_dtype(source.dtype))
        super().__init__(lambda: ir.Tensor(read(source), dtype), dtype, ir.Shape(source.shape), name=name)
        self.source = source


def source_of(tensor: ir.TensorProtocol) -> WeightSource:
    """The source behind an initializer; other tensors of onnx_ir are read when they are asked for numbers."""
    if isinstance(tensor, SourceTensor):
        return tensor.source
    return Array(tensor.numpy()) if isinstance(tensor, ir.Tensor) else _TensorSource(tensor)


@dataclass(frozen=True, eq=False)
class _TensorSource(Sized):
    tensor: ir.TensorProtocol

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(int(size) for size in self.tensor.shape.numpy())

    @property
    def dtype(self) -> str:
        return self.tensor.dtype.numpy().name

    def rows(self, start: int, stop: int) -> NDArray[Any]:
        array = self.tensor.numpy()
        return array[start:stop] if array.ndim else array


def concat(parts: Sequence[WeightSource], axis: int = 0) -> WeightSource:
    """Concat, or the only part itself."""
    return parts[0] if len(parts) == 1 else Concat(tuple(parts), axis)


def identity(source: WeightSource) -> Hashable:
    """Equal for sources that are known to hold the same numbers: the same views of the same tensors."""
    return _identity(source)


def _identity(value: Any) -> Hashable:
    if isinstance(value, slice):
        return ("slice", value.start, value.stop, value.step)
    if isinstance(value, tuple):
        return tuple(_identity(item) for item in value)
    if isinstance(value, int | str):
        return value
    if isinstance(value, Array):
        return (Array, id(value.array))
    if is_dataclass(value):
        return (type(value), *(_identity(getattr(value, field.name)) for field in fields(value)))
    return id(value)
