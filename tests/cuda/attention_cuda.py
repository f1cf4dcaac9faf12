"""Steps of paged attention on the emulator, with a pool whose blocks are scattered and not written yet."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import torch
from contract import NUMPY, Expected, call_of
from emulator import Emulator
from numpy.typing import NDArray

from llmc.plugins.cuda import BatchTensors, Cache, Launch, Tensor
from llmc.plugins.op import Sample
from llmc.plugins.paged_attention import cuda, storage
from llmc.plugins.paged_attention.reference import reference
from llmc.plugins.paged_attention.step import Step

Array = NDArray[Any]
PLAIN: dict[str, Any] = {"slot": 0, "write": True, "scale": 0.25, "window": 0, "chunk": 0, "softcap": 0.0}


@dataclasses.dataclass
class Rows:
    """New tokens of one sequence, behind so many in the cache."""

    sequence: int
    past: int
    q: Array
    k: Array
    v: Array
    tree: Array | None = None
    """[rows, words] of uint64."""
    positions: Array | None = None


class Pool:
    """The cache of one slot for sequences of at most these lengths; ``stored``: centers and scales."""

    def __init__(
        self,
        device: Emulator,
        heads: tuple[int, int, int],
        dtype: str,
        lengths: Sequence[int],
        *,
        block: int = 16,
        stored: Sequence[Array | None] = (),
        sinks: Array | None = None,
        slopes: Array | None = None,
        attributes: dict[str, Any] | None = None,
    ) -> None:
        self.device, self.heads, self.block, self.attributes = device, heads, block, attributes or PLAIN
        needed = [-(-length // block) for length in lengths]
        sizes = cuda.array_bytes(*heads, dtype, block, sum(needed) + 1)
        # Scales are copied by four, of which some may not be there yet: they are NaN.
        arrays = [
            device.alloc(size, name, known=name.endswith("scales")) if size else 0
            for size, name in zip(sizes, _NAMES, strict=True)
        ]
        self.cache = Cache(*arrays, dtype, block, self.attributes["window"])
        ids = iter(np.random.default_rng(3).permutation(sum(needed) + 1))
        self.tables = np.full((len(lengths), max(needed)), 12345678, np.int32)  # never read
        for row, count in enumerate(needed):
            self.tables[row, :count] = [next(ids) for _ in range(count)]
        self.sides = [None if a is None else device.tensor(a, name) for name, a in _sides(sinks, slopes, stored)]

    def store(self, rows: Sequence[Rows]) -> None:
        """Write keys and values, and nothing else."""
        made, _ = self.launches(rows, 0, 0, self.attributes | {"write": True})
        self._run(made[:1])

    def step(self, rows: Sequence[Rows], *, spare: tuple[int, int] = (0, 0)) -> list[Array]:
        """Results of the rows of each sequence. ``spare``: rows and sequences that the bucket has besides."""
        made, y = self.launches(rows, *spare)
        self._run(made)
        count = sum(len(r.q) for r in rows)
        found = self.device.get(y.address, y.shape, y.dtype)[:count]
        return list(np.split(found, np.cumsum([len(r.q) for r in rows])[:-1]))

    def _run(self, made: list[Launch]) -> None:
        self.device.run(made)

    def launches(
        self, rows: Sequence[Rows], more_rows: int = 0, more: int = 0, attributes: dict[str, Any] | None = None
    ) -> tuple[list[Launch], Tensor]:
        """The launches of a step, and what they write."""
        attributes = attributes or self.attributes
        put = self.device.put
        counts = [len(r.q) for r in rows]
        bounds = np.cumsum([0, *counts, *(0,) * more]).astype(np.int32)
        total = int(bounds[-1]) + more_rows
        q, k, v = (
            np.concatenate([*(getattr(r, name) for r in rows), *_spare(rows[0], name, more_rows)]) for name in "qkv"
        )
        positions = [np.arange(r.past, r.past + len(r.q)) if r.positions is None else r.positions for r in rows]
        words = max((r.tree.shape[1] for r in rows if r.tree is not None), default=0)
        tree = 0
        if words:
            masks = [_causal(len(r.q), words) if r.tree is None else r.tree for r in rows]
            tree = put(np.concatenate([*masks, np.zeros((more_rows, words), np.uint64)]), "tree")
        tables = self.tables[[*(r.sequence for r in rows), *(0,) * more]]
        batch = BatchTensors(
            put(np.concatenate([*positions, np.zeros(more_rows)]).astype(np.int32), "positions"),
            put(bounds, "bounds"),
            put(np.array([*(r.past for r in rows), *(0,) * more], np.int32), "computed"),
            put(tables, "tables"),
            tree,
            0,
            total,
            len(rows) + more,
            tables.shape[1],
            words,
            max(counts),
        )
        y = self.device.empty((total, q.shape[1], self.heads[2]), q.dtype.name, "y")
        inputs = (*(self.device.tensor(a, name) for a, name in zip((q, k, v), "qkv", strict=True)), *self.sides)
        return cuda.launches(call_of(self.device, inputs, (y,), attributes, batch, (self.cache,))), y


_NAMES = ("keys", "values", "key scales", "value scales")


def _sides(sinks: Array | None, slopes: Array | None, stored: Sequence[Array | None]) -> list[tuple[str, Array | None]]:
    names = ("sinks", "slopes", "key_center", "key_scale", "value_center", "value_scale", "key_feedback")
    return list(zip(names, (sinks, slopes, *stored, *(None,) * (5 - len(stored))), strict=True))


def _spare(rows: Rows, name: str, count: int) -> list[Array]:
    given = getattr(rows, name)
    return [np.full((count, *given.shape[1:]), np.nan).astype(given.dtype)] if count else []


def _causal(rows: int, words: int) -> Array:
    bits = np.zeros((rows, words * 64), np.uint8)
    bits[:, :rows] = np.tri(rows, dtype=np.uint8)
    return np.packbits(bits, axis=1, bitorder="little").view(np.uint64)


def rows_of(sample: Sample, dtype: str) -> tuple[list[Rows], list[Rows]]:
    """What is in the cache before a sample, and its own rows."""
    kind, step = NUMPY[dtype], sample.context
    q, k, v = (a.astype(kind) for a in sample.inputs[:3])
    before, new, first = [], [], 0
    for number, (request, count) in enumerate(step.rows):
        part = slice(first, first + count)
        old = step.cache.get((0, request), (k[:0], v[:0]))
        past = len(old[0])
        queries = np.zeros((past, *q.shape[1:]), kind)
        if past:
            before.append(Rows(number, 0, queries, *(np.asarray(a).astype(kind) for a in old)))
        tree = None if step.tree_mask is None else np.ascontiguousarray(step.tree_mask[part])
        positions = past + step.visible(first, count).sum(1) - 1
        new.append(Rows(number, past, q[part], k[part], v[part], tree, positions))
        first += count
    return before, new


def expected_of(sample: Sample, dtype: str, kv: str) -> Expected:
    """What the reference makes of a sample if keys and values are what comes back from the cache."""
    kind, step = NUMPY[dtype], sample.context
    stored = (*sample.inputs[5:], *(None,) * (10 - len(sample.inputs)))

    def back(x: Array, keys: bool) -> Array:
        center, scale, feedback = (*stored[:2], stored[4]) if keys else (*stored[2:4], None)
        given = np.asarray(x).astype(kind).astype(np.float32)
        found = storage.round_trip(given, kv, keys=keys, center=center, scale=scale, feedback=feedback)
        return found.astype(np.float64)

    cache = {key: (back(k, True), back(v, False)) for key, (k, v) in step.cache.items()}
    q, k, v = (a.astype(kind).astype(np.float32) for a in sample.inputs[:3])
    inputs = [q.astype(np.float64), back(k, True), back(v, False), *sample.inputs[3:5], *stored]
    tensors = [None if a is None else torch.from_numpy(np.asarray(a, np.float64)) for a in inputs]
    with Step(step.rows, cache, step.tree_mask):
        y = reference(*tensors, **sample.attributes)  # type: ignore[arg-type]
    return Expected.of(y.numpy(), np.dtype(kind))


def random_rows(rng: np.random.Generator, heads: tuple[int, int, int, int], length: int, dtype: str) -> Rows:
    """A whole sequence, of which `cut` takes parts."""
    count, kv_heads, key_dim, value_dim = heads
    kind = NUMPY.get(dtype, ml_dtypes.bfloat16)
    q, k, v = (
        rng.standard_normal((length, *size), np.float32).astype(kind)
        for size in ((count, key_dim), (kv_heads, key_dim), (kv_heads, value_dim))
    )
    return Rows(0, 0, q, k, v)


def cut(rows: Rows, start: int, stop: int) -> Rows:
    """Some rows behind those before."""
    return Rows(rows.sequence, start, rows.q[start:stop], rows.k[start:stop], rows.v[start:stop])
