import pytest
import torch
from torch import Tensor, fx, nn

from llmc.passes.fx.fuse_add_norm import FuseAddNorm


def norm(x: Tensor, weight: Tensor | None, epsilon: float = 1e-5) -> Tensor:
    return torch.ops.llmc.norm(x, weight, None, epsilon=epsilon, kind="rms", offset=0.0)


class Model(nn.Module):
    def __init__(self, block: str) -> None:
        super().__init__()
        self.embed, self.a, self.b = nn.Embedding(32, 16), nn.Linear(16, 16), nn.Linear(16, 16)
        self.first, self.second = nn.Parameter(torch.rand(16)), nn.Parameter(torch.rand(16))
        self.block = block

    def forward(self, input_ids: Tensor, position_ids: Tensor, logit_rows: Tensor) -> tuple[Tensor, ...]:
        x = self.embed(input_ids)
        a, b = self.a(x), self.b(x)
        if self.block == "residual":
            x = x + a
            return x, norm(x, self.first)
        if self.block == "two":
            x = a + b
            return norm(x, self.first), norm(x, self.second, 1e-2), x
        if self.block == "view":
            return norm((a + b).view(-1, 16), self.first), a
        if self.block == "split":
            return (norm((a + b).view(-1, 2, 8), self.first[:8]),)
        if self.block == "scaled":
            return (norm(torch.add(a, b, alpha=2.0), self.first),)
        if self.block == "broadcast":
            return (norm(a + b[:, :1], self.first),)
        if self.block == "number":
            return (norm(a + 1.0, self.first),)
        return (norm(a * b, self.first),)


def count(module: fx.GraphModule, op: str) -> int:
    return sum(str(n.target) == f"llmc.{op}.default" for n in module.graph.nodes)


@pytest.mark.parametrize(("block", "left"), [("residual", 0), ("two", 1), ("view", 0)])
def test_fuses(block: str, left: int, export, run) -> None:
    module = export(Model(block))
    before = run(module)
    assert FuseAddNorm()(module)
    assert (count(module, "add_norm"), count(module, "norm")) == (1, left)
    assert not any("aten.add" in str(n.target) for n in module.graph.nodes)
    torch.testing.assert_close(run(module), before)
    assert not FuseAddNorm()(module), "a second run changes nothing"


def test_every_new_node_has_a_value(export) -> None:
    module = export(Model("two"))
    FuseAddNorm()(module)
    assert all("val" in n.meta for n in module.graph.nodes if n.op == "call_function")


@pytest.mark.parametrize("block", ["scaled", "broadcast", "number", "product", "split"])
def test_leaves_near_misses_alone(block: str, export) -> None:
    module = export(Model(block))
    assert not FuseAddNorm()(module)
    assert count(module, "add_norm") == 0
