"""Linear: the reference against plain sums, and of each kernel the bits of a row in any company."""

import ml_dtypes
import numpy as np
import pytest
import torch

from llmc.plugins import kernels
from llmc.plugins.linear.packing import pack
from llmc.plugins.linear.reference import reference

DTYPES = [np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16)]
# (outputs, inputs): below, at and beyond panels of 16 outputs, pairs, tiles of 32 inputs and blocks of 1024 steps
SHAPES = [(1, 1), (7, 5), (16, 32), (17, 33), (48, 64), (65, 100), (130, 47), (96, 1100), (33, 2600)]
TOLERANCES = {"float32": (1.3e-6, 1e-5), "bfloat16": (1.6e-2, 1e-3), "float16": (1e-3, 1e-3)}
EACH = pytest.mark.parametrize(
    ("isa", "dtype"), [pytest.param(i, d, id=f"{i}-{d.name}") for i in kernels.isas() for d in DTYPES]
)


def run(x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None, isa: str, threads: int = 1) -> np.ndarray:
    y = np.full((len(x), len(weight)), np.nan, np.float32)
    kernels.run_op("linear", [x, pack(weight), bias], [y], isa=isa, threads=threads)
    return y


def arrays(rows: int, outputs: int, inputs: int, dtype: np.dtype) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    generator = np.random.default_rng((rows, outputs, inputs))
    weight = generator.standard_normal((outputs, inputs), np.float32) / np.sqrt(inputs, dtype=np.float32)
    x = generator.standard_normal((rows, inputs), np.float32)
    return x, weight.astype(dtype), generator.standard_normal(outputs, np.float32)


def test_the_reference_is_a_sum_of_products() -> None:
    x, weight, bias = arrays(3, 4, 5, np.dtype(np.float32))
    for row in range(3):
        for column in range(4):
            wanted = sum(float(x[row, k]) * float(weight[column, k]) for k in range(5)) + float(bias[column])
            found = reference(*(torch.from_numpy(a).double() for a in (x, weight, bias)))[row, column]
            assert abs(float(found) - wanted) < 1e-12


def test_the_reference_rounds_x_for_bfloat16_weights() -> None:
    one = torch.ones(1, 1, dtype=torch.bfloat16)
    assert reference(torch.tensor([[1.00390625]]), one, None).item() == 1.0  # halfway between two: to even
    assert reference(torch.tensor([[1.01171875]]), one, None).item() == 1.015625
    assert reference(torch.tensor([[1.00390625]]), one.float(), None).item() == 1.00390625


@EACH
@pytest.mark.parametrize("rows", [*range(1, 18), 31, 32, 33, 97, 172])
def test_agrees_with_float64(isa: str, dtype: np.dtype, rows: int) -> None:
    for number, (outputs, inputs) in enumerate(SHAPES):
        x, weight, bias = arrays(rows, outputs, inputs, dtype)
        given = bias if number % 2 else None
        wide = weight.astype(np.float64)
        exact = x.astype(dtype) if dtype.name == "bfloat16" else x
        wanted = exact.astype(np.float64) @ wide.T + (0 if given is None else given)
        rtol, atol = TOLERANCES[dtype.name]
        tight = 2e-6 * max(8.0, inputs**0.5)  # what is left when the inputs' own rounding is accounted for
        found = run(x, weight, given, isa, 1 + number % 2)
        np.testing.assert_allclose(found, wanted, rtol, atol)
        np.testing.assert_allclose(found, wanted, tight, tight)


@EACH
def test_a_row_has_the_same_bits_in_any_batch(isa: str, dtype: np.dtype) -> None:
    for outputs, inputs in ((17, 33), (64, 64), (100, 2600)):
        x, weight, bias = arrays(172, outputs, inputs, dtype)
        whole = run(x, weight, bias, isa)
        for row in (0, 1, 5, 16, 95, 96, 171):
            np.testing.assert_array_equal(run(x[row : row + 1], weight, bias, isa)[0], whole[row])
        for number, count in enumerate((*range(2, 18), 31, 33, 48, 96, 100)):
            start = 172 - count
            np.testing.assert_array_equal(run(x[start:], weight, bias, isa, 1 + number % 2), whole[start:])


@EACH
def test_rows_may_be_strided(isa: str, dtype: np.dtype) -> None:
    x, weight, bias = arrays(9, 40, 50, dtype)
    wide = np.full((9, 200), np.nan, np.float32)
    wide[:, 30:80] = x
    out = np.full((9, 100), 7, np.float32)
    kernels.run_op("linear", [wide[:, 30:80], pack(weight), bias], [out[:, 11:51]], isa=isa)
    np.testing.assert_array_equal(out[:, 11:51], run(x, weight, bias, isa))
    assert (out[:, :11] == 7).all()
    assert (out[:, 51:] == 7).all()
    backwards = np.ascontiguousarray(x[::-1])[::-1]
    np.testing.assert_array_equal(run(backwards, weight, bias, isa), run(x, weight, bias, isa))


@EACH
def test_a_bad_row_stays_alone(isa: str, dtype: np.dtype) -> None:
    x, weight, bias = arrays(20, 33, 40, dtype)
    clean = run(x, weight, bias, isa)
    x[7, 3], x[19, 0] = np.nan, np.inf
    found = run(x, weight, bias, isa)
    others = [row for row in range(20) if row not in (7, 19)]
    np.testing.assert_array_equal(found[others], clean[others])
    assert np.isnan(found[7]).all()
    assert not np.isfinite(found[19]).any()


def test_wrong_arguments_are_refused() -> None:
    x, weight, bias = arrays(2, 20, 8, np.dtype(np.float32))
    packed, y = pack(weight), np.empty((2, 20), np.float32)
    bad = [
        ([x, weight, bias], y, "packed weight has another shape"),
        ([x[:, :7].copy(), packed, bias], y, "packed weight has another shape"),
        ([x, packed, bias[:-1]], y, r"bias must be float32 \[N\]"),
        ([x, packed, bias], np.empty((2, 33), np.float32), "packed weight has another shape"),
        ([x, packed, bias], np.empty((3, 20), np.float32), r"y must be float32 \[M, N\]"),
        ([x.T.copy().T, packed, bias], y, "columns of x must be contiguous"),
        ([x.astype(np.int32), packed, bias], y, r"x must be float32 \[M, K\]"),
        ([x, packed.astype(np.int32), bias], y, "packed weights must be"),
        ([x, None, bias], y, "packed weight"),
    ]
    for inputs, output, message in bad:
        with pytest.raises(kernels.KernelError, match=message):
            kernels.run_op("linear", inputs, [output])
