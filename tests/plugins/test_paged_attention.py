"""Paged attention: a plain float64 oracle, the cache's dtypes, and the same bits however a sequence is cut up."""

from collections.abc import Sequence

import ml_dtypes
import numpy as np
import pytest
from attention_cache import EMPTY, ISAS, PLAIN, Array, Cache, Rows, Shape, sequence
from numpy.typing import NDArray

from llmc.plugins import kernels
from llmc.plugins.paged_attention.storage import KV_DTYPES, QUANTIZED, rotate, round_trip
from llmc.runtime.batch import Batch

DTYPES = KV_DTYPES
MULTIPLYING = ("avx512bf16", "amx")  # products of bf16, or of integers


def oracle(
    s: Rows,
    dtype: str = "float32",
    *,
    scale: float = 0.25,
    window: int = 0,
    chunk: int = 0,
    softcap: float = 0.0,
    sinks: Array | None = None,
    slopes: Array | None = None,
    stored: Sequence[Array | None] = (None,) * 4,
) -> NDArray[np.float64]:
    """Every row of a sequence, one head after the other, keys and values as they come back from ``dtype``."""
    (key_center, key_scale, *of_values), q = stored, s.q.astype(np.float64)
    k = round_trip(s.k, dtype, keys=True, center=key_center, scale=key_scale).astype(np.float64)
    v = round_trip(s.v, dtype, keys=False, center=of_values[0], scale=of_values[1]).astype(np.float64)
    n, heads, _ = q.shape
    i, j = np.arange(n)[:, None], np.arange(n)[None, :]
    hidden = (j > i) | (i - j >= (window or n)) | (i // (chunk or n) != j // (chunk or n))
    y = np.zeros((n, heads, v.shape[2]))
    for h in range(heads):
        kv = h // (heads // k.shape[1])
        logits = scale * (q[:, h] @ k[:, kv].T) + (float(slopes[h]) * (j - i) if slopes is not None else 0.0)
        logits = softcap * np.tanh(logits / softcap) if softcap else logits
        weights = np.where(hidden, 0.0, np.exp(logits))
        y[:, h] = (
            weights @ v[:, kv] / (weights.sum(1) + (np.exp(float(sinks[h])) if sinks is not None else 0.0))[:, None]
        )
    return y


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape",
    [
        Shape(9, 3, 64, 64),
        Shape(4, 4, 7, 5),
        Shape(7, 1, 40, 24),
        Shape(8, 1, 72, 56),
        Shape(2, 2, 96, 80),
        Shape(2, 1, 8, 16),
        Shape(14, 2, 128, 128),
        Shape(2, 2, 192, 128),
        Shape(4, 1, 256, 256),
    ],
    ids=str,
)
def test_rounded_keys_and_values_are_what_is_read(shape: Shape, dtype: str, isa: str) -> None:
    rng = np.random.default_rng(0)
    s = sequence(rng, shape, 150)
    cache = Cache(shape, dtype, [150])
    found = np.concatenate([cache.step([(0, s, 0, 145)], isa=isa, threads=2), cache.step([(0, s, 145, 150)], isa=isa)])
    if isa in MULTIPLYING and dtype == "int8":  # 15 bits of queries and weights
        np.testing.assert_allclose(found, oracle(s, dtype), 1e-3, 1e-3)
    elif isa in MULTIPLYING and dtype not in ("float32", "float16"):  # rounds queries and weights as well
        turn = rotate if dtype in QUANTIZED else lambda x: x
        s.q = turn(turn(s.q).astype(ml_dtypes.bfloat16).astype(np.float32))
        expected = oracle(s, dtype)
        np.testing.assert_allclose(found, expected, 0, {"bfloat16": 6e-3, "int4": 4e-2}.get(dtype, 1.5e-2))
        assert np.abs(found - expected).mean() < 2e-3
    else:
        np.testing.assert_allclose(found, oracle(s, dtype), 1e-5, 1e-5)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(
    "options",
    [
        {"window": 1},
        {"window": 130},
        {"chunk": 24},
        {"chunk": 200, "window": 40},
        {"softcap": 3.0, "sinks": True},
        {"slopes": True},
        {"slopes": True, "softcap": 2.0, "window": 33, "sinks": True},
        {"scale": -0.5},
    ],
    ids=str,
)
def test_masks_and_logits(options: dict[str, object], isa: str) -> None:
    rng = np.random.default_rng(1)
    shape = Shape(4, 2, 16, 16)
    s = sequence(rng, shape, 290)
    vectors = {name: rng.standard_normal(4, dtype=np.float32) / 4 for name in ("sinks", "slopes") if options.get(name)}
    attributes = {k: v for k, v in options.items() if k not in vectors}
    found = Cache(shape, "float32", [290]).step([(0, s, 0, 290)], PLAIN | attributes, isa=isa, **vectors)
    np.testing.assert_allclose(found, oracle(s, **attributes, **vectors), 2e-5, 2e-5)  # type: ignore[arg-type]


def test_window_does_not_see_one_token_too_many() -> None:
    rng = np.random.default_rng(2)
    shape = Shape(1, 1, 8, 8)
    s = sequence(rng, shape, 8)
    before = Cache(shape, "float32", [8]).step([(0, s, 0, 8)], PLAIN | {"window": 4})
    s.k[0] += 1
    s.v[0] += 1
    after = Cache(shape, "float32", [8]).step([(0, s, 0, 8)], PLAIN | {"window": 4})
    changed = [bool(np.any(before[i] != after[i])) for i in range(8)]
    assert changed == [True] * 4 + [False] * 4


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", [{}, {"window": 37}, {"chunk": 100, "softcap": 4.0}], ids=str)
def test_same_bits_however_a_sequence_is_cut(options: dict[str, object], dtype: str, isa: str) -> None:
    rng = np.random.default_rng(4)
    shape = Shape(6, 2, 40, 24)
    attributes = PLAIN | options
    n = 300
    s = sequence(rng, shape, n)
    expected = Cache(shape, dtype, [n]).step([(0, s, 0, n)], attributes, isa=isa)
    assert np.isfinite(expected).all()
    for size in (1, 7, 16, 48, 129):
        cache = Cache(shape, dtype, [n], block=32 if size == 7 else 16)
        found = [
            cache.step([(0, s, start, min(n, start + size))], attributes, isa=isa, threads=1 + size % 2)
            for start in range(0, n, size)
        ]
        assert np.array_equal(np.concatenate(found), expected), f"chunks of {size}"


@pytest.mark.parametrize("dtype", DTYPES)
def test_same_bits_alone_and_in_a_batch_on_any_number_of_threads(dtype: str) -> None:
    rng = np.random.default_rng(5)
    shape = Shape(9, 3, 64, 64)
    lengths = [700, 3, 131, 64, 17, 401, 128, 260, 90, 33, 5, 1, 513, 256, 255, 16]
    all_rows = [sequence(rng, shape, n) for n in lengths]
    together = Cache(shape, dtype, lengths)
    for threads in (1, 2, 5):
        split = [n // 2 + number % 2 for number, n in enumerate(lengths)]  # a prefill each, then a mixture
        together.step(
            [(i, s, 0, c) for i, (s, c) in enumerate(zip(all_rows, split, strict=True)) if c], threads=threads
        )
        parts = [(i, s, c, n) for i, (s, c, n) in enumerate(zip(all_rows, split, lengths, strict=True)) if c < n]
        found = together.step(parts, threads=threads)
        start = 0
        for i, s, c, n in parts:
            alone = Cache(shape, dtype, [n])
            expected = alone.step([(0, s, 0, n)])[c:]
            assert np.array_equal(found[start : start + n - c], expected), f"sequence {i} on {threads} threads"
            start += n - c


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_head_has_the_same_bits_however_many_share_its_keys(dtype: str, isa: str) -> None:
    rng = np.random.default_rng(15)
    shape, n = Shape(13, 1, 72, 56), 301
    s = sequence(rng, shape, n)

    def last_row(first: int, last: int) -> Array:
        cache = Cache(Shape(last - first, 1, 72, 56), dtype, [n])
        some = Rows(np.ascontiguousarray(s.q[:, first:last]), s.k, s.v)
        cache.step([(0, some, 0, n - 1)], isa=isa)
        return cache.step([(0, some, n - 1, n)], isa=isa)[0]

    alone = np.concatenate([last_row(h, h + 1) for h in range(shape.heads)])
    for group in range(2, shape.heads + 1):
        assert np.array_equal(last_row(0, group), alone[:group]), f"{group} heads"


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("past", "shape", "options"),
    [
        (121, Shape(4, 2, 24, 16), {"slopes": True}),
        (121, Shape(4, 2, 24, 16), {"window": 20}),
        (121, Shape(4, 2, 24, 16), {"chunk": 50, "slopes": True}),
        (171, Shape(9, 3, 64, 64), {}),
        (0, Shape(20, 1, 40, 8), {}),
    ],
    ids=str,
)
def test_a_branch_of_a_tree_has_the_bits_that_it_would_have_alone(
    past: int, shape: Shape, options: dict[str, object], dtype: str, isa: str
) -> None:
    """Rows of a tree see their ancestors where these will stand once they are accepted, beside whichever rows."""
    rng = np.random.default_rng(6)
    rows = 40
    attributes = PLAIN | {key: value for key, value in options.items() if key != "slopes"}
    slopes = rng.random(shape.heads, dtype=np.float32) if "slopes" in options else None
    s = sequence(rng, shape, past + rows)
    parent = [-1, *(int(rng.integers(max(-1, r - 4), r)) for r in range(1, rows))]
    mask = np.zeros((rows, 1), np.uint64)
    paths: list[list[int]] = []
    for r in range(rows):
        paths.append([*(paths[parent[r]] if parent[r] >= 0 else []), r])
        for ancestor in paths[r]:
            mask[r, 0] |= np.uint64(1) << np.uint64(ancestor)
    cache = Cache(shape, dtype, [past + rows])
    if past:
        cache.step([(0, s, 0, past)], attributes, slopes=slopes, isa=isa)
    found = cache.step([(0, s, past, past + rows)], attributes, slopes=slopes, tree=mask, threads=2, isa=isa)
    for r in (0, 1, 5, 17, 39):
        path = [*range(past), *(past + p for p in paths[r])]
        branch = Rows(s.q[path], s.k[path], s.v[path])
        alone = Cache(shape, dtype, [len(path)])
        expected = alone.step([(0, branch, 0, len(path))], attributes, slopes=slopes, isa=isa)
        assert np.array_equal(found[r], expected[-1]), f"row {r}"


def test_a_chain_under_a_tree_mask_is_causal() -> None:
    rng = np.random.default_rng(7)
    shape = Shape(4, 2, 16, 16)
    s = sequence(rng, shape, 100)
    chain = np.array([[(1 << (r + 1)) - 1] for r in range(20)], np.uint64)
    plain, tree = Cache(shape, "float32", [100]), Cache(shape, "float32", [100])
    for cache in (plain, tree):
        cache.step([(0, s, 0, 80)])
    assert np.array_equal(plain.step([(0, s, 80, 100)]), tree.step([(0, s, 80, 100)], tree=chain))


@pytest.mark.parametrize(
    ("bits", "message"), [([1, 6, 5], "itself|later"), ([1, 3, 3], "itself"), ([1, 3, 15], "later")]
)
def test_trees_that_are_none_are_refused(bits: list[int], message: str) -> None:
    shape = Shape(1, 1, 8, 8)
    s = sequence(np.random.default_rng(0), shape, 3)
    with pytest.raises(kernels.KernelError, match=message):
        Cache(shape, "float32", [3]).step([(0, s, 0, 3)], tree=np.array([[b] for b in bits], np.uint64))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", [{}, {"softcap": 6.0, "window": 150}, {"sinks": True}], ids=str)
def test_what_is_stored_lacks_its_center(options: dict[str, object], dtype: str, isa: str) -> None:
    """Large constants of keys and values cost nothing, and the bits stay those of a sequence that is not cut."""
    rng = np.random.default_rng(11)
    shape, n = Shape(6, 2, 40, 24), 200
    s = sequence(rng, shape, n)
    centers = [rng.choice([-8, 8], (2, dim)).astype(np.float32) for dim in (40, 24)]
    s.k, s.v = s.k + centers[0], s.v + centers[1]
    scales = [2 ** rng.uniform(-0.5, 0.5, (2, dim)).astype(np.float32) for dim in (40, 24)]
    stored = (centers[0], scales[0], centers[1], scales[1])
    sinks = rng.standard_normal(6, dtype=np.float32) if "sinks" in options else None
    attributes = PLAIN | {name: value for name, value in options.items() if name != "sinks"}
    kept = {name: attributes[name] for name in ("softcap", "window")}
    whole = Cache(shape, dtype, [n]).step([(0, s, 0, n)], attributes, isa=isa, sinks=sinks, stored=stored)
    exact = oracle(s, sinks=sinks, **kept)  # type: ignore[arg-type]
    expected = oracle(s, dtype, sinks=sinks, stored=stored, **kept)  # type: ignore[arg-type]
    if isa in MULTIPLYING and dtype not in ("float32", "float16"):
        assert np.abs(whole - expected).mean() < 5e-3
    else:
        np.testing.assert_allclose(whole, expected, 1e-4, 1e-4)
    assert np.abs(whole - exact).mean() < {"int4": 0.1, "float8_e4m3": 0.03}.get(dtype, 0.01)
    cache = Cache(shape, dtype, [n])
    steps = [(0, 61), (61, 62), (62, n)]
    parts = [
        cache.step([(0, s, a, b)], attributes, isa=isa, sinks=sinks, stored=stored, threads=1 + b % 2) for a, b in steps
    ]
    assert np.array_equal(np.concatenate(parts), whole)


def test_shared_keys_and_values_are_read_and_not_written() -> None:
    rng = np.random.default_rng(8)
    shape = Shape(4, 2, 16, 16)
    s = sequence(rng, shape, 50)
    cache = Cache(shape, "float32", [50])
    expected = cache.step([(0, s, 0, 50)])
    other = Rows(s.q, s.k * 0, s.v * 0)
    assert np.array_equal(cache.step([(0, other, 0, 50)], PLAIN | {"write": False}), expected)


def test_strided_inputs_and_outputs() -> None:
    """q, k and v as columns of one fused projection, y as columns of a wider buffer."""
    rng = np.random.default_rng(9)
    shape, n = Shape(4, 2, 16, 16), 70
    fused = rng.standard_normal((n, 8, 16), dtype=np.float32)
    s = Rows(fused[:, :4], fused[:, 4:6], fused[:, 6:])
    expected = Cache(shape, "float32", [n]).step([(0, s, 0, n)])
    cache = Cache(shape, "float32", [n])
    wide = np.full((n, 6, 16), 7, np.float32)
    batch = Batch(
        EMPTY, np.arange(n, dtype=np.int32), EMPTY, np.array([0, n], np.int32), np.zeros(1, np.int32), cache.tables
    )
    kernels.run_op(
        "paged_attention", [s.q, s.k, s.v, None, None], [wide[:, 1:5]], PLAIN, batch=batch, kv=cache.kv, threads=2
    )
    assert np.array_equal(wide[:, 1:5], expected)
    assert (wide[:, [0, 5]] == 7).all()


def test_only_the_sequences_own_slots_are_written() -> None:
    rng = np.random.default_rng(10)
    shape = Shape(2, 1, 8, 8)
    s = sequence(rng, shape, 21)
    cache = Cache(shape, "float32", [21, 40])
    before = cache.kv.values(0).copy(), cache.kv.keys(0).copy()
    cache.step([(0, s, 0, 21)])
    mine = set(cache.tables[0, :2].tolist())
    for old, new in zip(before, (cache.kv.values(0), cache.kv.keys(0)), strict=True):
        changed = {int(b) for b in np.unique(np.nonzero(old.view(np.uint32) != new.view(np.uint32))[0])}
        assert changed == mine
    last = cache.kv.values(0)[cache.tables[0, 1]].reshape(16, 8)
    assert np.isfinite(last[:5]).all() and np.isnan(last[5:]).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"slot": 1}, "slot"),
        ({"q": (3, 5, 16)}, "kv heads"),
        ({"k": (3, 2, 15)}, "k must"),
        ({"y": (3, 4, 8)}, "y must"),
        ({"key_center": (2, 8)}, "centers and scales must"),
        (dict.fromkeys("abcd", (2, 16)) | {"key_feedback": (2, 16, 8)}, "key_feedback must"),
    ],
    ids=str,
)
def test_refusals(change: dict[str, object], message: str) -> None:
    shapes = {"q": (3, 4, 16), "k": (3, 2, 16), "v": (3, 2, 16), "y": (3, 4, 16)} | {
        k: v for k, v in change.items() if k != "slot"
    }
    q, k, v, y, *stored = (np.zeros(shape, np.float32) for shape in shapes.values())  # type: ignore[call-overload]
    kv = kernels.Kv([(2, 16, 16)], "float32", 16, 1)
    batch = Batch(
        EMPTY,
        np.arange(3, dtype=np.int32),
        EMPTY,
        np.array([0, 3], np.int32),
        np.zeros(1, np.int32),
        np.zeros((1, 1), np.int32),
    )
    attributes = PLAIN | {"slot": change.get("slot", 0)}
    with pytest.raises(kernels.KernelError, match=message):
        kernels.run_op("paged_attention", [q, k, v, None, None, *stored], [y], attributes, batch=batch, kv=kv)
