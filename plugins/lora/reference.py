"""What llmc::lora means."""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from llmc.plugins.op import Sample


def reference(x: Tensor, base: Tensor, a: Tensor, b: Tensor, ranks: Tensor, adapters: Tensor) -> Tensor:
    """Row by row."""
    y = base.clone()
    for row, adapter in enumerate(adapters.tolist()):
        if adapter >= 0:
            rank = int(ranks[adapter])
            y[row] += (a[adapter, :rank] @ x[row]) @ b[adapter, :rank]
    return y


def fake(x: Tensor, base: Tensor, *others: Tensor) -> Tensor:
    """The shape alone."""
    return torch.empty_like(base)


def samples(rng: np.random.Generator) -> Iterator[Sample]:
    """One row and many, odd widths, adapters of different ranks, of which one is empty."""
    for rows, columns, outputs, rank in ((1, 5, 3, 1), (7, 60, 33, 4), (17, 67, 130, 5), (40, 64, 64, 8)):
        x, base = (rng.standard_normal((rows, n), dtype=np.float32) for n in (columns, outputs))
        a = rng.standard_normal((3, rank, columns), dtype=np.float32) / np.float32(columns**0.5)
        b = rng.standard_normal((3, rank, outputs), dtype=np.float32)
        ranks = np.array([rank, 0, (rank + 1) // 2], np.int32)
        for adapters in (rng.integers(-1, 3, rows), np.full(rows, -1)):
            yield Sample((x, base, a, b, ranks, adapters.astype(np.int32)))
