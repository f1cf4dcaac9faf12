"""Slopes of ALiBi (https://arxiv.org/abs/2108.12409)."""

import math

import torch
from torch import Tensor


def slopes(heads: int) -> Tensor:
    """[heads]: 2^(-8 i / n) for n heads, a power of two; else every second of the next power's, then the others."""
    power = 2 ** math.ceil(math.log2(heads))
    found = torch.exp2(torch.arange(1, power + 1, dtype=torch.float64) * (-8 / power))
    if power != heads:
        found = torch.cat([found[1::2], found[::2]])[:heads]
    return found.float()
