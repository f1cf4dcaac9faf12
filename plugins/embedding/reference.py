"""What llmc::embedding means."""

from collections.abc import Iterator

import ml_dtypes
import numpy as np
import torch
from torch import Tensor

from llmc.plugins.op import Sample
from llmc.plugins.quantized_linear import packing
from llmc.plugins.quantized_linear.reference import dequantize, random_weight


def reference(
    ids: Tensor,
    weight: Tensor,
    scale: Tensor | None = None,
    zero: Tensor | None = None,
    *,
    format: str = "plain",
    group: int = 0,
) -> Tensor:
    """The rows, exactly, as float32 (or wider)."""
    rows = weight[ids.long()]
    if format != "plain":
        assert scale is not None, "a quantized table has scales"
        picked = None if zero is None else zero[ids.long()]
        return dequantize(rows, scale[ids.long()], picked, format=format, group=group)
    return rows if rows.dtype == torch.float64 else rows.float()


def fake(ids: Tensor, weight: Tensor, *_: Tensor | None, **__: object) -> Tensor:
    """The shape of the result."""
    return weight.new_empty(*ids.shape, weight.shape[1], dtype=torch.float32)


def samples(rng: np.random.Generator) -> Iterator[Sample]:
    """Both id dtypes, each dtype of weights, a width that fills no vector. The weight is not packed."""
    for dtype in (np.float32, ml_dtypes.bfloat16, np.float16):
        for count, vocabulary, width in ((1, 40, 64), (9, 33, 19)):
            weight = rng.standard_normal((vocabulary, width), np.float32).astype(dtype)
            yield Sample((rng.integers(0, vocabulary, count, np.int32), weight))
    yield Sample((rng.integers(0, 8, (2, 3), np.int64), rng.standard_normal((8, 5), np.float32)))


def stored_samples(rng: np.random.Generator) -> Iterator[Sample]:
    """Quantized tables: each format and kind of zeros, groups that end within a line and that are short."""
    for format in packing.LINE:
        for zeros in ("",) if format == "fp8" else ("", "uint8", "float32"):
            for count, vocabulary, width, group in ((1, 40, 64, 32), (9, 33, 19, 10), (3, 16, 300, 128), (2, 5, 7, 0)):
                weight = random_weight(rng, vocabulary, width, format, group, zeros)
                yield Sample(
                    (rng.integers(0, vocabulary, count, np.int32), *weight), {"format": format, "group": group}
                )
