"""What llmc::cumsum means."""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from llmc.plugins.op import Sample


def reference(x: Tensor, *, exclusive: bool) -> Tensor:
    """The running sum, shifted by one if exclusive."""
    y = torch.cumsum(x, -1, dtype=x.dtype)
    return torch.cat([torch.zeros_like(y[..., :1]), y[..., :-1]], -1) if exclusive else y


def samples(rng: np.random.Generator) -> Iterator[Sample]:
    """Rows of one value and of odd sizes, ints, a transposed input."""
    for exclusive in (False, True):
        for shape in ((1,), (3, 17), (2, 2, 100)):
            x = rng.standard_normal(shape, dtype=np.float32)
            yield Sample((x,), {"exclusive": exclusive})
            yield Sample(((x * 9).astype(np.int64),), {"exclusive": exclusive})
        yield Sample(((x[0] * 9).astype(np.int32).T,), {"exclusive": exclusive})
