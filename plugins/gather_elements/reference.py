"""What llmc::gather_elements means."""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from llmc.plugins.op import Sample


def reference(data: Tensor, ids: Tensor) -> Tensor:
    """Pick elements of the last axis."""
    ids = ids.long()
    return torch.gather(data, -1, torch.where(ids < 0, ids + data.shape[-1], ids))


def samples(rng: np.random.Generator) -> Iterator[Sample]:
    """More and fewer ids than elements, negative ids, other dtypes, data that is broadcast."""
    data = rng.standard_normal((4, 9), dtype=np.float32)
    yield Sample((data, rng.integers(-9, 9, (4, 3))))
    yield Sample((data, rng.integers(0, 9, (4, 20)).astype(np.int32)))
    yield Sample((data[0], rng.integers(0, 9, 5)))
    yield Sample((rng.integers(0, 99, (2, 3, 5)), rng.integers(0, 5, (2, 3, 1))))
    yield Sample((np.broadcast_to(data[:1], (6, 9)), rng.integers(0, 9, (6, 2))))
