import numpy as np
import torch

from llmc.plugins.scatter_elements import OP


def test_equals_a_loop():
    rng = np.random.default_rng(0)
    data, ids, src = rng.integers(0, 9, (3, 6)), rng.integers(-6, 6, (3, 10)), rng.integers(0, 99, (3, 10))
    for reduction in ("none", "add"):
        expected = data.copy()
        for row in range(3):
            for k in range(10):
                old = expected[row, ids[row, k]] if reduction == "add" else 0
                expected[row, ids[row, k]] = old + src[row, k]
        y = OP.reference(*(torch.from_numpy(a) for a in (data, ids, src)), reduction=reduction)
        np.testing.assert_array_equal(y.numpy(), expected)


def test_the_input_is_left_alone():
    data = torch.zeros(1, 4)
    OP.reference(data, torch.tensor([[1]]), torch.ones(1, 1), reduction="add")
    assert data.sum() == 0
