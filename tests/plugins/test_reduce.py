import numpy as np
import pytest
import torch

from llmc.plugins.reduce import FUNCTIONS, OP


@pytest.mark.parametrize("function", FUNCTIONS)
def test_equals_numpy(function):
    x = np.random.default_rng(0).integers(-4, 4, (3, 5, 7)).astype(np.float32)
    data = x > 0 if function in ("any", "all") else x
    y = OP.reference(torch.from_numpy(data), function=function, num_axes=1).numpy()
    np.testing.assert_allclose(y, getattr(np, function)(data, -1), rtol=1e-6)
    if not function.startswith("arg"):
        y = OP.reference(torch.from_numpy(data), function=function, num_axes=2).numpy()
        np.testing.assert_allclose(y, getattr(np, function)(data, (-1, -2)), rtol=1e-6)


def test_the_first_of_equals_wins():
    x = torch.tensor([[1, 5, 5, 0, 0, 5]])
    assert OP.reference(x, function="argmax", num_axes=1).tolist() == [1]
    assert OP.reference(x, function="argmin", num_axes=1).tolist() == [3]


def test_integers_stay_integers():
    x = torch.arange(6, dtype=torch.int32).reshape(2, 3)
    assert OP.reference(x, function="sum", num_axes=1).dtype == torch.int32
