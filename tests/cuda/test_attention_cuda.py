"""Paged attention on CUDA agrees with the reference, and gives a row the same bits however it is computed."""

import itertools
from typing import Any

import numpy as np
import pytest
from attention_cuda import PLAIN, Pool, Rows, cut, expected_of, random_rows, rows_of
from contract import compare
from emulator import Emulator

from llmc.errors import EngineError
from llmc.plugins.cuda import Cache
from llmc.plugins.op import Sample
from llmc.plugins.paged_attention import cuda, reference, storage


def check(sample: Sample, dtype: str, kv: str, what: str, *, block: int = 16, units: float = 3.0, **how: Any) -> None:
    before, rows = rows_of(sample, dtype)
    heads = (sample.inputs[1].shape[1], sample.inputs[1].shape[2], sample.inputs[2].shape[2])
    lengths = [r.past + len(r.q) for r in rows]
    with Emulator(**how) as device:
        sides = {"sinks": sample.inputs[3], "slopes": sample.inputs[4], "stored": sample.inputs[5:]}
        pool = Pool(device, heads, kv, lengths, block=block, attributes=dict(sample.attributes), **sides)
        if before:
            pool.store(before)
        found = np.concatenate(pool.step(rows, spare=(how.get("order", 0), 1)))
    message = f"{what} in {dtype}, cache {kv}: {dict(sample.attributes)}"
    compare(found, expected_of(sample, dtype, kv), units, message)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_samples(dtype: str) -> None:
    for number, sample in enumerate(reference.samples(np.random.default_rng(7))):
        if dtype == "float16" and number not in (0, 4, 7):
            continue
        block = 16 if number % 4 else 48
        check(sample, dtype, dtype, f"sample {number}", block=block, order=number % 3, seed=number)


@pytest.mark.parametrize(
    ("dtype", "kv"),
    [("bfloat16", "float8_e4m3"), ("float16", "int8"), ("bfloat16", "float16"), ("bfloat16", "bfloat16")],
)
def test_what_the_cache_makes_of_keys_and_values(dtype: str, kv: str) -> None:
    """Codes and scales, rotated keys, centers and scales of dims, errors that are fed back."""
    samples = [*reference.samples(np.random.default_rng(8)), *reference.stored_samples(np.random.default_rng(9))]
    chosen = {
        "float8_e4m3": (1, 54, 56, 60, 65, 88, 89),
        "int8": (9, 61, 81),
        "float16": (7, 62),
        "bfloat16": (57, 60, 65, 73, 81),
    }[kv]
    for number in chosen:
        check(samples[number], dtype, kv, f"sample {number}", units=6.0, order=number % 3, seed=number)


def test_centers_and_scales_of_an_odd_number_of_dims(monkeypatch: pytest.MonkeyPatch) -> None:
    """Results that are written one by one, where a block walks all keys of its rows."""
    monkeypatch.setattr(cuda, "SHORT_ROWS", 1)
    sample = next(itertools.islice(reference.stored_samples(np.random.default_rng(9)), 24, None))
    assert sample.inputs[2].shape[2] == 5 and all(a is not None for a in sample.inputs[5:])
    check(sample, "bfloat16", "bfloat16", "5 dims", units=6.0)


@pytest.mark.parametrize(
    ("heads", "kv"),
    [
        *(((3, 1, 96, 96), "bfloat16"), ((8, 1, 128, 128), "bfloat16"), ((2, 1, 192, 128), "bfloat16")),
        *(((2, 2, 256, 256), "bfloat16"), ((2, 1, 192, 80), "int8"), ((2, 1, 22, 18), "int8")),
        ((2, 1, 134, 135), "float8_e4m3"),
    ],
)
def test_head_sizes(heads: tuple[int, int, int, int], kv: str) -> None:
    rng = np.random.default_rng(sum(heads))
    for past, rows in ((0, 1), (70, 1), (130, 34)):
        sample = reference._sample(rng, ((past, rows),), heads, PLAIN | {"scale": 0.1}, sinks=False, slopes=False)
        units = 3.0 if kv == "bfloat16" else 6.0
        check(sample, "bfloat16", kv, f"{heads}, {rows} behind {past}", units=units, order=rows % 3)


def test_the_largest_heads_fit_on_every_device() -> None:
    """Blocks of 32 rows and, where keys are widened, of 16; no launch takes more than 99 KB of shared memory."""
    rng = np.random.default_rng(8)
    sample = reference._sample(rng, ((0, 40),), (4, 2, 256, 256), PLAIN | {"scale": 0.1}, sinks=False, slopes=False)
    for kv in ("bfloat16", "float16"):
        check(sample, "bfloat16", kv, "256 dims, 40 rows")
    for dtypes in itertools.product(("bfloat16", "float16"), cuda.KV_DTYPES):
        for widths in itertools.product(sorted({cuda.padded(dims) for dims in range(1, 257)}), repeat=2):
            p = cuda.AttentionParams(group=1, sequences=1, kv_heads=1, max_units=1, part_rows=1)
            launches = (cuda._prefill(p, dtypes, widths, False, 100), cuda._decode(p, dtypes, widths, False))
            assert all(launch.shared <= 99 << 10 for launch in launches), (dtypes, widths)


BITS: list[tuple[str, str, tuple[int, int, int, int], dict[str, Any]]] = [
    ("bfloat16", "bfloat16", (4, 2, 16, 16), {}),
    ("bfloat16", "float8_e4m3", (4, 2, 16, 16), {"window": 300}),
    ("float16", "float16", (6, 2, 64, 64), {"chunk": 200}),
    ("bfloat16", "bfloat16", (9, 1, 16, 16), {"softcap": 3.0, "window": 90}),
    ("bfloat16", "bfloat16", (2, 1, 16, 160), {}),
]


@pytest.mark.parametrize(("dtype", "kv", "heads", "more"), BITS)
def test_bits(dtype: str, kv: str, heads: tuple[int, int, int, int], more: dict[str, Any], monkeypatch: Any) -> None:
    """Alone, in a batch, in chunks of any size and token by token; in other blocks; with few blocks of threads."""
    rng = np.random.default_rng(1)
    length, attributes = 333, PLAIN | more
    rows, other = random_rows(rng, heads, length, dtype), random_rows(rng, heads, 150, dtype)
    other.sequence = 1
    with Emulator("plain") as device:

        def pool(**options: Any) -> Pool:
            return Pool(device, heads[1:], kv, (length, 150), attributes=attributes, **options)

        whole = pool().step([rows])[0]
        for block, bounds in ((16, (0, 1, 2, 67, 131, 132, 200, 333)), (48, (0, 100, 333))):
            chunked, found = pool(block=block), []
            for number, (start, stop) in enumerate(itertools.pairwise(bounds)):
                step = [cut(other, 20 * number, 20 * number + 20), cut(rows, start, stop)]
                found.append(chunked.step(step[::-1] if number % 2 else step, spare=(number, number))[1 - number % 2])
            same_bits(found, whole)
        monkeypatch.setattr(cuda, "_BLOCKS", 2)
        alone = pool()
        alone.store([rows])
        for place in (0, 15, 16, 63, 64, 255, 256, 299, 332):
            same_bits(alone.step([cut(rows, place, place + 1)]), whole[place : place + 1])
        monkeypatch.setattr(cuda, "SHORT_ROWS", 1)  # what was split is walked by one block, and the other way round
        for place in (0, 60, 300):
            same_bits(alone.step([cut(rows, place, place + 5)]), whole[place : place + 5])
        monkeypatch.setattr(cuda, "SHORT_ROWS", 10**6)
        same_bits(alone.step([cut(rows, 250, 333)]), whole[250:])


def test_bits_of_long_contexts(monkeypatch: Any) -> None:
    """Units of both lengths, with and without those that a window leaves out."""
    heads, length = (2, 1, 16, 16), 6300
    for window in (0, 3000):
        with Emulator("plain") as device:
            rows = random_rows(np.random.default_rng(2), heads, length, "bfloat16")
            pool = Pool(device, heads[1:], "bfloat16", (length,), attributes=PLAIN | {"window": window})
            pool.store([rows])
            for start in (4060, 5115, 6230):
                with monkeypatch.context() as patch:
                    patch.setattr(cuda, "SHORT_ROWS", 1)
                    walked = pool.step([cut(rows, start, start + 70)])[0]
                    patch.setattr(cuda, "SHORT_ROWS", 1000)
                    same_bits(pool.step([cut(rows, start, start + 70)]), walked)
        keys, values = (a.astype(np.float64)[:, 0] for a in (rows.k, rows.v))
        query, i = rows.q[6290].astype(np.float64), 6290
        low = max(0, i - window + 1) if window else 0
        scores = query @ keys[low : i + 1].T * 0.25
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        exact = weights @ values[low : i + 1] / weights.sum(-1, keepdims=True)
        np.testing.assert_allclose(walked[60].astype(np.float64), exact, rtol=0.02, atol=0.002)


def test_bits_under_a_tree(monkeypatch: Any) -> None:
    """A row's ancestors count, not the rows beside it: a chain in a tree has the bits of the same tokens in a row."""
    rng = np.random.default_rng(4)
    for more in ({}, {"window": 40}):
        heads = (4, 2, 16, 16)
        with Emulator("plain") as device:
            rows = random_rows(rng, heads, 84, "bfloat16")
            pool = Pool(device, heads[1:], "bfloat16", (84, 84), attributes=PLAIN | more)
            pool.store([rows])
            chain = Rows(1, 0, rows.q, rows.k, rows.v)
            pool.store([chain])
            straight = pool.step([cut(chain, 64, 84)])[0]
            tree = np.zeros((20, 64), np.uint8)
            tree[:] = np.tri(20, 64)
            mask = np.packbits(tree, axis=1, bitorder="little").view(np.uint64)
            step = cut(rows, 64, 84)
            step.tree, step.positions = mask, np.arange(64, 84)
            for short in (1, 64):
                monkeypatch.setattr(cuda, "SHORT_ROWS", short)
                same_bits(pool.step([step]), straight)


def test_moved_positions() -> None:
    """Positions of accepted drafts, whose targets may be sources of later ones."""
    heads, dtype = (2, 1, 40, 24), "int8"
    with Emulator() as device:
        rows = random_rows(np.random.default_rng(5), (2, 1, 40, 24), 40, "bfloat16")
        pool = Pool(device, heads[1:], dtype, (41,))
        pool.store([rows])
        sources, targets = np.array([[33, 35, 36], [32, 33, 35]], np.int32)
        places = [device.put(a.copy(), "places") for a in (pool.tables[0], sources, targets)]
        cache: Cache = pool.cache
        device.launch(cuda.move_positions(cache, 1, (40, 24), *places, 3))
        order = [*range(32), 33, 35, 34, 36, *range(36, 40)]
        moved = Rows(0, 0, rows.q, rows.k[order], rows.v[order])
        after = pool.step([Rows(0, 40, rows.q[:1], rows.k[:1], rows.v[:1])])[0]
        other = Pool(device, heads[1:], dtype, (41,))
        other.store([moved])
        same_bits([other.step([Rows(0, 40, rows.q[:1], rows.k[:1], rows.v[:1])])[0]], after)


def test_stored_values_are_those_of_the_cpu() -> None:
    """Codes times scales: what attention makes of them is too coarse to tell one good scale from another."""
    rng = np.random.default_rng(8)
    with Emulator() as device:
        rows = random_rows(rng, (2, 2, 16, 40), 48, "bfloat16")
        pool = Pool(device, (2, 16, 40), "float8_e4m3", (48,))
        pool.store([rows])
        table = pool.tables[0]
        codes = device.get(pool.cache.values, (4, 2, 16, 48), "float8_e4m3fn")[table].astype(np.float32)
        scales = device.get(pool.cache.value_scales, (4, 2, 16), "float32")[table]
    found = (codes * scales[..., None]).transpose(0, 2, 1, 3).reshape(48, 2, 48)
    assert not found[..., 40:].any()
    expected = storage.round_trip(rows.v.astype(np.float32), "float8_e4m3", keys=False)
    np.testing.assert_allclose(found[..., :40], expected, rtol=1e-6)


def test_keys_whose_errors_are_fed_back_are_those_of_the_cpu() -> None:
    rng = np.random.default_rng(9)
    shares = np.triu(rng.uniform(-0.3, 0.3, (2, 64, 64)), 1) + np.eye(64)
    feedback = shares.astype(np.float32)
    with Emulator() as device:
        rows = random_rows(rng, (2, 2, 64, 16), 20, "bfloat16")
        pool = Pool(device, (2, 64, 16), "float8_e4m3", (20,), stored=(None, None, None, None, feedback))
        pool.store([rows])
        table = pool.tables[0]
        codes = device.get(pool.cache.keys, (3, 2, 16, 64), "float8_e4m3fn")[table].astype(np.float32)
        scales = device.get(pool.cache.key_scales, (3, 2, 16), "float32")[table]
    found = (codes * scales[..., None]).transpose(0, 2, 1, 3).reshape(32, 2, 64)[:20]
    expected = storage.round_trip(rows.k.astype(np.float32), "float8_e4m3", keys=True, feedback=feedback)
    np.testing.assert_allclose(storage.rotate(found), expected, 1e-5, 1e-5)


def test_rows_that_are_not_finite() -> None:
    """A key that is no number makes NaN of the rows that see it, in caches of codes too; zeros are stored as such."""
    heads = (2, 1, 16, 16)
    rng = np.random.default_rng(6)
    for kv in ("bfloat16", "int8", "float8_e4m3"):
        with Emulator("plain") as device:
            rows = random_rows(rng, heads, 6, "bfloat16")
            rows.k[2], rows.v[2] = 0, 0
            rows.k[4, 0, 3] = np.inf if kv == "int8" else np.nan
            pool = Pool(device, heads[1:], kv, (6,))
            pool.store([rows])
            found = np.concatenate([pool.step([cut(rows, i, i + 1)])[0] for i in range(6)]).astype(np.float32)
        assert np.isfinite(found[:4]).all()
        assert np.isnan(found[4:]).any(), kv


@pytest.mark.parametrize(
    ("dtype", "kv", "dims", "dim"),
    [
        *(("bfloat16", "bfloat16", 32, 5), ("float16", "float16", 32, 5), ("bfloat16", "int8", 32, 5)),
        *(("bfloat16", "float8_e4m3", 32, 5), ("bfloat16", "bfloat16", 160, 85)),
    ],
)
def test_values_that_are_not_finite_reach_the_rows_that_see_them(dtype: str, kv: str, dims: int, dim: int) -> None:
    """Not those before them or behind the window, which are in the same tile and have the bits of finite values."""
    heads, length, window = (2, 1, 16, dims), 80, 20
    odd = {30: np.inf, 33: -np.inf, 61: np.nan}
    clean = random_rows(np.random.default_rng(7), heads, length, dtype)
    dirty = Rows(0, 0, clean.q, clean.k, clean.v.copy())
    for place, value in odd.items():
        dirty.v[place, 0, dim] = value
    with Emulator() as device:
        found = []
        for rows in (clean, dirty):
            pool = Pool(device, heads[1:], kv, (length,), attributes=PLAIN | {"window": window})
            whole = pool.step([rows])[0]  # more rows than the units of one warp have
            parts = [pool.step([cut(rows, start, start + 8)])[0] for start in (24, 40, 56)]
            same_bits(parts, np.concatenate([whole[start : start + 8] for start in (24, 40, 56)]))
            found.append(whole[:, 0].astype(np.float32))
    seen = {place: np.isin(np.arange(length), np.arange(place, place + window)) for place in odd}
    np.testing.assert_array_equal(found[0][~np.any(list(seen.values()), 0)], found[1][~np.any(list(seen.values()), 0)])
    if kv == dtype:
        assert np.isfinite(np.delete(found[1], dim, 1)).all()
        column = found[1][:, dim]
        np.testing.assert_array_equal(column[seen[30] & ~seen[33]], np.inf)
        np.testing.assert_array_equal(column[seen[33] & ~seen[30]], -np.inf)
        assert np.isnan(column[seen[30] & seen[33] | seen[61]]).all()
    else:  # a row of codes has one scale
        assert all(np.isnan(found[1][where]).all() for where in seen.values())


def test_other_dtypes_and_heads_are_refused() -> None:
    with pytest.raises(EngineError, match="a cache of int4 can't be kept on CUDA; choose one of bfloat16"):
        cuda.array_bytes(1, 64, 64, "int4", 16, 1)
    with pytest.raises(EngineError, match="heads of 576 dims have no CUDA kernels; the most are 256"):
        cuda.array_bytes(1, 576, 512, "bfloat16", 16, 1)
    assert set(cuda.KV_DTYPES) <= set(storage.KV_DTYPES)
    assert cuda.array_bytes(2, 24, 17, "int8", 16, 10) == (320 * 32, 320 * 32, 1280, 1280)


def test_what_the_sums_of_units_take_is_limited() -> None:
    assert cuda._short_rows(4, 4, 1) == 4
    assert cuda._short_rows(2048, 4, 1 << 20) == cuda.SHORT_ROWS
    assert cuda._short_rows(2048, 4, 1 << 24) == 16
    assert cuda._short_rows(2048, 71, 1 << 40) == 71


def same_bits(found: list[np.ndarray], expected: np.ndarray) -> None:
    found_bits = np.concatenate(found).view(np.uint16)
    assert found_bits.shape == expected.shape
    np.testing.assert_array_equal(found_bits, expected.view(np.uint16))
