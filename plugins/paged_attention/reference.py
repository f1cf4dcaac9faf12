"""What llmc::paged_attention means."""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from llmc.plugins.op import Sample
from llmc.plugins.paged_attention.step import Cache, Step, current_step


def reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    slopes: Tensor | None,
    *stored: Tensor | None,
    slot: int,
    write: bool,
    scale: float,
    window: int,
    chunk: int,
    softcap: float,
) -> Tensor:
    """One sequence of the current step after the other, each over its whole past.

    ``stored``, what the cache holds keys and values without, changes nothing where nothing is rounded.
    """
    step = current_step() or Step(rows=(("only", q.shape[0]),))
    alone = current_step() is None
    out = []
    first = 0
    for request, rows in step.rows:
        keys, values = k[first : first + rows], v[first : first + rows]
        if not alone:
            keys, values = _cached(step, (slot, request), keys, values, write)
        visible = torch.from_numpy(step.visible(first, rows))
        bias = _bias(visible, len(keys) - rows, window, chunk)
        out.append(_attend(q[first : first + rows], keys, values, *bias, sinks, slopes, scale, softcap))
        first += rows
    assert first == q.shape[0], f"the step's sequences have {first} rows, the inputs {q.shape[0]}"
    return torch.cat(out)


def fake(q: Tensor, k: Tensor, v: Tensor, *_: Tensor | None, **__: object) -> Tensor:
    """The shape of the result."""
    return q.new_empty(q.shape[0], q.shape[1], v.shape[2])


def _cached(step: Step, key: tuple[int, object], k: Tensor, v: Tensor, write: bool) -> tuple[Tensor, Tensor]:
    """Keys and values of the whole sequence, new rows included; they are in the cache afterwards."""
    stored = step.cache.get(key)
    if write:
        if stored is not None:
            k, v = (torch.cat([torch.as_tensor(old), new]) for old, new in zip(stored, (k, v), strict=True))
        step.cache[key] = k, v
        return k, v
    assert stored is not None, f"slot {key[0]} is read before it is written"
    return torch.as_tensor(stored[0]), torch.as_tensor(stored[1])


def _bias(visible: Tensor, past: int, window: int, chunk: int) -> tuple[Tensor, Tensor]:
    """(mask, distance j - i), both [rows, past + rows]."""
    rows = len(visible)
    i = past + visible.sum(1) - 1
    j = torch.cat([torch.arange(past), i])
    mask = torch.cat([torch.ones(rows, past, dtype=torch.bool), visible], 1)
    distance = j[None, :] - i[:, None]
    if window > 0:
        mask = mask & (-distance < window)
    if chunk > 0:
        mask = mask & (i[:, None] // chunk == j[None, :] // chunk)
    return mask, distance


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    distance: Tensor,
    sinks: Tensor | None,
    slopes: Tensor | None,
    scale: float,
    softcap: float,
) -> Tensor:
    """Queries [rows, H, Dk], keys and values [n, Hkv, ...], mask and distance [rows, n] -> [rows, H, Dv]."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    group = q.shape[1] // k.shape[1]
    k, v = (x.to(dtype).repeat_interleave(group, 1) for x in (k, v))
    scores = torch.einsum("ihd,jhd->hij", q.to(dtype), k) * scale
    if slopes is not None:
        scores = scores + slopes.to(dtype)[:, None, None] * distance
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~mask, float("-inf"))
    if sinks is not None:
        column = sinks.to(dtype)[:, None, None].expand(-1, q.shape[0], 1)
        weights = torch.softmax(torch.cat([scores, column], -1), -1)[..., :-1]
    else:
        weights = torch.softmax(scores, -1)
    return torch.einsum("hij,jhd->ihd", weights, v).to(q.dtype)


def samples(rng: np.random.Generator) -> Iterator[Sample]:
    """Prefill, chunks, decodes and their mixtures; every mask; head shapes from MQA to MLA; a tree."""
    plain: dict[str, object] = {"slot": 0, "write": True, "scale": 0.25, "window": 0, "chunk": 0, "softcap": 0.0}
    # (past, rows) of each sequence: lengths on both sides of blocks of 16 and of longer tiles
    mixed = ((0, 5), (16, 1), (33, 7), (300, 1), (15, 2), (520, 19))
    heads = ((4, 4, 16, 16), (6, 2, 24, 24), (4, 1, 64, 64), (3, 3, 24, 16), (8, 2, 80, 80), (2, 1, 7, 5))
    variants: tuple[dict[str, object], ...] = (
        {},
        {"window": 8},
        {"window": 1},
        {"chunk": 8},
        {"softcap": 2.0},
        {"window": 17, "softcap": 5.0, "scale": 1.0},
    )
    for number, shape in enumerate(heads):
        for lengths in (mixed, ((0, 1),), ((0, 40),), ((64, 1), (1, 1))):
            for extra in variants if lengths is mixed else variants[number % len(variants) :][:1]:
                yield _sample(rng, lengths, shape, plain | extra, sinks=number % 2 == 1, slopes=number % 3 == 2)
    yield _tree_sample(rng, plain)
    yield _tree_sample(rng, plain | {"window": 6})


def stored_samples(rng: np.random.Generator) -> Iterator[Sample]:
    """Centers and scales, all of them and some, where the softmax sees none of it, and with softcaps and sinks.

    Then feedback of the errors of keys.
    """
    plain: dict[str, object] = {"slot": 0, "write": True, "scale": 0.25, "window": 0, "chunk": 0, "softcap": 0.0}
    lengths = ((0, 5), (33, 7), (300, 1), (130, 19))
    for number, shape in enumerate(((4, 4, 16, 16), (6, 2, 24, 40), (9, 3, 64, 64), (2, 1, 7, 5))):
        for softcap in (0.0, 3.0):
            sinks, slopes = number % 2 == 1, number == 2
            sample = _sample(rng, lengths, shape, plain | {"softcap": softcap}, sinks=sinks, slopes=slopes)
            sizes = [(shape[1], dim) for dim in shape[2:]]
            keys, values = (
                (rng.standard_normal(size, np.float32), 2 ** rng.uniform(-1, 1, size).astype(np.float32))
                for size in sizes
            )
            for stored in ((*keys, *values), (keys[0], None, values[0], None), (None, keys[1]), (None,) * 3):
                yield Sample((*sample.inputs, *stored), sample.attributes, sample.context)
    for shape in ((9, 3, 64, 64), (2, 1, 7, 5)):
        sample = _sample(rng, lengths, shape, plain, sinks=False, slopes=False)
        shares = rng.uniform(-0.3, 0.3, (shape[1], shape[2], shape[2]))
        feedback = (np.triu(shares, 1) + np.eye(shape[2])).astype(np.float32)
        yield Sample((*sample.inputs, *(None,) * 4, feedback), sample.attributes, sample.context)


def _sample(
    rng: np.random.Generator,
    lengths: tuple[tuple[int, int], ...],
    shape: tuple[int, int, int, int],
    attributes: dict[str, object],
    *,
    sinks: bool,
    slopes: bool,
) -> Sample:
    heads, kv_heads, key_dim, value_dim = shape
    tokens = sum(rows for _, rows in lengths)

    def normal(*size: int) -> np.ndarray:
        return rng.standard_normal(size, dtype=np.float32)

    cache: Cache = {
        (0, number): (normal(past, kv_heads, key_dim), normal(past, kv_heads, value_dim))
        for number, (past, _) in enumerate(lengths)
        if past
    }
    inputs = (normal(tokens, heads, key_dim), normal(tokens, kv_heads, key_dim), normal(tokens, kv_heads, value_dim))
    optional = (normal(heads) if sinks else None, np.abs(normal(heads)) / 4 if slopes else None)
    step = Step(tuple((number, rows) for number, (_, rows) in enumerate(lengths)), cache)
    return Sample((*inputs, *optional), attributes, step)


def _tree_sample(rng: np.random.Generator, attributes: dict[str, object]) -> Sample:
    """A tree of 70 rows, each below a random earlier one, between a decode and a chain of three."""
    sample = _sample(rng, ((20, 1), (37, 70), (0, 3)), (4, 2, 16, 16), attributes, sinks=False, slopes=True)
    visible = np.eye(70, 128, dtype=np.uint8)
    for row in range(1, 70):
        visible[row] |= visible[rng.integers(0, row)]
    tree = np.zeros((74, 128), np.uint8)
    tree[0, 0] = 1
    tree[1:71] = visible
    tree[71:74, :3] = np.tri(3, dtype=np.uint8)
    mask = np.packbits(tree, axis=1, bitorder="little").view(np.uint64)
    return Sample(sample.inputs, sample.attributes, Step(sample.context.rows, sample.context.cache, mask))
