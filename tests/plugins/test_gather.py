import numpy as np
import torch

from llmc.plugins.gather import OP


def test_equals_indexing():
    data, ids = np.arange(30).reshape(5, 6), np.array([[0, -1], [4, -5]])
    np.testing.assert_array_equal(OP.reference(torch.from_numpy(data), torch.from_numpy(ids)).numpy(), data[ids])
    assert OP.reference(torch.from_numpy(data[:, 0].copy()), torch.tensor(-2)).item() == 18
