import torch

from llmc.plugins.cumsum import OP


def test_running_sums():
    x = torch.tensor([[1, 2, 3], [10, 0, -1]])
    assert OP.reference(x, exclusive=False).tolist() == [[1, 3, 6], [10, 10, 9]]
    assert OP.reference(x, exclusive=True).tolist() == [[0, 1, 3], [0, 10, 10]]


def test_the_dtype_stays():
    assert OP.reference(torch.ones(3, dtype=torch.int32), exclusive=False).dtype == torch.int32
