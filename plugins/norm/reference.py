"""What llmc::norm means."""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from llmc.plugins.op import Sample


def reference(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, *, epsilon: float, kind: str, offset: float
) -> Tensor:
    """Normalise the last axis, then scale and shift; at least float32 inside."""
    y = x.to(torch.promote_types(x.dtype, torch.float32))
    if kind == "l2":
        y = y / y.norm(dim=-1, keepdim=True).clamp_min(epsilon)
    else:
        if kind == "layer":
            y = y - y.mean(-1, keepdim=True)
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + epsilon)
    if weight is not None:
        y = y * (weight.to(y.dtype) + offset)
    if bias is not None:
        y = y + bias.to(y.dtype)
    return y.to(x.dtype)


def samples(rng: np.random.Generator) -> Iterator[Sample]:
    """Rows of odd sizes, tiny rows on which epsilon shows, rows far from zero, per-head weights."""
    shapes: list[tuple[int, ...]] = [(1, 1), (3, 7), (5, 64), (2, 3, 33), (1, 576), (17, 1000)]
    for shape in shapes:
        for kind in ("rms", "layer", "l2"):
            x = rng.standard_normal(shape, dtype=np.float32)
            x[0] *= 1e-3
            x[-1] += 3
            weight, bias = (rng.standard_normal(shape[-1], dtype=np.float32) for _ in range(2))
            yield Sample((x, weight, bias), {"epsilon": 1e-6, "kind": kind, "offset": 0.0})
            yield Sample((x, weight, None), {"epsilon": 1e-5, "kind": kind, "offset": 1.0})
            yield Sample((x, None, None), {"epsilon": 1e-5, "kind": kind, "offset": 0.0})
    x, weight = rng.standard_normal((4, 3, 20), dtype=np.float32), rng.standard_normal((3, 20), dtype=np.float32)
    yield Sample((x, weight, None), {"epsilon": 1e-5, "kind": "layer", "offset": 0.0})
    yield Sample((np.zeros((2, 9), np.float32), weight[0, :9], None), {"epsilon": 1e-6, "kind": "rms", "offset": 0.0})
