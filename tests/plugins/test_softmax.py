import numpy as np
import torch

from llmc.plugins.softmax import OP


def test_equals_the_formula_in_float64():
    x = np.random.default_rng(0).standard_normal((3, 9)) * 5
    expected = np.exp(x) / np.exp(x).sum(-1, keepdims=True)
    np.testing.assert_allclose(OP.reference(torch.from_numpy(x), log=False).numpy(), expected, rtol=1e-12)
    np.testing.assert_allclose(OP.reference(torch.from_numpy(x), log=True).numpy(), np.log(expected), rtol=1e-12)


def test_large_values_and_masked_ones():
    y = OP.reference(torch.tensor([[1e4, 1e4, -torch.inf]]), log=False)
    assert y.tolist() == [[0.5, 0.5, 0.0]]
