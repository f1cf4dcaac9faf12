"""What llmc::softmax means."""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from llmc.plugins.op import Sample


def reference(x: Tensor, *, log: bool) -> Tensor:
    """Softmax or its logarithm."""
    return torch.log_softmax(x, -1) if log else torch.softmax(x, -1)


def samples(rng: np.random.Generator) -> Iterator[Sample]:
    """Rows of one value and of odd sizes, large values, masked ones, a transposed input."""
    for shape in ((1, 1), (3, 5), (2, 4, 64), (7, 129), (1, 1000)):
        x = rng.standard_normal(shape, dtype=np.float32) * 10
        for log in (False, True):
            yield Sample((x,), {"log": log})
            yield Sample((x + 1e4,), {"log": log})
    x = rng.standard_normal((6, 9), dtype=np.float32)
    yield Sample((x.T,), {"log": False})
    x = x.copy()
    x[:, 2:5] = -np.inf
    yield Sample((x,), {"log": False})
