"""Reads the coefficients of a rotary embedding off the numbers that it computes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from llmc.plugins.rope.reference import reference

Rotation = Callable[[Tensor, Tensor], Tensor]
"""(x [T, H, D], positions [T]) -> y [T, H, Do]"""

MAX_ELEMENTS = 1 << 22
"""Of x in one evaluation."""
TOLERANCE = 3e-6
"""Relative to the largest output: rounding of two products and a sum."""


@dataclass(frozen=True)
class Rope:
    """The constant inputs of llmc::rope."""

    table: Tensor
    index: Tensor
    sign: Tensor


def sample_positions(count: int) -> Tensor:
    """A few positions out of 0..count-1, 0 first: enough to tell different embeddings apart."""
    near = [0, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144]
    spread = [count * i // 13 + i for i in range(1, 13)]
    return torch.tensor(sorted({p for p in (*near, *spread, count - 2, count - 1) if 0 <= p < count}))


def explains(rope: Rope, rotate: Rotation, heads: int, size: int, positions: Tensor) -> bool:
    """Whether the rope gives what ``rotate`` gives, on random numbers at these positions."""
    x = torch.randn(len(positions), heads, size, generator=torch.Generator().manual_seed(5))
    return _agree(reference(x, positions, rope.table, rope.index, rope.sign), rotate(x, positions))


def find_rope(rotate: Rotation, heads: int, size: int, positions: Tensor, count: int) -> Rope | None:
    """The rope that ``rotate`` is, with a table for positions 0..count-1; None if it is not one.

    1. Each output is a sum of at most two scaled inputs of its own head, and all heads are alike.
    2. The coefficients at a position are the same whatever other positions are there.

    Memory is that of the table, and a little for a range of positions at a time.
    """
    form = _form(rotate, heads, size, positions)
    if form is None:
        return None
    rope = _fill(form, rotate, heads, size, count) or _fill(form.unshared(), rotate, heads, size, count)
    assert rope is not None, "columns that are not shared always fit"
    few = positions[: (len(positions) + 1) // 2]
    return rope if all(explains(rope, rotate, heads, size, some) for some in (positions, few)) else None


@dataclass(frozen=True)
class _Form:
    """Which inputs an output reads, and which columns of coefficients are taken to be equal up to their sign."""

    first: Tensor
    second: Tensor
    """[Do] inputs; the same twice where only one is read."""
    column: Tensor
    """[2, Do] for each term, its column of the table."""
    sign: Tensor
    """[2, Do]"""
    kept: Tensor
    """[U] for each column, the term that it is taken from, as an index into [2 * Do]."""

    def unshared(self) -> _Form:
        """With a column for each term."""
        terms = torch.arange(2 * len(self.first))
        sign = torch.ones_like(self.sign)
        sign[1, self.first == self.second] = 0
        return _Form(self.first, self.second, terms.reshape(2, -1), sign, terms)


def _form(rotate: Rotation, heads: int, size: int, positions: Tensor) -> _Form | None:
    """Read it off the numbers at a few positions."""
    columns = []
    for i in range(size):
        x = torch.zeros(len(positions), heads, size)
        x[..., i] = 1
        y = rotate(x, positions)
        if not torch.equal(y, y[:, :1].expand_as(y)):
            return None
        columns.append(y[:, 0])
    matrix = torch.stack(columns, -1)  # [positions, Do, D]
    read = (matrix != 0).any(0)
    terms = read.sum(1)
    if int(terms.max()) > 2 or int(terms.min()) < 1:
        return None
    # At position 0 the sine is 0. An input that is read counts more than one that isn't, whatever its size.
    weight = read * (1 + matrix[0].abs() / matrix[0].abs().max().clamp_min(1e-30))
    order = weight.sort(dim=1, descending=True, stable=True).indices
    first, second = order[:, 0], torch.where(terms == 2, order[:, 1], order[:, 0])
    outputs = torch.arange(len(first))
    return _share(matrix[:, outputs, first], matrix[:, outputs, second], first, second)


def _share(factor: Tensor, other: Tensor, first: Tensor, second: Tensor) -> _Form:
    """Columns that are equal up to their sign become one."""
    known: dict[bytes, int] = {}
    kept: list[int] = []
    column, sign = torch.zeros(2, len(first), dtype=torch.long), torch.zeros(2, len(first))
    for term, factors in enumerate((factor, other)):
        for i in range(len(first)):
            if term and first[i] == second[i]:
                column[1, i] = column[0, i]
                continue
            nonzero = factors[:, i][factors[:, i] != 0]
            sign[term, i] = -1.0 if nonzero[0] < 0 else 1.0
            key = (factors[:, i] * sign[term, i] + 0.0).numpy().tobytes()  # + 0.0: no negative zeros
            if key not in known:
                known[key] = len(kept)
                kept.append(term * len(first) + i)
            column[term, i] = known[key]
    return _Form(first, second, column, sign, torch.tensor(kept))


def _fill(form: _Form, rotate: Rotation, heads: int, size: int, count: int) -> Rope | None:
    """The rope with all positions; None where columns that should be equal are not."""
    first, second, outputs = form.first, form.second, torch.arange(len(form.first))
    single = first == second
    colours = _colours(first.tolist(), second.tolist(), size)
    kept_sign = form.sign.reshape(-1)[form.kept]
    table = torch.empty(count, len(form.kept))
    step = max(1, MAX_ELEMENTS // (heads * size))
    for start in range(0, count, step):
        positions = torch.arange(start, min(count, start + step))
        probes = []
        for colour in range(int(colours.max()) + 1):
            x = (colours == colour).float().expand(len(positions), heads, size).contiguous()
            probes.append(rotate(x, positions)[:, 0])
        found = torch.stack(probes)  # [colours, positions, Do]
        other = torch.where(single, torch.zeros(()), found[colours[second], :, outputs].T)
        factors = torch.cat((found[colours[first], :, outputs].T, other), 1)
        rows = factors[:, form.kept] * kept_sign + 0.0
        if not torch.equal(rows[:, form.column.reshape(-1)] * form.sign.reshape(-1), factors):
            return None
        table[start : start + len(positions)] = rows
    index = torch.stack((first, form.column[0], second, form.column[1])).int()
    return Rope(table, index, form.sign)


def _colours(first: list[int], second: list[int], size: int) -> Tensor:
    """A colour for each input, so that no output reads two of the same one."""
    neighbours: list[set[int]] = [set() for _ in range(size)]
    for a, b in zip(first, second, strict=True):
        if a != b:
            neighbours[a].add(b)
            neighbours[b].add(a)
    colours = [-1] * size
    for i in range(size):
        taken = {colours[j] for j in neighbours[i]}
        colours[i] = next(c for c in range(size) if c not in taken)
    return torch.tensor(colours)


def _agree(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape:
        return False
    return bool((a - b).abs().max() <= TOLERANCE * b.abs().max().clamp_min(1e-30))
