"""What llmc::matmul means."""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from llmc.plugins.op import Sample


def reference(a: Tensor, b: Tensor) -> Tensor:
    """The product."""
    return torch.matmul(a, b)


def samples(rng: np.random.Generator) -> Iterator[Sample]:
    """Vectors, odd sizes, batches of which one side is broadcast, transposed operands."""
    for m, k, n in ((1, 1, 1), (3, 7, 5), (17, 33, 9), (1, 64, 100)):
        a, b = rng.standard_normal((m, k), dtype=np.float32), rng.standard_normal((k, n), dtype=np.float32)
        yield Sample((a, b))
        yield Sample((np.ascontiguousarray(a.T).T, np.ascontiguousarray(b.T).T))
    a, b = rng.standard_normal((4, 3, 8), dtype=np.float32), rng.standard_normal((8, 6), dtype=np.float32)
    yield Sample((a, np.broadcast_to(b, (4, 8, 6))))
    a = rng.standard_normal((2, 3, 5, 4), dtype=np.float32)
    yield Sample((a, a.transpose(0, 1, 3, 2)))
    yield Sample((np.broadcast_to(a[:, :1], (2, 3, 5, 4)), a.transpose(0, 1, 3, 2)))
