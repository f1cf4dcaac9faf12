"""Views of quantized weights: those that move rows keep the codes, and every number stays what it was."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from llmc.compiler.quantized_views import common_scheme, dequantized, find_quantized, quantized_parts, recast
from llmc.compiler.quantized_weights import Plain, QuantizedSource, describe, grouped, is_quantized
from llmc.compiler.weights import Array, Cast, Concat, Reshape, Slice, Stack, Transpose, WeightSource, read
from llmc.quantization.base import Scheme

BITS = {"int4": 4, "int8": 8}


def weight(
    rows: int = 12, columns: int = 40, format: str = "int4", group: int = 16, zero: str | None = None, seed: int = 0
) -> QuantizedSource:
    random = np.random.default_rng(seed)
    count = -(-columns // group) if group else 1
    top = 1 << BITS.get(format, 6)
    codes = Array(random.integers(0, top, (rows, columns)).astype(np.uint8))
    scale = Array(random.uniform(0.1, 1, (rows, count)).astype(np.float16))
    zeros = {
        None: None,
        "uint8": Array(random.integers(0, top, (rows, count)).astype(np.uint8)),
        "float32": Array(random.normal(size=(rows, count)).astype(np.float32)),
    }[zero]
    found = grouped(codes, scale, zeros, format, group, (rows, columns), "float32")
    assert is_quantized(found)
    return found


VIEWS: dict[str, tuple[Callable[[], WeightSource], Callable[[], NDArray[np.float32]]]] = {
    "itself": (weight, lambda: read(weight())),
    "cast": (lambda: Cast(weight(), "bfloat16"), lambda: read(weight())),
    "joined": (
        lambda: Concat((weight(seed=1), weight(4, seed=2))),
        lambda: np.concatenate([read(weight(seed=1)), read(weight(4, seed=2))]),
    ),
    "cut": (lambda: Slice(weight(), (slice(3, 11, 2),)), lambda: read(weight())[3:11:2]),
    "reversed": (lambda: Slice(weight(), (slice(None, None, -1), slice(None))), lambda: read(weight())[::-1]),
    "stacked": (
        lambda: Stack((weight(seed=1), weight(seed=2))),
        lambda: np.stack([read(weight(seed=1)), read(weight(seed=2))]),
    ),
    "reshaped": (lambda: Reshape(weight(), (3, 4, 40)), lambda: read(weight()).reshape(3, 4, 40)),
    "turned twice": (lambda: Transpose(Transpose(weight(), (1, 0)), (1, 0)), lambda: read(weight())),
    "turned in the middle": (
        lambda: Transpose(Slice(Transpose(weight(), (1, 0)), (slice(None), slice(2, 9))), (1, 0)),
        lambda: read(weight())[2:9],
    ),
    "halves of experts": (
        lambda: Slice(Reshape(weight(), (2, 6, 40)), (slice(None), slice(3, 6))),
        lambda: read(weight()).reshape(2, 6, 40)[:, 3:],
    ),
    "experts joined": (
        lambda: Concat((Reshape(weight(seed=1), (2, 6, 40)), Reshape(weight(8, seed=2), (2, 4, 40))), 1),
        lambda: np.concatenate([read(weight(seed=1)).reshape(2, 6, 40), read(weight(8, seed=2)).reshape(2, 4, 40)], 1),
    ),
}


@pytest.mark.parametrize("name", VIEWS)
def test_rows_are_moved(name: str) -> None:
    view, expected = (make() for make in VIEWS[name])
    found = find_quantized(view)
    assert found is not None
    assert found.shape == view.shape == expected.shape
    flat = expected.reshape(-1, expected.shape[-1])
    for start, stop in ((0, len(flat)), (1, 3), (2, 2)):
        rows = found.quantized_rows(start, stop)
        np.testing.assert_array_equal(rows.dequantize(), flat[start:stop])
        scale, zero = found.scale_rows(start, stop)
        np.testing.assert_array_equal(scale, rows.scale)
        assert zero is None
    np.testing.assert_array_equal(found.rows(0, found.shape[0]), expected)
    assert found.scale_dtype == "float16"


@pytest.mark.parametrize(
    "view",
    [
        lambda: Transpose(weight(), (1, 0)),
        lambda: Slice(weight(), (slice(None), slice(0, 16))),
        lambda: Reshape(weight(), (24, 20)),
        lambda: Concat((weight(), weight()), 1),
        lambda: Concat((weight(), Array(np.zeros((3, 40), np.float32)))),
        lambda: Plain(weight()),
        lambda: Array(np.zeros((3, 40), np.float32)),
        lambda: Concat((weight(), weight(zero="float32"))),
        lambda: Concat((weight(), weight(format="fp8"))),
    ],
)
def test_columns_that_are_moved_and_forms_that_do_not_fit(view: Callable[[], WeightSource]) -> None:
    assert find_quantized(view()) is None


@pytest.mark.parametrize(
    ("parts", "form"),
    [
        ([weight(), weight(zero="uint8")], ("int4", 16, "uint8")),
        ([weight(), weight(format="int8")], ("int8", 16, None)),
        ([weight(zero="uint8"), weight(format="int8")], ("int8", 16, "uint8")),
        ([weight(group=32), weight(group=16)], ("int4", 16, None)),
        ([weight(group=0), weight(group=32, zero="uint8")], ("int4", 32, "uint8")),
        ([weight(group=0, format="fp8"), weight(group=32, format="fp8")], ("fp8", 32, None)),
        ([weight(zero="float32"), weight(zero="float32", format="int8", group=32)], ("int8", 16, "float32")),
    ],
)
def test_forms_that_hold_both_exactly(parts: list[QuantizedSource], form: tuple[str, int, str | None]) -> None:
    view = Concat(tuple(parts))
    found = find_quantized(view)
    assert found is not None
    assert (found.scheme.format, found.scheme.group, found.zero) == form
    np.testing.assert_array_equal(found.quantized_rows(0, 24).dequantize(), read(view))
    np.testing.assert_array_equal(found.quantized_rows(9, 14).dequantize(), read(view)[9:14])


def test_parts_that_are_cut_off_do_not_matter() -> None:
    """Rows of one part are in its own form, whatever the others are."""
    parts = [weight(seed=1), weight(seed=2, format="int8", zero="uint8"), weight(seed=3)]
    view = Slice(Concat(tuple(parts)), (slice(14, 20),))
    found = find_quantized(view)
    assert found is not None
    assert (found.scheme.format, found.zero) == ("int8", "uint8")
    np.testing.assert_array_equal(found.quantized_rows(1, 5).dequantize(), read(parts[1])[3:7])
    outer = find_quantized(Slice(Concat(tuple(parts)), (slice(6, None, 24),)))
    assert outer is not None
    assert (outer.scheme.format, outer.zero) == ("int4", None)
    np.testing.assert_array_equal(
        outer.quantized_rows(0, 2).dequantize(), np.stack([read(parts[0])[6], read(parts[2])[6]])
    )


def test_recast() -> None:
    small, large = weight(group=32, zero="uint8"), weight(format="int8", group=16)
    scheme = common_scheme([small, large])
    assert scheme == Scheme("int8", 16)
    wide = recast(small, scheme)
    assert (wide.scheme, wide.zero) == (Scheme("int8", 16, False), "uint8")
    np.testing.assert_array_equal(wide.quantized_rows(0, 12).dequantize(), read(small))
    assert recast(large, scheme) is large


def test_rows_that_are_far_apart_are_read_piece_by_piece() -> None:
    """Not the whole range that holds them."""
    source = weight(rows=400)
    asked: list[tuple[int, int]] = []

    class Watched:
        shape, dtype, nbytes, scheme = source.shape, source.dtype, source.nbytes, source.scheme
        zero, scale_dtype, rows, scale_rows = source.zero, source.scale_dtype, source.rows, source.scale_rows
        order = None

        def quantized_rows(self, start: int, stop: int) -> object:
            asked.append((start, stop))
            return source.quantized_rows(start, stop)

    found = find_quantized(Slice(Watched(), (slice(0, 400, 100),)))  # type: ignore[arg-type]
    assert found is not None
    np.testing.assert_array_equal(found.quantized_rows(0, 4).dequantize(), read(source)[::100])
    assert asked == [(0, 1), (100, 101), (200, 201), (300, 301)]


def ordered(seed: int, shift: int) -> QuantizedSource:
    """Two groups of 16 columns, moved by some places."""
    random = np.random.default_rng(seed)
    codes, scale = random.integers(0, 16, (5, 32)).astype(np.uint8), random.uniform(0.1, 1, (5, 2)).astype(np.float16)
    places = np.roll(np.arange(32), shift)
    found = grouped(Array(codes), Array(scale), None, "int4", 16, (5, 32), "float32", places)
    assert is_quantized(found)
    return found


def test_columns_in_act_order() -> None:
    """Rows are quantized in the order of the groups, numbers come in that of the columns; orders are not mixed."""
    both = Concat((ordered(1, 5), ordered(2, 5)))
    found = find_quantized(both)
    assert found is not None
    assert found.order is not None
    np.testing.assert_array_equal(found.quantized_rows(0, 10).dequantize(), read(both)[:, found.order])
    np.testing.assert_array_equal(found.rows(3, 8), read(both)[3:8])
    assert find_quantized(Concat((ordered(1, 5), ordered(2, 6)))) is None
    assert describe(found) == "int4 in groups of 16 in act-order"


def test_sizes_of_groups_that_the_engine_lacks() -> None:
    codes, scale = Array(np.zeros((4, 40), np.uint8)), Array(np.ones((4, 2), np.float32))
    odd = grouped(codes, scale, None, "int4", 20, (4, 40), "float32")
    assert not is_quantized(odd)
    np.testing.assert_array_equal(read(odd), np.full((4, 40), -8, np.float32))


def test_what_people_read() -> None:
    assert describe(weight(zero="uint8")) == "int4 in groups of 16 with zero points"
    assert describe(weight(format="int8", group=0)) == "int8 by row"
    assert describe(weight(zero="float32")) == "int4 in groups of 16 with offsets"


def test_dequantized() -> None:
    turned = Transpose(weight(), (1, 0))
    assert quantized_parts(turned)
    assert not quantized_parts(dequantized(turned))
    np.testing.assert_array_equal(read(dequantized(turned)), read(turned))
    plain = Array(np.zeros(3, np.float32))
    assert dequantized(plain) is plain
