"""What llmc::glu means."""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from llmc.plugins.elementwise.reference import reference as elementwise
from llmc.plugins.op import Sample

FUNCTIONS = ("silu", "gelu", "gelu_tanh", "quick_gelu", "relu", "relu2", "sigmoid", "tanh")
"""What is used as a gate; the kernel takes any unary function of llmc::elementwise."""


def reference(gate: Tensor, up: Tensor, *, function: str) -> Tensor:
    """The product."""
    return elementwise(gate, None, None, function=function) * up


def fake(gate: Tensor, up: Tensor, *, function: str) -> Tensor:
    """The shape of the result."""
    return torch.empty_like(gate)


def samples(rng: np.random.Generator) -> Iterator[Sample]:
    """Each function, one row and several, odd widths, halves of one tensor (merged weights)."""
    for function in FUNCTIONS:
        for rows, width in ((1, 64), (3, 37), (9, 130)):
            both = 3 * rng.standard_normal((rows, 2 * width), np.float32)
            yield Sample((both[:, :width], both[:, width:]), {"function": function})
