import numpy as np
import torch

from llmc.plugins.topk import OP


def test_equals_a_sort():
    x = np.random.default_rng(0).permutation(60).reshape(3, 20).astype(np.float32)
    for largest in (True, False):
        values, indices = OP.reference(torch.from_numpy(x), k=4, largest=largest)
        order = np.sort(x)[:, ::-1] if largest else np.sort(x)
        np.testing.assert_array_equal(values.numpy(), order[:, :4])
        np.testing.assert_array_equal(np.take_along_axis(x, indices.numpy(), -1), values.numpy())


def test_of_equals_the_lowest_index_comes_first():
    x = torch.tensor([[2.0, 7.0, 2.0, 7.0, 2.0, 7.0]])
    assert OP.reference(x, k=5, largest=True)[1].tolist() == [[1, 3, 5, 0, 2]]
    assert OP.reference(x, k=4, largest=False)[1].tolist() == [[0, 2, 4, 1]]
