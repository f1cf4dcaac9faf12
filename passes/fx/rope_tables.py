"""Reads the coefficients of a rotary embedding off the numbers that it computes."""

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
    """
    sources = _pair_of_inputs(rotate, heads, size, positions)
    if sources is None:
        return None
    first, second = sources
    coefficients = _coefficients(rotate, heads, size, first, second, count)
    rope = _compact(*coefficients, first, second)
    few = positions[: (len(positions) + 1) // 2]
    if not all(explains(rope, rotate, heads, size, some) for some in (positions, few)):
        return None
    return rope


def _pair_of_inputs(rotate: Rotation, heads: int, size: int, positions: Tensor) -> tuple[Tensor, Tensor] | None:
    """The two inputs [Do] that each output reads, the same twice if it reads one; the first has the cosine."""
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
    return order[:, 0], torch.where(terms == 2, order[:, 1], order[:, 0])


def _coefficients(
    rotate: Rotation, heads: int, size: int, first: Tensor, second: Tensor, count: int
) -> tuple[Tensor, Tensor]:
    """Factors [count, Do] of both inputs; 0 for the second where it is the first."""
    colours = _colours(first.tolist(), second.tolist(), size)
    outputs = torch.arange(len(first))
    factors = [torch.empty(count, len(first)), torch.zeros(count, len(first))]
    step = max(1, MAX_ELEMENTS // (heads * size))
    for start in range(0, count, step):
        positions = torch.arange(start, min(count, start + step))
        probes = []
        for colour in range(int(colours.max()) + 1):
            x = (colours == colour).float().expand(len(positions), heads, size).contiguous()
            probes.append(rotate(x, positions)[:, 0])
        found = torch.stack(probes)  # [colours, positions, Do]
        rows = slice(start, start + len(positions))
        factors[0][rows] = found[colours[first], :, outputs].T
        factors[1][rows] = torch.where(first == second, torch.zeros(()), found[colours[second], :, outputs].T)
    return factors[0], factors[1]


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


def _compact(factor: Tensor, other: Tensor, first: Tensor, second: Tensor) -> Rope:
    """Columns that are equal up to the sign are kept once."""
    single = first == second
    columns: list[Tensor] = []
    known: dict[bytes, int] = {}
    index, sign = torch.empty(4, len(first), dtype=torch.int32), torch.zeros(2, len(first))
    for term, (factors, source) in enumerate(((factor, first), (other, second))):
        index[2 * term] = source
        for i in range(len(first)):
            if term and single[i]:
                index[3, i] = index[1, i]
                continue
            column = factors[:, i]
            nonzero = column[column != 0]
            sign[term, i] = -1.0 if len(nonzero) and nonzero[0] < 0 else 1.0
            column = (column * sign[term, i] + 0.0).contiguous()  # + 0.0: no negative zeros
            key = column.numpy().tobytes()
            if key not in known:
                known[key] = len(columns)
                columns.append(column)
            index[2 * term + 1, i] = known[key]
    return Rope(torch.stack(columns, 1).contiguous(), index, sign)


def _agree(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape:
        return False
    return bool((a - b).abs().max() <= TOLERANCE * b.abs().max().clamp_min(1e-30))
