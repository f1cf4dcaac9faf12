"""What llmc::linear means."""

from collections.abc import Iterator

import ml_dtypes
import numpy as np
import torch
from torch import Tensor

from llmc.plugins.op import Sample


def reference(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The product in x's precision; bfloat16 weights round x, as dot-product instructions do."""
    if weight.dtype == torch.bfloat16:
        x = x.to(torch.bfloat16).to(x.dtype)
    return torch.nn.functional.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))


def fake(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The shape of the result."""
    return x.new_empty(*x.shape[:-1], weight.shape[0])


def samples(rng: np.random.Generator) -> Iterator[Sample]:
    """Rows 1 (decode) to many, widths that fill no panel or vector, each dtype of weights. The weight is not packed."""
    for dtype in (np.float32, ml_dtypes.bfloat16, np.float16):
        for rows, inner, outer in ((1, 64, 32), (3, 33, 17), (5, 7, 1), (17, 128, 48), (70, 100, 100), (1, 300, 7)):
            x = rng.standard_normal((rows, inner), np.float32)
            weight = (rng.standard_normal((outer, inner), np.float32) / np.sqrt(inner)).astype(dtype)
            bias = rng.standard_normal(outer, np.float32) if rows != 5 else None
            yield Sample((x, weight, bias))
