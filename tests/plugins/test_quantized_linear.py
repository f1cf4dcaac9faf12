"""Quantized linear: what codes stand for, the same bits on every machine and in any company, and what is refused."""

import itertools
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from llmc.plugins import kernels
from llmc.plugins.quantized_linear import packing
from llmc.plugins.quantized_linear.reference import random_weight, reference

Array = NDArray[Any]
ISAS = kernels.isas()
EACH_ISA = pytest.mark.parametrize("isa", ISAS)
FORMATS = [("int8", ""), ("int8", "uint8"), ("int8", "float32"), ("int4", ""), ("int4", "uint8"), ("int4", "float32")]
EACH_FORMAT = pytest.mark.parametrize(("format", "zeros"), FORMATS)
# (outputs, inputs, group, x_group): one output, less than a group, groups that end within a line, whole rows
SHAPES = [
    (1, 5, 16, 0),
    (17, 33, 16, 16),
    (50, 300, 100, 100),
    (33, 130, 128, 64),
    (40, 1100, 0, 128),
    (96, 576, 32, 0),
    (20, 640, 0, 0),
]


def run(
    x: Array, weight: tuple[Array, Array, Array | None], isa: str = ISAS[-1], threads: int = 1, **given: Any
) -> NDArray[np.float32]:
    """The kernel's result; ``given``: the attributes, bias and x_scale."""
    codes, scale, zero = weight
    bias, x_scale = given.pop("bias", None), given.pop("x_scale", None)
    format, group = given["format"], given["group"]
    packed = packing.pack(format, group, codes)
    scales = packing.pack_scales(scale, packing.scale_dtype(scale))
    zeros = None if zero is None else packing.pack_scales(zero, zero.dtype.name)
    y = np.full((len(x), len(codes) // (2 if given.get("function") else 1)), np.nan, np.float32)
    kernels.run_op("quantized_linear", [x, packed, scales, zeros, bias, x_scale], [y], given, isa=isa, threads=threads)
    return y


def of_torch(x: Array, weight: tuple[Array, Array, Array | None], **given: Any) -> Array:
    bias, x_scale = given.pop("bias", None), given.pop("x_scale", None)
    tensors = [None if a is None else torch.from_numpy(a) for a in (x, *weight, bias, x_scale)]
    found: Array = reference(*tensors, **given).numpy()
    return found


def attributes(format: str, group: int, x_group: int = 0, compute: str = "int8") -> dict[str, Any]:
    return {"format": format, "group": group, "compute": compute, "x_group": x_group}


@EACH_FORMAT
def test_integer_products_have_the_same_bits_everywhere(format: str, zeros: str) -> None:
    """On every instruction set, for any number of rows and threads; and they are those of the reference."""
    rng = np.random.default_rng(1)
    for outputs, inputs, group, x_group in SHAPES:
        given = attributes(format, group, x_group)
        if x_group and (x_group % packing.LINE[format] and x_group != group):
            continue
        weight = random_weight(rng, outputs, inputs, format, group, zeros)
        x = rng.standard_normal((70, inputs), np.float32)
        given["bias"] = rng.standard_normal(outputs, np.float32)
        whole = run(x, weight, "scalar", **given)
        np.testing.assert_array_equal(whole, of_torch(x, weight, **given))
        for isa in ISAS:
            for rows, threads in ((70, 1), (70, 2), (2, 2), *((n, 1) for n in (1, 3, 5, 7, 9, 12, 13, 16, 17, 33))):
                found = run(x[:rows], weight, isa, threads, **given)
                np.testing.assert_array_equal(found, whole[:rows], f"{isa}, {rows} rows, {given}")


@pytest.mark.parametrize("format", ["int8", "int4"])
def test_many_long_rows_have_the_bits_of_each(format: str) -> None:
    """Rows that do not fit into a cache go in turns, and their columns in parts."""
    rng = np.random.default_rng(7)
    weight = random_weight(rng, 40, 5000, format, 128)
    x, some = rng.standard_normal((300, 5000), np.float32), [0, 31, 255, 256, 299]
    given = attributes(format, 128, 128)
    np.testing.assert_array_equal(run(x, weight, **given)[some], run(x[some], weight, "scalar", **given))


@pytest.mark.parametrize(("format", "zeros"), [("int8", ""), ("int4", ""), ("int4", "uint8")])
@pytest.mark.parametrize("group", [64, 128, 256, 512])
def test_whole_tiles_of_rows_have_the_bits_of_each(format: str, zeros: str, group: int) -> None:
    """Without a bias, results of more than half a megabyte: whole tiles go from their sums straight to memory."""
    rng = np.random.default_rng(group)
    x, some = rng.standard_normal((520, 2 * group + 64), np.float32), [0, 31, 32, 255, 511, 512, 519]
    given = attributes(format, group, group)
    for outputs in (288, 40):
        weight = random_weight(rng, outputs, x.shape[1], format, group, zeros)
        whole = run(x, weight, **given)
        np.testing.assert_array_equal(whole[some], run(x[some], weight, "scalar", **given))
        np.testing.assert_array_equal(whole[480:], run(x[480:], weight, **given))
        np.testing.assert_array_equal(whole, run(x, weight, threads=2, **given))


@EACH_ISA
@pytest.mark.parametrize(
    ("format", "compute"),
    [("int8", "bfloat16"), ("int4", "float32"), ("fp8", "bfloat16"), ("fp8", "fp8"), ("fp8", "float32")],
)
def test_a_row_has_the_same_bits_in_any_batch(isa: str, format: str, compute: str) -> None:
    rng = np.random.default_rng(2)
    for outputs, inputs, group in ((17, 100, 32), (70, 600, 0)):
        weight = random_weight(rng, outputs, inputs, format, group)
        x = rng.standard_normal((70, inputs), np.float32)
        given = attributes(format, group, 0, compute)
        whole = run(x, weight, isa, **given)
        for first, last in ((0, 1), (69, 70), (3, 5), (1, 8), (20, 36), (5, 38), (0, 70)):
            for threads in (1, 2):
                np.testing.assert_array_equal(run(x[first:last], weight, isa, threads, **given), whole[first:last])


@EACH_ISA
@pytest.mark.parametrize(("format", "compute"), [("int4", "int8"), ("int8", "float32"), ("fp8", "bfloat16")])
def test_a_gated_product_has_the_bits_of_a_product_and_a_glu(isa: str, format: str, compute: str) -> None:
    rng = np.random.default_rng(4)
    for rows, width, inner in ((1, 64, 40), (3, 300, 33), (16, 37, 64), (17, 144, 70), (600, 90, 64)):
        weight = random_weight(rng, 2 * width, inner, format, 32)
        x = rng.standard_normal((rows, inner), np.float32)
        given = attributes(format, 32, compute=compute) | {"bias": rng.standard_normal(2 * width, np.float32)}
        product = run(x, weight, isa, **given)
        expected = np.empty((rows, width), np.float32)
        kernels.run_op("glu", [product[:, :width], product[:, width:]], [expected], {"function": "silu"}, isa=isa)
        for threads in (1, 2, 3):
            found = run(x, weight, isa, threads, **given, function="silu")
            np.testing.assert_array_equal(found, expected, f"{rows} rows, {width} columns, {threads} threads")


@pytest.mark.parametrize("compute", ["float32", "bfloat16", "int8"])
@EACH_FORMAT
def test_errors_are_those_of_rounding_x(format: str, zeros: str, compute: str) -> None:
    """Normalised mean squared error against the float product with the numbers that the codes stand for."""
    rng = np.random.default_rng(3)
    weight = random_weight(rng, 64, 512, format, 64, zeros)
    x = rng.standard_normal((16, 512), np.float32)
    exact = x.astype(np.float64) @ packing.dequantize(format, 64, *weight).astype(np.float64).T
    found = run(x, weight, **attributes(format, 64, 64 if compute == "int8" else 0, compute))
    error = np.sum((found - exact) ** 2) / np.sum(exact**2)
    bound = {"float32": 1e-11, "bfloat16": 1e-5, "int8": 1e-4}[compute]
    assert error < bound


@EACH_ISA
def test_fp8_rounds_x_to_e4m3(isa: str) -> None:
    rng = np.random.default_rng(4)
    weight = random_weight(rng, 40, 300, "fp8", 0)
    x = rng.standard_normal((9, 300), np.float32) * np.exp(3 * rng.standard_normal((9, 300), np.float32))
    inverse = np.float32(448) / np.abs(x).max(1, keepdims=True)
    rounded = (x * inverse).astype(ml_dtypes.float8_e4m3fn).astype(np.float64)
    exact = (
        rounded @ packing.dequantize("fp8", 0, *weight).astype(np.float64).T * (np.abs(x).max(1, keepdims=True) / 448)
    )
    found = run(x, weight, isa, **attributes("fp8", 0, 0, "fp8"))
    np.testing.assert_allclose(found, exact, 1e-4, 1e-5 * np.abs(exact).max())


@EACH_ISA
@pytest.mark.parametrize(
    ("format", "compute"), [("int4", "int8"), ("int8", "bfloat16"), ("fp8", "fp8"), ("int8", "float32")]
)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_bad_row_stays_alone(isa: str, format: str, compute: str, bad: float) -> None:
    rng = np.random.default_rng(5)
    weight = random_weight(rng, 33, 200, format, 100)
    x = rng.standard_normal((20, 200), np.float32)
    given = attributes(format, 100, 0, compute)
    clean = run(x, weight, isa, **given)
    x[7, 150], x[19, 0] = bad, bad
    for count in (20, 8):
        found = run(x[:count], weight, isa, **given)
        good = [row for row in range(count) if row not in (7, 19)]
        np.testing.assert_array_equal(found[good], clean[good])
        assert not np.isfinite(found[7]).any()


@EACH_ISA
def test_nothing_and_almost_nothing(isa: str) -> None:
    """Rows of zeros, of the smallest numbers, and of the largest."""
    weight = random_weight(np.random.default_rng(6), 20, 64, "int4", 32)
    x = np.zeros((4, 64), np.float32)
    x[1], x[2], x[3, 5] = 1e-42, 1e-38, 3e38
    found = run(x, weight, isa, **attributes("int4", 32, 32))
    assert (found[:2] == 0).all()
    assert (np.abs(found[2]) < 1e-36).all()
    np.testing.assert_array_equal(found, of_torch(x, weight, **attributes("int4", 32, 32)))


@EACH_ISA
def test_mth_08_scales_and_zeros(isa: str) -> None:
    """Scales from 0.01 to 0.1 and zeros from 0 to 15, so that neither can stand for the other."""
    rng = np.random.default_rng(8)
    codes = rng.integers(0, 16, (48, 256), np.uint8)
    scale = np.linspace(0.01, 0.1, 48 * 8, dtype=np.float32).reshape(48, 8)
    zero = rng.permutation(np.arange(48 * 8) % 16).reshape(48, 8).astype(np.uint8)
    x = rng.standard_normal((3, 256), np.float32)
    spread = [np.repeat(values, 32, axis=1).astype(np.float64) for values in (scale, zero)]
    expected = x @ ((codes - spread[1]) * spread[0]).T
    found = run(x, (codes, scale, zero), isa, **attributes("int4", 32, 32))
    assert np.abs(found - expected).max() < 1e-2 * np.abs(expected).max()


@EACH_ISA
def test_rows_may_be_strided(isa: str) -> None:
    rng = np.random.default_rng(7)
    weight = random_weight(rng, 40, 50, "int4", 16)
    x, wide, out = (
        rng.standard_normal((9, 50), np.float32),
        np.full((9, 200), np.nan, np.float32),
        np.full((9, 100), 7.0),
    )
    out = out.astype(np.float32)
    wide[:, 30:80] = x
    given = attributes("int4", 16, 16)
    packed, scales = packing.pack("int4", 16, weight[0]), packing.pack_scales(weight[1], "float32")
    kernels.run_op("quantized_linear", [wide[:, 30:80], packed, scales], [out[:, 11:51]], given, isa=isa)
    np.testing.assert_array_equal(out[:, 11:51], run(x, weight, isa, **given))
    assert (out[:, :11] == 7).all()
    assert (out[:, 51:] == 7).all()


@EACH_ISA
@pytest.mark.parametrize("point", [None, -30.0, 128.0])
def test_a_given_scale_cuts(isa: str, point: float | None) -> None:
    """The zero point moves codes of columns that there are, and no others; 37 columns fill no line."""
    weight = random_weight(np.random.default_rng(8), 16, 37, "int8", 0)
    x = np.linspace(-9, 9, 111, dtype=np.float32).reshape(3, 37)
    scale = np.array([0.05, point or 0.0], np.float32)
    given = attributes("int8", 0) | {"x_scale": scale[: 1 if point is None else 2]}
    q = np.clip(np.round(x / np.float32(0.05) + scale[1]), -128, 127)
    exact = (q @ (weight[0].astype(np.float64) - 128).T) * (weight[1].T.astype(np.float64) * np.float32(0.05))
    np.testing.assert_allclose(run(x, weight, isa, **given), exact, 1e-6, 1e-6)


def test_wrong_arguments_are_refused_before_anything_is_written() -> None:
    rng = np.random.default_rng(9)
    codes, scale, _ = random_weight(rng, 20, 48, "int4", 16)
    x, packed, scales = (
        rng.standard_normal((2, 48), np.float32),
        packing.pack("int4", 16, codes),
        packing.pack_scales(scale, "float32"),
    )
    zero, good, one = np.zeros_like(scales), attributes("int4", 16, 16), np.ones(1, np.float32)
    x_scale = [x, packed, scales, None, None, one]
    for inputs, changed, message in (
        ([x, codes, scales], {}, "not packed"),
        ([x, packed.view(np.int8).astype(np.int32), scales], {}, "must be uint8"),
        ([x[:, :40].copy(), packed, scales], {}, "not packed"),
        ([x, packed, scales[:, :2].copy()], {}, "scale must be"),
        ([x, packed, scales.astype(np.int32)], {}, "scale must be"),
        ([x, packed, scales, zero[:1]], {}, "zero must be"),
        ([x, packed, scales, zero.astype(np.float16)], {}, "zero must be"),
        ([x, packed, scales, None, one], {}, r"bias must be float32 \[N\]"),
        ([x.astype(np.int32), packed, scales], {}, r"x must be float32 \[M, K\]"),
        ([x, packed, scales], {"format": "int5"}, "no quantized format 'int5'; choose one of int8, int4, fp8"),
        ([x, packed, scales], {"compute": "fp8"}, "can't be computed as 'fp8'; choose one of int8"),
        ([x, packed, scales], {"compute": "float32"}, "x_group must be 0"),
        ([x, packed, scales], {"x_group": 12}, "must divide the group"),
        ([x, packed, scales], {"x_group": 4}, "multiple of the columns of a line"),
        ([x, packed, scales], {"group": -1}, "must be numbers of columns"),
        ([x, packed], {}, "takes x, weight, scale"),
        (x_scale, {}, "x_scale is for the whole"),
        (x_scale, {"compute": "bfloat16", "x_group": 0}, "x_scale is for the whole"),
        ([*x_scale[:5], np.ones(3, np.float32)], {"x_group": 0}, "x_scale must be one or two"),
    ):
        y = np.full((2, 20), 7, np.float32)
        with pytest.raises(kernels.KernelError, match=message):
            kernels.run_op("quantized_linear", inputs, [y], good | changed)
        assert (y == 7).all()


def test_the_reference_refuses_what_kernels_refuse() -> None:
    weight = random_weight(np.random.default_rng(0), 4, 32, "int4", 16)
    x = np.ones((1, 32), np.float32)
    for changed in ({"compute": "fp8"}, {"x_group": 4}, {"x_group": 12}, {"compute": "float32", "x_group": 16}):
        with pytest.raises(kernels.KernelError):
            of_torch(x, weight, **attributes("int4", 16, 16) | changed)


@pytest.mark.parametrize("format", packing.LINE)
@pytest.mark.parametrize(
    ("rows", "columns", "group"), [(16, 64, 32), (1, 1, 16), (33, 50, 10), (20, 300, 128), (7, 9, 0)]
)
def test_packing_round_trips(format: str, rows: int, columns: int, group: int) -> None:
    rng = np.random.default_rng(rows)
    codes, scale, zero = random_weight(rng, rows, columns, format, group, "" if format == "fp8" else "uint8")
    packed = packing.pack(format, group, codes)
    assert packed.shape == packing.packed_shape(format, rows, columns, group)
    np.testing.assert_array_equal(packing.unpack(format, group, packed, rows, columns), codes)
    pieces = list(packing.pack_stream(lambda a, b: codes[a:b], format, group, rows, columns, 1))
    assert len(pieces) == -(-rows // 16)
    np.testing.assert_array_equal(np.concatenate(pieces), packed)
    scales = packing.pack_scales(scale, "float32")
    assert scales.shape == packing.scale_shape(rows, columns, group)
    np.testing.assert_array_equal(packing.unpack_scales(scales, rows), scale)
    zeros = None if zero is None else packing.pack_scales(zero, "uint8")
    ids = rng.integers(0, rows, (2, 5))
    found = packing.dequantize_rows(format, group, packed, scales, zeros, ids, columns)
    np.testing.assert_array_equal(found, packing.dequantize(format, group, codes, scale, zero)[ids])


def test_every_code_is_where_the_layout_says() -> None:
    codes = np.random.default_rng(0).integers(0, 16, (17, 21), np.uint8)
    packed = packing.pack("int4", 10, codes)
    assert packed.shape == (2, 5, 16, 4)  # groups of 10, 10 and 1 columns: 2, 2 and 1 lines
    starts = (0, 2, 4)
    for row, column in itertools.product(range(17), range(21)):
        within = column % 10
        byte = int(packed[row // 16, starts[column // 10] + within // 8, row % 16, within % 4])
        assert (byte >> 4 if within % 8 > 3 else byte & 15) == codes[row, column]


def test_every_code_stands_for_what_its_format_says() -> None:
    every = np.arange(256, dtype=np.uint8)[None]
    half = np.full((1, 1), 0.5, np.float32)
    np.testing.assert_array_equal(packing.dequantize("int8", 0, every, half, None)[0], (np.arange(256) - 128) / 2)
    zero = np.array([[3]], np.uint8)
    np.testing.assert_array_equal(packing.dequantize("int4", 0, every[:, :16], half, zero)[0], (np.arange(16) - 3) / 2)
    offset = np.array([[0.25]], np.float32)
    np.testing.assert_array_equal(
        packing.dequantize("int4", 0, every[:, :16], half, offset)[0], np.arange(16) / 2 + 0.25
    )
    numbers = every.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    np.testing.assert_array_equal(packing.dequantize("fp8", 0, every, half, None), numbers / 2)


@EACH_ISA
def test_kernels_know_every_fp8_number(isa: str) -> None:
    codes = np.array([c for c in range(256) if c & 0x7F != 0x7F], np.uint8)[:, None]
    weight = (codes, np.ones((len(codes), 1), np.float32), None)
    for compute in ("float32", "bfloat16"):
        found = run(np.ones((1, 1), np.float32), weight, isa, **attributes("fp8", 0, 0, compute))
        np.testing.assert_array_equal(found[0], codes[:, 0].view(ml_dtypes.float8_e4m3fn).astype(np.float32))


def test_what_can_not_be_packed() -> None:
    codes = np.zeros((4, 8), np.uint8)
    for call, message in (
        (lambda: packing.pack("int3", 16, codes), "no quantized format 'int3'"),
        (lambda: packing.pack("int4", -1, codes), "a group of -1 columns"),
        (lambda: packing.pack("int4", 16, codes.astype(np.int8)), "must be uint8"),
        (lambda: packing.pack("int4", 16, codes + 16), "0 to 15, found 16"),
        (lambda: packing.pack("fp8", 16, codes + 0x7F), "code is NaN"),
        (lambda: packing.pack_scales(np.full((4, 1), 1e9, np.float32), "float16"), "not all float16"),
        (lambda: packing.pack_scales(np.full((4, 1), np.nan, np.float32), "float32"), "not finite"),
        (lambda: packing.pack_scales(np.zeros(4, np.float32), "float32"), r"\[rows, G\]"),
    ):
        with pytest.raises(kernels.KernelError, match=message):
            call()
    assert packing.scale_dtype(np.array([[0.5, 65504.0]], np.float32)) == "float16"
    assert packing.scale_dtype(np.array([[0.1]], np.float32)) == "float32"


def test_blocks_cover_the_columns_in_order() -> None:
    for columns, group, x_group in (
        (1, 16, 0),
        (1100, 0, 0),
        (1100, 0, 128),
        (300, 100, 50),
        (300, 128, 0),
        (64, 16, 128),
    ):
        found = packing.blocks(columns, group, x_group)
        assert [block.begin for block in found] == [0, *(block.end for block in found[:-1])]
        assert found[-1].end == columns
        for block in found:
            assert block.end - block.begin <= packing.BLOCK
            assert not group or (block.end - 1) // group == block.begin // group == block.group
            assert not 0 < x_group < columns or (block.end - 1) // x_group == block.begin // x_group
