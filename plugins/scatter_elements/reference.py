"""What llmc::scatter_elements means."""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from llmc.plugins.op import Sample


def reference(data: Tensor, ids: Tensor, src: Tensor, *, reduction: str) -> Tensor:
    """One k after the other, so that the last one wins."""
    y = data.clone(memory_format=torch.contiguous_format)
    ids = ids.long()
    ids = torch.where(ids < 0, ids + data.shape[-1], ids)
    for k in range(ids.shape[-1]):
        at, value = ids[..., k : k + 1], src[..., k : k + 1]
        if reduction == "add":
            y.scatter_add_(-1, at, value.contiguous())
        else:
            y.scatter_(-1, at, value)
    return y


def samples(rng: np.random.Generator) -> Iterator[Sample]:
    """Repeated ids, negative ids, one row, a broadcast source, bools as routers use them."""
    data, src = rng.standard_normal((5, 8), dtype=np.float32), rng.standard_normal((5, 3), dtype=np.float32)
    for reduction in ("none", "add"):
        yield Sample((data, rng.integers(-8, 8, (5, 3)), src), {"reduction": reduction})
        yield Sample((data[0], rng.integers(0, 8, 3).astype(np.int32), src[0]), {"reduction": reduction})
        one = np.broadcast_to(np.float32(1), (5, 3))
        yield Sample((np.zeros_like(data), rng.integers(0, 8, (5, 3)), one), {"reduction": reduction})
        whole = rng.integers(0, 9, (2, 3, 4))
        yield Sample((whole, rng.integers(0, 4, (2, 3, 2)), whole[..., :2]), {"reduction": reduction})
    yield Sample((data > 9, rng.integers(0, 8, (5, 3)), src > -9), {"reduction": "none"})
