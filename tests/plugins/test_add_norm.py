"""Add and norm: the sum and the norm of the sum, in place too."""

import numpy as np
import pytest
import torch

from llmc.plugins import kernels
from llmc.plugins.add_norm.reference import reference

ATTRIBUTES = {"epsilon": 1e-6, "kind": "rms", "offset": 1.0}


def test_the_reference_adds_and_normalises() -> None:
    total, y = reference(
        torch.tensor([3.0, 0.0]), torch.tensor([0.0, 4.0]), None, None, epsilon=0.0, kind="l2", offset=0.0
    )
    assert total.tolist() == [3.0, 4.0]
    torch.testing.assert_close(y, torch.tensor([0.6, 0.8]))


@pytest.mark.parametrize("isa", kernels.isas())
@pytest.mark.parametrize("shape", [(1, 1), (3, 19), (40, 576)])
def test_has_the_bits_of_both_steps_also_in_place(isa: str, shape: tuple[int, int]) -> None:
    generator = np.random.default_rng(5)
    a, b = (generator.standard_normal(shape, np.float32) for _ in range(2))
    weight = generator.standard_normal(shape[1], np.float32)
    wanted = np.empty_like(a)
    kernels.run_op("norm", [a + b, weight, None], [wanted], ATTRIBUTES, isa=isa)
    total, y = np.empty_like(a), np.empty_like(a)
    kernels.run_op("add_norm", [a, b, weight, None], [total, y], ATTRIBUTES, isa=isa, threads=2)
    np.testing.assert_array_equal(total, a + b)
    np.testing.assert_array_equal(y, wanted)
    first, second = a.copy(), b.copy()
    kernels.run_op("add_norm", [first, second, weight, None], [first, second], ATTRIBUTES, isa=isa, threads=2)
    np.testing.assert_array_equal(first, a + b)
    np.testing.assert_array_equal(second, wanted)


def test_shapes_must_agree() -> None:
    a, b = np.ones((2, 8), np.float32), np.ones((2, 9), np.float32)
    with pytest.raises(kernels.KernelError, match="must be float32 of y's shape"):
        kernels.run_op("add_norm", [a, b, None, None], [a.copy(), a.copy()], ATTRIBUTES)
