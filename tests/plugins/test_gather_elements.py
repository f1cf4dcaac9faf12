import numpy as np
import torch

from llmc.plugins.gather_elements import OP


def test_equals_take_along_axis():
    rng = np.random.default_rng(0)
    data, ids = rng.standard_normal((3, 4, 5)), rng.integers(-5, 5, (3, 4, 9))
    y = OP.reference(torch.from_numpy(data), torch.from_numpy(ids)).numpy()
    np.testing.assert_array_equal(y, np.take_along_axis(data, ids, -1))
