"""What llmc::embedding means."""

from collections.abc import Iterator

import ml_dtypes
import numpy as np
import torch
from torch import Tensor

from llmc.plugins.op import Sample


def reference(ids: Tensor, weight: Tensor) -> Tensor:
    """The rows, exactly, as float32 (or wider)."""
    rows = weight[ids.long()]
    return rows if rows.dtype == torch.float64 else rows.float()


def fake(ids: Tensor, weight: Tensor) -> Tensor:
    """The shape of the result."""
    return weight.new_empty(*ids.shape, weight.shape[1], dtype=torch.float32)


def samples(rng: np.random.Generator) -> Iterator[Sample]:
    """Both id dtypes, each dtype of weights, a width that fills no vector. The weight is not packed."""
    for dtype in (np.float32, ml_dtypes.bfloat16, np.float16):
        for count, vocabulary, width in ((1, 40, 64), (9, 33, 19)):
            weight = rng.standard_normal((vocabulary, width), np.float32).astype(dtype)
            yield Sample((rng.integers(0, vocabulary, count, np.int32), weight))
    yield Sample((rng.integers(0, 8, (2, 3), np.int64), rng.standard_normal((8, 5), np.float32)))
