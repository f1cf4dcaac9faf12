"""Gated units: every activation of elementwise, merged and in-place arguments."""

import numpy as np
import pytest
import torch

from llmc.plugins import kernels
from llmc.plugins.elementwise import UNARY
from llmc.plugins.elementwise.reference import torch_function
from llmc.plugins.glu.reference import reference

ISAS = pytest.mark.parametrize("isa", kernels.isas())


def test_the_reference_is_the_activation_times_up() -> None:
    gate, up = torch.tensor([[0.0, 1.0, -2.0]]), torch.tensor([[5.0, 2.0, 3.0]])
    wanted = [0.0, 2 / (1 + np.exp(-1)), -6 / (1 + np.exp(2))]
    np.testing.assert_allclose(reference(gate, up, function="silu")[0], wanted, 1e-6)


@ISAS
@pytest.mark.parametrize("function", sorted(set(UNARY) - {"not", "isnan"}))
def test_every_unary_function_is_a_gate(isa: str, function: str) -> None:
    gate, up = np.random.default_rng(0).uniform(0.1, 4, (2, 5, 700)).astype(np.float32)
    if function not in ("log", "log1p", "sqrt", "rsqrt"):
        gate[::2] *= -1
    y = np.empty_like(gate)
    kernels.run_op("glu", [gate, up], [y], {"function": function}, isa=isa, threads=2)
    wanted = torch_function(function)(torch.from_numpy(gate).double()).numpy() * up
    np.testing.assert_allclose(y, wanted, 2e-6, 2e-6)


@ISAS
def test_halves_of_a_merged_product_in_place_and_row_by_row(isa: str) -> None:
    merged = np.random.default_rng(1).standard_normal((30, 2 * 333), np.float32)
    gate, up, y = merged[:, :333], merged[:, 333:], np.empty((30, 333), np.float32)
    kernels.run_op("glu", [gate, up], [y], {"function": "silu"}, isa=isa, threads=2)
    for row in (0, 29):
        alone = np.empty((1, 333), np.float32)
        kernels.run_op("glu", [gate[row : row + 1], up[row : row + 1]], [alone], {"function": "silu"}, isa=isa)
        np.testing.assert_array_equal(alone[0], y[row])
    kernels.run_op("glu", [gate, up], [gate], {"function": "silu"}, isa=isa, threads=2)
    np.testing.assert_array_equal(gate, y)


@ISAS
def test_large_and_missing_numbers(isa: str) -> None:
    gate = np.array([[-200.0, 200.0, np.nan, 0.0, -88.0, 3e38]], np.float32)
    for function, wanted in (("silu", [0, 200, np.nan, 0, 0, 3e38]), ("gelu", [0, 200, np.nan, 0, 0, 3e38])):
        y = np.empty_like(gate)
        kernels.run_op("glu", [gate, np.ones_like(gate)], [y], {"function": function}, isa=isa)
        np.testing.assert_allclose(y[0], wanted, 1e-6, 1e-30)


def test_wrong_arguments_are_refused() -> None:
    x = np.ones((2, 4), np.float32)
    with pytest.raises(kernels.KernelError, match="llmc::glu: there is no activation 'sillu'"):
        kernels.run_op("glu", [x, x], [x.copy()], {"function": "sillu"})
    with pytest.raises(kernels.KernelError, match="up must be float32 of y's shape"):
        kernels.run_op("glu", [x, x[:, :3]], [x.copy()], {"function": "silu"})
