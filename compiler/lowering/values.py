"""Buffers and strided views of them, with sizes that are linear in T and N: what values of the graph become."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from llmc.runtime.plan import Dim, Storage

ONE = Dim(1)
ZERO = Dim(0)
Shape = tuple[Dim, ...]


@dataclass(eq=False)
class Buffer:
    """Memory of its own: a part of the arena, a weight or a batch input (then ``name`` is its name there)."""

    name: str
    storage: Storage
    dtype: str
    elements: Dim


@dataclass(frozen=True)
class View:
    """Elements of a buffer: offset + sum of index * stride."""

    buffer: Buffer
    shape: Shape
    strides: Shape
    offset: Dim = ZERO

    @property
    def dtype(self) -> str:
        """That of the buffer."""
        return self.buffer.dtype

    @property
    def rank(self) -> int:
        """The number of axes."""
        return len(self.shape)

    @property
    def is_contiguous(self) -> bool:
        """Whether its elements lie one behind the other in row-major order."""
        pairs = zip(self.shape, self.strides, contiguous(self.shape), strict=True)
        return all(size == ONE or stride == expected for size, stride, expected in pairs)

    @property
    def has_unit_inner_stride(self) -> bool:
        """Whether the elements of the last axis lie one behind the other."""
        return not self.rank or self.shape[-1] == ONE or self.strides[-1] == ONE

    def transpose(self, order: Sequence[int]) -> View:
        """Axis i of the result is axis ``order[i]``."""
        return replace(self, shape=tuple(self.shape[i] for i in order), strides=tuple(self.strides[i] for i in order))

    def to_last(self, axes: Iterable[int]) -> View:
        """These axes moved to the end, in their order."""
        moved = sorted(axis % self.rank for axis in axes)
        return self.transpose([*(i for i in range(self.rank) if i not in moved), *moved])

    def narrow(self, axis: int, start: Dim, size: Dim, step: int = 1) -> View:
        """Part of an axis."""
        offset = self.offset + self.strides[axis] * start
        strides = [*self.strides[:axis], self.strides[axis] * step, *self.strides[axis + 1 :]]
        shape = [*self.shape[:axis], size, *self.shape[axis + 1 :]]
        return View(self.buffer, tuple(shape), tuple(strides), offset)

    def select(self, axis: int, index: int) -> View:
        """One position of an axis, which goes away."""
        cut = self.narrow(axis, Dim(index), ONE)
        return cut.squeeze([axis])

    def squeeze(self, axes: Iterable[int] | None = None) -> View:
        """Without these axes of size 1, or all of them."""
        if axes is None:
            axes = [axis for axis, size in enumerate(self.shape) if size == ONE]
        gone = {axis % self.rank for axis in axes}
        assert all(self.shape[i] == ONE for i in gone), f"axes {sorted(gone)} of {self.shape} are not of size 1"
        return self.transpose([i for i in range(self.rank) if i not in gone])

    def unsqueeze(self, axes: Iterable[int]) -> View:
        """With axes of size 1 that are ``axes`` of the result."""
        axes = list(axes)
        shape, strides = list(self.shape), list(self.strides)
        for axis in sorted(axis % (self.rank + len(axes)) for axis in axes):
            is_outer = axis < len(shape) and is_product(shape[axis], strides[axis])
            strides.insert(axis, shape[axis] * strides[axis] if is_outer else ONE)
            shape.insert(axis, ONE)
        return replace(self, shape=tuple(shape), strides=tuple(strides))

    def expand(self, shape: Sequence[Dim]) -> View:
        """Broadcast to a shape: missing axes and those of size 1 are repeated by a stride of 0.

        Raises:
            ValueError: the shape does not fit.
        """
        lead = len(shape) - self.rank
        if lead < 0:
            raise ValueError(f"{show(self.shape)} has more axes than {show(shape)}")
        strides = [ZERO] * lead
        for size, stride, wanted in zip(self.shape, self.strides, shape[lead:], strict=True):
            if size != wanted and size != ONE:
                raise ValueError(f"{show(self.shape)} can't be broadcast to {show(shape)}")
            strides.append(stride if size == wanted else ZERO)
        return replace(self, shape=tuple(shape), strides=tuple(strides))

    def reshape(self, shape: Sequence[Dim]) -> View | None:
        """The same elements in row-major order under another shape; None where no strides can say that."""
        old = [(size, stride) for size, stride in zip(self.shape, self.strides, strict=True) if size != ONE]
        new = [size for size in shape if size != ONE]
        strides: list[Dim] = []
        while old or new:
            counts = _equal_products([size for size, _ in old], new)
            merged = _merged_stride(old[: counts[0]]) if counts else None
            inner = _row_major(new[: counts[1]], merged) if counts and merged is not None else None
            if counts is None or inner is None:
                return None
            strides += inner
            old, new = old[counts[0] :], new[counts[1] :]
        axes = [axis for axis, size in enumerate(shape) if size == ONE]
        packed = replace(self, shape=tuple(size for size in shape if size != ONE), strides=tuple(strides))
        return packed.unsqueeze(axes) if axes else packed

    def collapse(self, rank: int, keep: int = 1) -> View | None:
        """Exactly ``rank`` axes, the last ``keep`` as they are: the others are merged; None where that is no view."""
        lead = self.rank - keep
        view = self.squeeze([axis for axis in range(lead) if self.shape[axis] == ONE])
        while view.rank > rank:
            for axis in range(view.rank - keep - 1):
                pair = view.shape[axis : axis + 2]
                if is_product(*pair):
                    merged = view.reshape([*view.shape[:axis], pair[0] * pair[1], *view.shape[axis + 2 :]])
                    if merged is not None:
                        view = merged
                        break
            else:
                return None
        return view.unsqueeze(range(rank - view.rank)) if view.rank < rank else view


def _equal_products(old: Sequence[Dim], new: Sequence[Dim]) -> tuple[int, int] | None:
    """How many of the first sizes of each have the same product; at least one of each."""
    if not old or not new:
        return None
    counts, totals, sizes = [1, 1], [old[0], new[0]], (old, new)
    while totals[0] != totals[1]:
        side = 0 if probe(totals[0]) < probe(totals[1]) else 1
        if counts[side] == len(sizes[side]) or not is_product(totals[side], sizes[side][counts[side]]):
            return None
        totals[side] = totals[side] * sizes[side][counts[side]]
        counts[side] += 1
    return counts[0], counts[1]


def _merged_stride(axes: Sequence[tuple[Dim, Dim]]) -> Dim | None:
    """The stride of axes (size, stride) taken as one, if they lie behind one another."""
    for (_, outer), (size, inner) in pairwise(axes):
        if not is_product(size, inner) or outer != size * inner:
            return None
    return axes[-1][1]


def _row_major(sizes: Sequence[Dim], step: Dim) -> list[Dim] | None:
    """Strides of sizes whose last one has this stride."""
    strides = [step]
    for size in reversed(sizes[1:]):
        if not is_product(size, strides[-1]):
            return None
        strides.append(size * strides[-1])
    return strides[::-1]


def contiguous(shape: Sequence[Dim]) -> Shape:
    """Row-major strides.

    Raises:
        ValueError: a product of sizes is not linear in T and N.
    """
    strides: list[Dim] = []
    step = ONE
    for size in reversed(shape):
        strides.append(step)
        step = step * size
    return tuple(reversed(strides))


def product(dims: Iterable[Dim]) -> Dim:
    """The product of sizes.

    Raises:
        ValueError: it is not linear in T and N.
    """
    total = ONE
    for dim in dims:
        total = total * dim
    return total


def is_product(a: Dim, b: Dim) -> bool:
    """Whether a * b is linear in T and N."""
    return a.is_constant or b.is_constant


def divide(a: Dim, b: Dim) -> Dim | None:
    """A / b where that is a size, else None."""
    parts = list(zip((a.constant, a.tokens, a.rows), (b.constant, b.tokens, b.rows), strict=True))
    if b.is_constant:
        if not b.constant or any(x % b.constant for x, _ in parts):
            return None
        return Dim(*(x // b.constant for x, _ in parts))
    quotients = {x // y for x, y in parts if y}
    if len(quotients) == 1 and all(x == y * next(iter(quotients)) for x, y in parts):
        return Dim(quotients.pop())
    return None


def probe(dim: Dim) -> int:
    """A size at some large T and N: for an order in which nothing depends on who wins."""
    return dim.at(1_000_003, 999_983)


def dims(shape: Iterable[int | Dim]) -> Shape:
    """Ints as sizes."""
    return tuple(Dim(size) if isinstance(size, int) else size for size in shape)


def show(shape: Iterable[Dim]) -> str:
    """A shape for people: ``[T, 2 * T + 3, 64]``."""
    return f"[{', '.join(map(show_dim, shape))}]"


def show_dim(dim: Dim) -> str:
    """A size for people."""
    parts = [f"{k} * {name}" if k != 1 else name for k, name in ((dim.tokens, "T"), (dim.rows, "N")) if k]
    return " + ".join(parts + ([str(dim.constant)] if dim.constant or not parts else []))
