import numpy as np
import torch

from llmc.plugins.matmul import OP


def test_equals_einsum():
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((2, 3, 4)), rng.standard_normal((2, 4, 5))
    y = OP.reference(torch.from_numpy(a), torch.from_numpy(b)).numpy()
    np.testing.assert_allclose(y, np.einsum("bmk,bkn->bmn", a, b), rtol=1e-12)
