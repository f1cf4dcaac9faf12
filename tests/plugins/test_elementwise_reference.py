"""What elementwise functions mean, against numpy and values worked out by hand."""

import math

import numpy as np
import pytest
import torch

from llmc.plugins.elementwise import FUNCTIONS
from llmc.plugins.elementwise.reference import reference as elementwise


def one(function: str, *values: float) -> float:
    inputs = [torch.tensor(v, dtype=torch.float64) for v in values]
    return elementwise(*inputs, *[None] * (3 - len(inputs)), function=function).item()


@pytest.mark.parametrize(
    ("function", "values", "expected"),
    [
        ("round", (2.5,), 2.0),
        ("round", (-1.5,), -2.0),
        ("trunc", (-1.7,), -1.0),
        ("sign", (-0.3,), -1.0),
        ("relu2", (3.0,), 9.0),
        ("relu2", (-3.0,), 0.0),
        ("silu", (1.5,), 1.5 / (1 + math.exp(-1.5))),
        ("quick_gelu", (1.5,), 1.5 / (1 + math.exp(-1.702 * 1.5))),
        ("gelu", (0.7,), 0.35 * (1 + math.erf(0.7 / math.sqrt(2)))),
        ("gelu_tanh", (0.7,), 0.35 * (1 + math.tanh(math.sqrt(2 / math.pi) * (0.7 + 0.044715 * 0.7**3)))),
        ("softplus", (-1.0,), math.log1p(math.exp(-1))),
        ("softplus", (50.0,), 50.0),
        ("mod", (-7.0, 3.0), 2.0),
        ("fmod", (-7.0, 3.0), -1.0),
        ("pow", (2.0, 0.5), math.sqrt(2)),
        ("max", (1.0, 4.0), 4.0),
    ],
)
def test_values(function: str, values: tuple[float, ...], expected: float) -> None:
    assert one(function, *values) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("function", ["exp", "log1p", "expm1", "sqrt", "sin", "cos", "tanh", "floor", "ceil", "abs"])
def test_equals_numpy(function: str) -> None:
    x = np.linspace(0.01, 4, 50)
    found = elementwise(torch.from_numpy(x), None, None, function=function).numpy()
    np.testing.assert_allclose(found, getattr(np, function)(x), rtol=1e-12)


def test_integers_divide_towards_zero() -> None:
    a, b = torch.tensor([7, -7, 7, -7]), torch.tensor([2, 2, -2, -2])
    assert elementwise(a, b, None, function="div").tolist() == [3, -3, -3, 3]
    assert elementwise(a, b, None, function="mod").tolist() == [1, 1, -1, -1]
    assert elementwise(a, b, None, function="fmod").tolist() == [1, -1, 1, -1]


def test_comparisons_and_logic_give_booleans() -> None:
    a, b = torch.tensor([1.0, 2.0]), torch.tensor([2.0, 2.0])
    assert elementwise(a, b, None, function="less").tolist() == [True, False]
    assert elementwise(a, b, None, function="greater_equal").tolist() == [False, True]
    yes, no = a < b, a >= b
    assert elementwise(yes, no, None, function="xor").tolist() == [True, True]
    assert elementwise(yes, None, None, function="not").tolist() == [False, True]
    assert elementwise(yes, a, b, function="where").tolist() == [1.0, 2.0]


def test_a_copy_is_no_alias() -> None:
    a = torch.ones(3)
    assert elementwise(a, None, None, function="copy").data_ptr() != a.data_ptr()


@pytest.mark.parametrize("function", FUNCTIONS)
def test_every_function_is_defined(function: str) -> None:
    logical = function in ("not", "and", "or", "xor")
    a = torch.tensor([True, False]) if logical or function == "where" else torch.tensor([1.5, 0.5])
    rest = [a if logical else torch.tensor([0.5, 2.0])] * (FUNCTIONS[function] - 1)
    assert elementwise(a, *rest, *[None] * (2 - len(rest)), function=function).shape == (2,)
