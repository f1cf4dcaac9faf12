"""Small modules, exported as the tracer exports models."""

from collections.abc import Callable

import exported
import pytest
import torch
from torch import Tensor, fx, nn


@pytest.fixture(scope="session")
def export() -> Callable[[nn.Module], fx.GraphModule]:
    """Exports a module of (input_ids [1, T], position_ids [1, T], logit_rows [N])."""
    return exported.export


@pytest.fixture
def run() -> Callable[[fx.GraphModule], list[Tensor]]:
    """Runs a graph on 23 tokens at odd positions."""

    def call(module: fx.GraphModule) -> list[Tensor]:
        generator = torch.Generator().manual_seed(2)
        ids, positions = (torch.randint(0, limit, (1, 23), generator=generator) for limit in (32, exported.MAX_LEN))
        with torch.no_grad():
            found = module(ids, positions, torch.tensor([4, 0]))
        return [found] if isinstance(found, Tensor) else list(found)

    return call
