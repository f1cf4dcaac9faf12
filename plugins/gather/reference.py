"""What llmc::gather means."""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from llmc.plugins.op import Sample


def reference(data: Tensor, ids: Tensor) -> Tensor:
    """Pick rows."""
    ids = ids.long()
    return data[torch.where(ids < 0, ids + data.shape[0], ids)]


def samples(rng: np.random.Generator) -> Iterator[Sample]:
    """Vectors and rows, scalars of ids, negative ids, other dtypes, transposed data."""
    data = rng.standard_normal((11, 7), dtype=np.float32)
    ids = rng.integers(-11, 11, (3, 4))
    yield Sample((data, ids))
    yield Sample((data, ids.astype(np.int32)))
    yield Sample((data[:, 0], ids))
    yield Sample((data.T, ids[:, 0] % 7))
    yield Sample((data, np.array(-1)))
    yield Sample((rng.integers(0, 99, (5, 3, 2)), rng.integers(0, 5, 9)))
    yield Sample((data > 0, ids[0]))
