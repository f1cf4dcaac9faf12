"""Sequences and a paged cache for the tests of attention."""

import dataclasses
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from llmc.plugins import kernels
from llmc.runtime.batch import Batch

Array = NDArray[np.float32]
ISAS = kernels.isas()
PLAIN = {"slot": 0, "write": True, "scale": 0.25, "window": 0, "chunk": 0, "softcap": 0.0}
EMPTY = np.zeros(0, np.int32)


@dataclasses.dataclass(frozen=True)
class Shape:
    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int


@dataclasses.dataclass
class Rows:
    """All rows of one sequence, of which a step computes some."""

    q: Array
    k: Array
    v: Array


class Cache:
    """A paged cache for several sequences, poisoned, with scattered blocks."""

    def __init__(self, shape: Shape, dtype: str, lengths: Sequence[int], block: int = 16) -> None:
        self.shape, self.block = shape, block
        needed = [-(-n // block) for n in lengths]
        self.kv = kernels.Kv([(shape.kv_heads, shape.key_dim, shape.value_dim)], dtype, block, sum(needed) + 1)
        for number in range(sum(needed) + 1):
            self.kv.poison_block(number)
        ids = iter(np.random.default_rng(3).permutation(sum(needed) + 1))
        self.tables = np.zeros((len(lengths), max(needed)), np.int32)
        for row, count in enumerate(needed):
            self.tables[row, :count] = [next(ids) for _ in range(count)]

    def step(
        self,
        parts: Sequence[tuple[int, Rows, int, int]],
        attributes: dict[str, object] | None = None,
        *,
        sinks: Array | None = None,
        slopes: Array | None = None,
        stored: Sequence[Array | None] = (),
        tree: NDArray[np.uint64] | None = None,
        isa: str = ISAS[-1],
        threads: int = 1,
    ) -> Array:
        """Rows ``start:stop`` of each sequence given as (number, sequence, start, stop)."""
        q, k, v = (np.concatenate([getattr(s, name)[a:b] for _, s, a, b in parts]) for name in "qkv")
        starts = np.cumsum([0, *(b - a for _, _, a, b in parts)]).astype(np.int32)
        past = np.array([a for _, _, a, _ in parts], np.int32)
        positions = np.concatenate([np.arange(a, b) for _, _, a, b in parts]).astype(np.int32)
        tables = np.ascontiguousarray(self.tables[[number for number, *_ in parts]])
        y = np.full((len(q), self.shape.heads, self.shape.value_dim), np.nan, np.float32)
        batch = Batch(EMPTY, positions, EMPTY, starts, past, tables, tree)
        inputs = [q, k, v, sinks, slopes, *stored]
        kernels.run_op(
            "paged_attention", inputs, [y], attributes or PLAIN, isa=isa, threads=threads, batch=batch, kv=self.kv
        )
        return y


def sequence(rng: np.random.Generator, shape: Shape, length: int) -> Rows:
    def normal(*size: int) -> Array:
        return rng.standard_normal((length, *size), dtype=np.float32)

    return Rows(
        normal(shape.heads, shape.key_dim),
        normal(shape.kv_heads, shape.key_dim),
        normal(shape.kv_heads, shape.value_dim),
    )
