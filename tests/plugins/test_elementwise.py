"""Elementwise functions: libm values, strides, dtypes, and the same bits wherever a value stands."""

import math
from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from llmc.plugins import kernels

ISAS = kernels.isas()
X = np.concatenate(
    [
        np.linspace(-12, 12, 1001, dtype=np.float32),
        np.array([0.0, -0.0, 1e-30, -1e-30, 1e-8, 0.5, 1.5, 2.5, -2.5, 88.0, -88.0, 30.0, -104.0], np.float32),
    ]
)


def run(
    function: str, *inputs: NDArray, y: type | np.dtype = np.float32, isa: str = ISAS[-1], threads: int = 1
) -> NDArray:
    out = np.empty(np.broadcast_shapes(*(x.shape for x in inputs)), y)
    views = [np.broadcast_to(x, out.shape) for x in inputs]
    kernels.run_op(
        "elementwise", views + [None] * (3 - len(views)), [out], {"function": function}, isa=isa, threads=threads
    )
    return out


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x > -700 else 0.0


UNARY: dict[str, Callable[[float], float]] = {
    "exp": lambda x: math.exp(x) if x < 88.7 else math.inf,
    "tanh": math.tanh,
    "erf": math.erf,
    "sigmoid": sigmoid,
    "silu": lambda x: x * sigmoid(x),
    "quick_gelu": lambda x: x * sigmoid(1.702 * x),
    "gelu": lambda x: x * 0.5 * math.erfc(-x / math.sqrt(2)),
    "gelu_tanh": lambda x: 0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "relu": lambda x: max(x, 0.0),
    "relu2": lambda x: max(x, 0.0) ** 2,
    "softplus": lambda x: x if x > 20 else math.log1p(math.exp(x)),
    "sin": math.sin,
    "cos": math.cos,
    "expm1": lambda x: math.expm1(x) if x < 88.7 else math.inf,
    "neg": lambda x: -x,
    "abs": abs,
    "sign": lambda x: float((x > 0) - (x < 0)),
    "floor": math.floor,
    "ceil": math.ceil,
    "trunc": math.trunc,
    "round": lambda x: float(np.rint(x)),
}
POSITIVE: dict[str, Callable[[float], float]] = {
    "log": math.log,
    "log1p": math.log1p,
    "sqrt": math.sqrt,
    "rsqrt": lambda x: 1 / math.sqrt(x),
    "reciprocal": lambda x: 1 / x,
}


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", [*UNARY, *POSITIVE])
def test_unary_values(name: str, isa: str) -> None:
    x = X if name in UNARY else np.abs(X) + np.float32(1e-6)
    expected = np.array([(UNARY | POSITIVE)[name](float(v)) for v in x])
    np.testing.assert_allclose(run(name, x, isa=isa), expected, 1e-6, 3e-7)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", ["exp", "tanh", "gelu", "softplus", "mul", "pow"])
def test_a_value_is_the_same_wherever_it_stands(name: str, isa: str) -> None:
    operands = (X,) if name in UNARY else (np.abs(X), np.cos(X))
    whole = run(name, *operands, isa=isa)
    for start in (0, 1, 15, 16, 17, 500):
        for length in (1, 7, 16, 33, 511, 513):
            found = run(name, *(x[start : start + length] for x in operands), isa=isa)
            assert np.array_equal(found, whole[start : start + length], equal_nan=True), (start, length)
    strided = run(name, *(np.repeat(x, 3)[::3] for x in operands), isa=isa)
    assert np.array_equal(strided, whole, equal_nan=True)


def test_special_values() -> None:
    nan, inf = np.float32(np.nan), np.float32(np.inf)
    x = np.array([nan, inf, -inf], np.float32)
    assert np.array_equal(run("isnan", x, y=bool), [True, False, False])
    assert np.array_equal(run("relu", x), [nan, inf, 0], equal_nan=True)
    assert np.array_equal(run("exp", x), [nan, inf, 0], equal_nan=True)
    assert np.array_equal(run("sigmoid", x), [nan, 1, 0], equal_nan=True)
    assert np.array_equal(run("max", x, np.zeros(1, np.float32)), [nan, inf, 0], equal_nan=True)
    assert np.array_equal(run("min", np.zeros(1, np.float32), x), [nan, 0, -inf], equal_nan=True)


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize(
    ("a", "b"),
    [
        ((7, 1, 33), (7, 5, 33)),
        ((7, 5, 1), (1, 1, 33)),
        ((300, 200), (200,)),
        ((1,), (40, 1000)),
        ((2, 3, 1, 5, 1, 2), (1, 3, 4, 1, 2, 2)),
    ],
    ids=str,
)
def test_broadcast_operands(a: tuple[int, ...], b: tuple[int, ...], threads: int) -> None:
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal(a, np.float32), rng.standard_normal(b, np.float32)
    assert np.array_equal(run("sub", x, y, threads=threads), x - y)
    assert np.array_equal(run("less", x, y, y=bool, threads=threads), x < y)


def test_strided_operands_and_results() -> None:
    rng = np.random.default_rng(1)
    x = rng.standard_normal((6, 70, 8), np.float32)
    y = np.zeros((8, 6, 70), np.float32).transpose(1, 2, 0)[:, ::2]
    kernels.run_op("elementwise", [x[:, 1::2], x[:, ::-1][:, ::2], None], [y], {"function": "add"})
    assert np.array_equal(y, x[:, 1::2] + x[:, ::-1][:, ::2])


def test_in_place() -> None:
    x = np.arange(1000, dtype=np.float32)
    kernels.run_op("elementwise", [x, x, None], [x], {"function": "add"})
    assert np.array_equal(x, np.arange(0, 2000, 2))


def test_empty() -> None:
    assert run("exp", np.zeros((3, 0), np.float32)).shape == (3, 0)


DTYPES = [np.float32, ml_dtypes.bfloat16, np.float16, np.int32, np.int64, np.bool_]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("to", DTYPES, ids=lambda d: np.dtype(d).name)
@pytest.mark.parametrize("start", DTYPES, ids=lambda d: np.dtype(d).name)
def test_copy_converts(start: type, to: type, isa: str) -> None:
    values = np.array([0, 1, -1, 2, 3.75, -3.75, 100, 0.1, 1000.5] * 5)
    x = values.astype(start)
    found = run("copy", x, y=np.dtype(to), isa=isa)
    floats = x.astype(np.float32) if np.dtype(start) == ml_dtypes.bfloat16 else x
    assert np.array_equal(found.astype(np.float64), floats.astype(to).astype(np.float64))


def test_copy_rounds_to_nearest_even_and_saturates_integers() -> None:
    x = np.array([1 + 2**-8, 1 + 3 * 2**-8, 65519, 1e9], np.float32)
    assert run("copy", x, y=np.dtype(ml_dtypes.bfloat16)).astype(np.float32).tolist()[:2] == [1.0, 1.015625]
    assert run("copy", x, y=np.float16)[2:].tolist() == [65504.0, math.inf]
    x = np.array([3e9, -3e9, np.nan, np.inf], np.float32)
    assert run("copy", x, y=np.int32).tolist() == [2**31 - 1, -(2**31), 0, 2**31 - 1]


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_integers(dtype: type) -> None:
    a = np.array([7, -7, 7, -7, 0, 5], dtype)
    b = np.array([2, 2, -2, -2, 3, 5], dtype)
    assert run("div", a, b, y=dtype).tolist() == [3, -3, -3, 3, 0, 1]
    assert run("mod", a, b, y=dtype).tolist() == [1, 1, -1, -1, 0, 0]
    assert run("fmod", a, b, y=dtype).tolist() == [1, -1, 1, -1, 0, 0]
    assert run("pow", np.array([2, 3, -2, 5], dtype), np.array([10, 0, 3, 2], dtype), y=dtype).tolist() == [
        1024,
        1,
        -8,
        25,
    ]
    lowest = np.iinfo(dtype).min
    edges = np.array([lowest, lowest, 5], dtype)
    assert run("div", edges, np.array([-1, 0, 0], dtype), y=dtype).tolist() == [lowest, 0, 0]
    assert run("mod", edges, np.array([-1, 0, 0], dtype), y=dtype).tolist() == [0, 0, 0]
    assert run("add", edges, edges, y=dtype).tolist() == [0, 0, 10]


def test_where_and_logic() -> None:
    c = np.array([True, False, True, False])
    d = np.array([True, True, False, False])
    for dtype in (np.float32, np.int32, np.int64, np.bool_):
        a, b = np.arange(4).astype(dtype), (np.arange(4) + 4).astype(dtype)
        assert np.array_equal(run("where", c, a, b, y=dtype), np.where(c, a, b))
    for name, function in (("and", np.logical_and), ("or", np.logical_or), ("xor", np.logical_xor)):
        assert np.array_equal(run(name, c, d, y=bool), function(c, d))
    assert np.array_equal(run("not", c, y=bool), ~c)


@pytest.mark.parametrize(
    ("name", "inputs", "y"),
    [
        ("exp", [np.zeros(3, np.int64)], np.int64),
        ("add", [np.zeros(3, np.float32), np.zeros(3, np.int64)], np.float32),
        ("add", [np.zeros(3, np.float32)], np.float32),
        ("less", [np.zeros(3, np.float32), np.zeros(3, np.float32)], np.float32),
        ("frobnicate", [np.zeros(3, np.float32)], np.float32),
    ],
    ids=str,
)
def test_refusals(name: str, inputs: list[NDArray], y: type) -> None:
    with pytest.raises(kernels.KernelError, match=f"no function '{name}'"):
        run(name, *inputs, y=y)


def test_shapes_have_to_agree() -> None:
    with pytest.raises(kernels.KernelError, match="y's shape"):
        kernels.run_op(
            "elementwise", [np.zeros(4, np.float32), None, None], [np.zeros(5, np.float32)], {"function": "exp"}
        )
