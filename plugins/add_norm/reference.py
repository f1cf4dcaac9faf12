"""What llmc::add_norm means."""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from llmc.plugins.norm.reference import reference as norm
from llmc.plugins.op import Sample


def reference(
    a: Tensor,
    b: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    *,
    epsilon: float,
    kind: str,
    offset: float,
) -> tuple[Tensor, Tensor]:
    """The sum, and llmc::norm of it."""
    total = a + b
    return total, norm(total, weight, bias, epsilon=epsilon, kind=kind, offset=offset)


def fake(a: Tensor, b: Tensor, *_: Tensor | None, **__: object) -> tuple[Tensor, Tensor]:
    """The shapes of the results."""
    return torch.empty_like(a), torch.empty_like(a)


def samples(rng: np.random.Generator) -> Iterator[Sample]:
    """Each kind of norm, with and without weight and bias; rows small enough for epsilon to show."""
    for kind in ("rms", "layer", "l2"):
        for rows, width, scale in ((1, 64, 1.0), (5, 37, 1e-3), (33, 128, 4.0)):
            a, b = (scale * rng.standard_normal((rows, width), np.float32) for _ in range(2))
            weight = rng.standard_normal(width, np.float32) if rows != 33 else None
            bias = rng.standard_normal(width, np.float32) if kind == "layer" and rows == 5 else None
            offset = 1.0 if rows == 5 else 0.0
            yield Sample((a, b, weight, bias), {"epsilon": 1e-6, "kind": kind, "offset": offset})
