"""What keys and values are stored as: numbers, bytes, and what is not finite."""

import itertools

import ml_dtypes
import numpy as np
import pytest
from attention_cache import Cache, Rows, Shape, sequence

from llmc.errors import KernelError
from llmc.plugins import kernels
from llmc.plugins.paged_attention.storage import KV_DTYPES, QUANTIZED, bytes_per_position, rotate, round_trip

DIMS = (1, 7, 8, 16, 31, 40, 64, 80, 96, 100, 128, 192, 256)


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape, dtype=np.float32)


@pytest.mark.parametrize("dims", DIMS)
def test_rotation_keeps_products_and_is_its_own_inverse(dims: int) -> None:
    x, y = normal(2, 5, dims)
    np.testing.assert_allclose((rotate(x) * rotate(y)).sum(-1), (x * y).sum(-1), 1e-4, 1e-5)
    np.testing.assert_allclose(rotate(rotate(x)), x, 1e-5, 1e-6)


def test_rotation_is_hadamards_matrix_by_blocks() -> None:
    signs = [[(-1) ** bin(i & j).count("1") for j in range(4)] for i in range(4)]
    expected = np.zeros((7, 7))
    expected[:4, :4] = np.array(signs) / 2
    expected[4:6, 4:6] = np.array([[1, 1], [1, -1]]) / np.sqrt(2)
    expected[6, 6] = 1
    np.testing.assert_allclose(rotate(np.eye(7, dtype=np.float32)), expected, 1e-6)


@pytest.mark.parametrize("dims", DIMS)
@pytest.mark.parametrize("keys", [True, False], ids=["keys", "values"])
def test_errors_are_at_most_half_a_step(dims: int, keys: bool) -> None:
    x = normal(50, 3, dims) * 10 ** normal(50, 3, 1)
    turn = rotate if keys else lambda y: y
    spread, largest = turn(x), np.abs(turn(x)).max(-1, keepdims=True)
    assert (np.abs(turn(round_trip(x, "int8", keys=keys)) - spread) <= largest / 127 * 0.501).all()
    half = np.maximum(np.abs(spread) / 16, largest / 448 * 2.0**-10)
    found = turn(round_trip(x, "float8_e4m3", keys=keys))
    np.testing.assert_allclose((found * spread).sum(-1), (spread * spread).sum(-1), 1e-5)  # no error along the row
    assert (np.abs(found - spread) <= half + np.abs(spread) / 16 + largest * 1e-6).all()
    spread, back = rotate(x), rotate(round_trip(x, "int4", keys=keys))
    for start in range(0, dims, 64):
        part = np.s_[..., start : start + 64]
        low, high = spread[part].min(-1, keepdims=True), spread[part].max(-1, keepdims=True)
        step = (high - low) / (31 if keys else 15)
        room = np.maximum(np.abs(low), high) * 2.0**-10  # of rounding the least value and 15 or 31 steps to float16
        assert (np.abs(back[part] - spread[part]) <= step * 0.51 + 2 * room + 1e-7).all()


def test_rows_of_fp8_get_the_scale_that_suits_them() -> None:
    """With the largest number at 448 they err by 2.5 %."""
    x = normal(500, 64)
    errors = np.linalg.norm(round_trip(x, "float8_e4m3", keys=False) - x, axis=-1) / np.linalg.norm(x, axis=-1)
    assert errors.mean() < 0.0218


@pytest.mark.parametrize("dtype", KV_DTYPES)
def test_numbers_that_each_type_has_come_back(dtype: str) -> None:
    x = np.zeros((3, 16), np.float32)
    x[1, 3], x[2] = 1.5, -2.0
    for keys in (False, True):
        np.testing.assert_allclose(round_trip(x, dtype, keys=keys), x, 1e-2, 1e-3)
    assert not round_trip(x * 1e-38, dtype, keys=False).any() or dtype in ("float32", "bfloat16")


@pytest.mark.parametrize("dtype", QUANTIZED)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_spoils_its_row_and_no_other(dtype: str, bad: float) -> None:
    x = normal(3, 40)
    x[1, 7] = bad
    for keys in (False, True):
        found = round_trip(x, dtype, keys=keys)
        assert np.isnan(found[1]).all() and np.isfinite(found[[0, 2]]).all()
    assert np.isnan(round_trip(np.full((1, 8), 1e38, np.float32), "int4", keys=False)).all()  # beyond float16


def test_types_that_there_are_not_are_named_with_those_that_there_are() -> None:
    with pytest.raises(KernelError, match="'int3'; known: float32, bfloat16, float16, float8_e4m3, int8, int4"):
        kernels.Kv([(1, 8, 8)], "int3", 16, 1)
    with pytest.raises(ValueError, match="int3"):
        round_trip(normal(1, 8), "int3", keys=True)


@pytest.mark.parametrize("dtype", KV_DTYPES)
@pytest.mark.parametrize(("key_dim", "value_dim"), [(64, 64), (192, 128), (7, 5), (40, 72), (128, 256)])
def test_sizes_are_those_of_the_native_cache(dtype: str, key_dim: int, value_dim: int) -> None:
    kv = kernels.Kv([(3, key_dim, value_dim)], dtype, 32, 2)
    expected = 2 * 32 * 3 * bytes_per_position(dtype, key_dim, value_dim)
    assert kv.keys(0).nbytes + kv.values(0).nbytes == expected


def test_bytes_of_a_head() -> None:
    sizes = {dtype: bytes_per_position(dtype, 128, 128) for dtype in KV_DTYPES}
    assert sizes == {"float32": 1024, "bfloat16": 512, "float16": 512, "float8_e4m3": 264, "int8": 264, "int4": 160}


@pytest.mark.parametrize("isa", kernels.isas())
@pytest.mark.parametrize("keys", [True, False], ids=["keys", "values"])
@pytest.mark.parametrize("dims", [16, 40, 100])
def test_kernels_store_the_codes_that_are_meant(dims: int, keys: bool, isa: str) -> None:
    """int8 and E4M3 bit by bit; int4 where the numbers come from."""
    shape, rows = Shape(1, 1, dims, dims), 13
    s = sequence(np.random.default_rng(1), shape, rows)
    s.k[3], s.v[3] = 0, 0
    s.k[4], s.v[4] = s.k[4] * 1e30, s.v[4] * 1e30
    s.k[5], s.v[5] = s.k[5] * 1e-28, s.v[5] * 1e-28
    x = (s.k if keys else s.v)[:, 0]
    center, scale = (np.random.default_rng(2).uniform(0.5, 2, (1, dims)).astype(np.float32) for _ in range(2))
    for dtype, moved in itertools.product(("int8", "float8_e4m3"), (False, True)):
        cache = Cache(shape, dtype, [rows])
        cache.step([(0, s, 0, rows)], isa=isa, stored=(center, scale) * 2 if moved else ())
        page = (cache.kv.keys(0) if keys else cache.kv.values(0))[cache.tables[0, 0]]
        codes = page[: 16 * dims].reshape(dims, 16).T if keys else page[: 16 * dims].reshape(16, dims)
        scales = page[16 * dims :].view(np.float32)
        numbers = codes.view(np.int8 if dtype == "int8" else ml_dtypes.float8_e4m3fn).astype(np.float32)
        found = numbers[:rows] * scales[:rows, None]
        found = rotate(found) if keys else found
        np.testing.assert_array_equal(found, round_trip((x - center) * scale if moved else x, dtype, keys=keys))


def feedback_of(heads: int, dims: int) -> np.ndarray:
    """Such as queries make that are much alike."""
    moments = [np.cov(q.T) + 0.1 * np.eye(dims) for q in (normal(heads, 50, dims) + 2) @ normal(dims, dims)]
    factors = [np.linalg.cholesky(np.linalg.inv(m)).T for m in moments]
    return np.stack([np.triu(f / f.diagonal()[:, None]) for f in factors]).astype(np.float32)


@pytest.mark.parametrize("isa", kernels.isas())
@pytest.mark.parametrize("dims", [1, 16, 40, 100, 256])
def test_kernels_feed_errors_back_bit_by_bit(dims: int, isa: str) -> None:
    """However many keys are stored side by side; rows of zeros and with a number that is not finite among them."""
    shape, rows = Shape(3, 3, dims, 8), 23
    s = sequence(np.random.default_rng(1), shape, rows)
    s.k[3] = 0
    s.k[5] *= 1e-28
    s.k[6, 1, 0] = np.inf
    feedback = feedback_of(3, dims)
    expected = round_trip(s.k, "float8_e4m3", keys=True, feedback=feedback)
    assert dims == 1 or (expected != round_trip(s.k, "float8_e4m3", keys=True)).any()
    for bounds in ((0, rows), (0, 1, 3, 17, rows)):
        cache = Cache(shape, "float8_e4m3", [rows])
        for start, stop in itertools.pairwise(bounds):
            cache.step([(0, s, start, stop)], isa=isa, stored=(None,) * 4 + (feedback,), threads=2)
        found = np.empty_like(s.k)
        for row, head in np.ndindex(rows, 3):
            block = cache.kv.keys(0)[cache.tables[0, row // 16]].reshape(3, -1)[head]
            codes = np.ascontiguousarray(block[: 16 * dims].reshape(dims, 16)[:, row % 16])
            scale = block[16 * dims :].view(np.float32)[row % 16]
            found[row, head] = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32) * scale
        np.testing.assert_array_equal(rotate(found), expected)


def test_errors_that_are_fed_back_are_where_queries_are_not() -> None:
    """Queries of few directions; E4M3 then errs less than half as much in the scores."""
    directions = rotate(normal(8, 64))
    q, k = normal(400, 8) @ directions, np.random.default_rng(3).standard_normal((300, 1, 64), np.float32)
    moments = rotate(rotate(q.T @ q / len(q)).T).astype(np.float64)
    factor = np.linalg.cholesky(np.linalg.inv(moments + 0.01 * np.trace(moments) / 64 * np.eye(64))).T
    feedback = np.triu(factor / factor.diagonal()[:, None])[None].astype(np.float32)

    def error(given: np.ndarray | None) -> float:
        return float((((round_trip(k, "float8_e4m3", keys=True, feedback=given) - k) @ q.T) ** 2).mean())

    assert error(feedback) < 0.25 * error(None)


@pytest.mark.parametrize("isa", kernels.isas())
@pytest.mark.parametrize("dtype", KV_DTYPES)
@pytest.mark.parametrize("name", ["k", "v"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_keys_and_values_that_are_not_finite_show(dtype: str, isa: str, name: str, bad: float) -> None:
    """MTH-13: never a silent zero. On the levels below amx, rows that do not see them stay as they are."""
    shape, rows = Shape(4, 2, 24, 16), 40
    s = sequence(np.random.default_rng(2), shape, rows)
    clean = Cache(shape, dtype, [rows]).step([(0, s, 0, rows)], isa=isa)
    spoiled = Rows(s.q, s.k.copy(), s.v.copy())
    getattr(spoiled, name)[20, 1, 3] = bad
    found = Cache(shape, dtype, [rows]).step([(0, spoiled, 0, rows)], isa=isa)
    sees = found[20:, 2:]
    if dtype in QUANTIZED:
        assert np.isnan(sees).all()
    elif name == "v":
        assert not np.isfinite(sees).all(-1).any()
    if dtype in QUANTIZED or isa != "amx":
        np.testing.assert_array_equal(found[:20], clean[:20])
        np.testing.assert_array_equal(found[20:, :2], clean[20:, :2])


@pytest.mark.parametrize("dtype", KV_DTYPES)
@pytest.mark.parametrize("shape", [Shape(2, 1, 7, 5), Shape(4, 2, 70, 33)], ids=str)
def test_positions_that_move_keep_their_bits(dtype: str, shape: Shape) -> None:
    """Scales included, across pages and blocks, and nothing else changes."""
    rng = np.random.default_rng(2)
    rows = sequence(rng, shape, 41)
    moves = [(17, 14), (18, 15), (33, 16), (40, 17)]
    order = list(range(41))
    for source, target in moves:
        order[target] = source
    moved = Rows(rows.q, rows.k[order], rows.v[order])
    expected, found = (Cache(shape, dtype, [41], block=32) for _ in range(2))
    expected.step([(0, moved, 0, 41)])
    found.step([(0, rows, 0, 41)])
    sources, targets = np.array(moves, np.int32).T.copy()
    found.kv.move_positions(found.tables[0], sources, targets)
    for name in ("keys", "values"):
        assert np.array_equal(
            getattr(found.kv, name)(0).view(np.uint8), getattr(expected.kv, name)(0).view(np.uint8)
        ), name
    with pytest.raises(KernelError, match="in none of the blocks"):
        found.kv.move_positions(found.tables[0], targets, np.array([0, 1, 2, 64], np.int32))
    with pytest.raises(KernelError, match="not one of the cache's"):
        found.kv.move_positions(np.array([99, 0], np.int32), sources, targets)
