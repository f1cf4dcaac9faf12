"""The SIMD layer through elementwise: conversions bit by bit, functions to a few units in the last place."""

import math
from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest

from llmc.plugins import kernels

ISAS = pytest.mark.parametrize("isa", kernels.isas())
FUNCTIONS: list[tuple[str, Callable[[float], float], float, float, float]] = [
    # name, in float64, from, to, units in the last place
    ("exp", math.exp, -87.0, 88.5, 1.5),
    ("sigmoid", lambda x: 1 / (1 + math.exp(-x)), -80.0, 80.0, 3),
    ("silu", lambda x: x / (1 + math.exp(-x)), -80.0, 80.0, 3),
    ("tanh", math.tanh, -10.0, 10.0, 2),
    ("tanh", math.tanh, -0.7, 0.7, 2),
    ("erf", math.erf, -4.5, 4.5, 3),
    ("erf", math.erf, -1.1, 1.1, 3),
    ("gelu", lambda x: x / 2 * (1 + math.erf(x / math.sqrt(2))), 0.0, 9.0, 4),
    ("sqrt", math.sqrt, 0.0, 1e6, 0.5),
    ("floor", math.floor, -9.0, 9.0, 0),
    ("round", round, -9.0, 9.0, 0),
]


def copy(x: np.ndarray, dtype: object, isa: str) -> np.ndarray:
    y = np.zeros(x.shape, dtype)  # type: ignore[call-overload]
    kernels.run_op("elementwise", [x], [y], {"function": "copy"}, isa=isa)
    return y


@ISAS
@pytest.mark.parametrize("dtype", [np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)], ids=str)
def test_every_half_precision_number_survives(isa: str, dtype: np.dtype) -> None:
    halves = np.arange(1 << 16, dtype=np.uint16).view(dtype)
    wide = copy(halves, np.float32, isa)
    np.testing.assert_array_equal(wide, halves.astype(np.float32))  # NaN equals NaN
    back = copy(wide, dtype, isa)
    subnormal = (dtype.name == "bfloat16") & (np.abs(wide) < 2.0**-126)  # bf16 instructions take them for zero
    keep = ~(np.isnan(wide) | subnormal)
    np.testing.assert_array_equal(back.view(np.uint16)[keep], halves.view(np.uint16)[keep])
    assert np.isnan(back[np.isnan(wide)].astype(np.float32)).all()


@ISAS
@pytest.mark.parametrize("dtype", [np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)], ids=str)
def test_rounding_is_to_nearest_even(isa: str, dtype: np.dtype) -> None:
    bits = np.random.default_rng(0).integers(0, 1 << 32, 200_000, np.uint32)
    bits[::3] &= 0xFFFF8000  # halfway between two bf16
    bits[1::3] &= 0xFFFFF000  # and two f16
    x = bits.view(np.float32)
    x = x[np.isfinite(x) & ((np.abs(x) >= 2.0**-126) | (dtype.name == "float16"))]
    with np.errstate(over="ignore"):
        wanted = x.astype(dtype)
    np.testing.assert_array_equal(copy(x, dtype, isa).view(np.uint16), wanted.view(np.uint16))


@ISAS
@pytest.mark.parametrize(("name", "exact", "low", "high", "units"), FUNCTIONS)
def test_functions_are_accurate(
    isa: str, name: str, exact: Callable[[float], float], low: float, high: float, units: float
) -> None:
    x = np.random.default_rng(1).uniform(low, high, 20_000).astype(np.float32)
    y = np.empty_like(x)
    kernels.run_op("elementwise", [x], [y], {"function": name}, isa=isa)
    wanted = np.array([exact(float(v)) for v in x])
    unit = np.spacing(np.maximum(np.abs(wanted).astype(np.float32), np.float32(1.2e-38)))
    assert (np.abs(y - wanted) / unit).max() <= units + 1e-6


@ISAS
def test_limits(isa: str) -> None:
    x = np.array([-np.inf, -1e4, -104.5, 88.8, 1e4, np.inf, np.nan, 0.0], np.float32)
    for name, wanted in (
        ("exp", [0, 0, 0, np.inf, np.inf, np.inf, np.nan, 1]),
        ("sigmoid", [0, 0, 0, 1, 1, 1, np.nan, 0.5]),
        ("tanh", [-1, -1, -1, 1, 1, 1, np.nan, 0]),
        ("erf", [-1, -1, -1, 1, 1, 1, np.nan, 0]),
        ("relu", [0, 0, 0, np.float32(88.8), 1e4, np.inf, np.nan, 0]),
    ):
        y = np.empty_like(x)
        kernels.run_op("elementwise", [x], [y], {"function": name}, isa=isa)
        np.testing.assert_array_equal(np.abs(y) if name == "sigmoid" else y, wanted, name)
