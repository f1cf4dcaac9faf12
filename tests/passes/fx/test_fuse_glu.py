from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F  # noqa: N812 - its usual name

from llmc.passes.fx.fuse_glu import FuseGlu

Combine = Callable[[Tensor, Tensor], Tensor]


class Model(nn.Module):
    def __init__(self, combine: Combine) -> None:
        super().__init__()
        self.embed, self.gate, self.up = nn.Embedding(32, 16), nn.Linear(16, 24), nn.Linear(16, 24)
        self.combine = combine

    def forward(self, input_ids: Tensor, position_ids: Tensor, logit_rows: Tensor) -> Tensor:
        x = self.embed(input_ids)
        return self.combine(self.gate(x), self.up(x))


def activation(x: Tensor, function: str) -> Tensor:
    return torch.ops.llmc.elementwise(x, None, None, function=function)


def fused(module: fx.GraphModule) -> list[str]:
    return [n.kwargs["function"] for n in module.graph.nodes if n.target is torch.ops.llmc.glu.default]


@pytest.mark.parametrize(
    ("combine", "function"),
    [
        (lambda g, u: F.silu(g) * u, "silu"),
        (lambda g, u: u * F.silu(g), "silu"),
        (lambda g, u: F.gelu(g) * u, "gelu"),
        (lambda g, u: F.gelu(g, approximate="tanh") * u, "gelu_tanh"),
        (lambda g, u: activation(g, "relu2") * u, "relu2"),
        (lambda g, u: torch.sigmoid(g) * u, "sigmoid"),
        (lambda g, u: F.silu(g) * torch.sigmoid(u), "silu"),
    ],
)
def test_fuses(combine: Combine, function: str, export, run) -> None:
    module = export(Model(combine))
    before = run(module)
    assert FuseGlu()(module)
    assert fused(module) == [function]
    torch.testing.assert_close(run(module), before)
    assert not FuseGlu()(module), "a second run changes nothing"


@pytest.mark.parametrize(
    "combine",
    [
        pytest.param(lambda g, u: g * u, id="rule 1: no activation"),
        pytest.param(lambda g, u: activation(g, "exp") * u, id="rule 1: not one of a gate"),
        pytest.param(lambda g, u: F.silu(g) + u, id="rule 1: no product"),
        pytest.param(lambda g, u: (a := F.silu(g)) * u + a, id="rule 2: read twice"),
        pytest.param(lambda g, u: F.relu(g).square(), id="rule 2: a square"),
        pytest.param(lambda g, u: F.sigmoid(g[..., :1]) * u, id="rule 3: one gate for all"),
    ],
)
def test_leaves_near_misses_alone(combine: Combine, export) -> None:
    module = export(Model(combine))
    assert not FuseGlu()(module)
    assert fused(module) == []
