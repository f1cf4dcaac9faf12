"""What llmc::topk means."""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from llmc.plugins.op import Sample


def reference(x: Tensor, *, k: int, largest: bool) -> tuple[Tensor, Tensor]:
    """A stable sort, cut off after k."""
    values, indices = torch.sort(x, dim=-1, descending=largest, stable=True)
    return values[..., :k].contiguous(), indices[..., :k].contiguous()


def samples(rng: np.random.Generator) -> Iterator[Sample]:
    """K of 1 and of all, many ties, -inf, a strided input."""
    for shape, k in (((1, 1), 1), ((4, 8), 2), ((3, 2, 60), 6), ((5, 128), 8), ((2, 33), 33)):
        x = rng.standard_normal(shape, dtype=np.float32)
        for largest in (True, False):
            yield Sample((x,), {"k": k, "largest": largest})
            yield Sample((np.round(x),), {"k": k, "largest": largest})
    x = rng.standard_normal((6, 20), dtype=np.float32)
    yield Sample((x[:, ::2],), {"k": 3, "largest": True})
    x = x.copy()
    x[:, 3:] = -np.inf
    yield Sample((x,), {"k": 5, "largest": True})
