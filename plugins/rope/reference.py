"""What llmc::rope means."""

from collections.abc import Iterator

import numpy as np
from torch import Tensor

from llmc.plugins.op import Sample


def reference(x: Tensor, position_ids: Tensor, table: Tensor, index: Tensor, sign: Tensor) -> Tensor:
    """Two gathered inputs, each times its signed column of the table."""
    rows, index, sign = table[position_ids.long()].to(x.dtype), index.long(), sign.to(x.dtype)
    first = x[..., index[0]] * (sign[0] * rows[:, index[1]])[:, None]
    return first + x[..., index[2]] * (sign[1] * rows[:, index[3]])[:, None]


def fake(x: Tensor, position_ids: Tensor, table: Tensor, index: Tensor, sign: Tensor) -> Tensor:
    """The shape of the result."""
    return x.new_empty(*x.shape[:-1], index.shape[1])


def samples(rng: np.random.Generator) -> Iterator[Sample]:
    """Half, interleaved, partial and permuted pairings, and a scaling by position."""
    for heads, size in ((1, 16), (4, 64), (3, 20)):
        for name in ("half", "interleaved", "partial", "permuted", "scale"):
            index, sign, columns = pairing(name, size)
            table = rng.standard_normal((50, columns), np.float32)
            x = rng.standard_normal((7, heads, size), np.float32)
            yield Sample((x, rng.integers(0, 50, 7, np.int32), table, index, sign))


def pairing(name: str, size: int) -> tuple[np.ndarray, np.ndarray, int]:
    """``index``, ``sign`` and the number of table columns of a well-known pairing over ``size`` dimensions."""
    rotated = size // 2 if name == "partial" else 0 if name == "scale" else size
    half, out = rotated // 2, np.arange(size)
    if name == "interleaved":
        first, partner, angle = out, out ^ 1, out // 2
        plus = out % 2 == 1
    else:
        inside = out < rotated
        first = out
        partner = np.where(inside, (out + half) % max(rotated, 1), out)
        angle = np.where(inside, out % max(half, 1), 0)
        plus = out >= half
    if name == "permuted":  # reads interleaved pairs, writes halves
        to = np.concatenate([np.arange(0, size, 2), np.arange(1, size, 2)])
        first, partner = to[first], to[partner]
    single = out >= rotated
    tail = 2 * half
    index = np.stack([first, np.where(single, tail, angle), partner, np.where(single, tail, half + angle)])
    sign = np.stack([np.ones(size), np.where(single, 0.0, np.where(plus, 1.0, -1.0))])
    return index.astype(np.int32), sign.astype(np.float32), tail + bool(single.any())
