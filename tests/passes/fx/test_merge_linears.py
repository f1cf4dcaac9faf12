import pytest
import torch
from torch import Tensor, fx, nn

from llmc.passes.fx import WEIGHT_DTYPES
from llmc.passes.fx.merge_linears import MergeLinears


class Attention(nn.Module):
    def __init__(self, biases: tuple[bool, bool, bool]) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(16, n, bias=b) for n, b in zip((16, 8, 8), biases, strict=True))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.cat((self.v(y), self.q(x), self.k(x)), -1)


class Model(nn.Module):
    def __init__(self, biases: tuple[bool, bool, bool] = (False,) * 3, same: bool = True) -> None:
        super().__init__()
        self.embed, self.attention, self.router = nn.Embedding(32, 16), Attention(biases), nn.Linear(16, 4, bias=False)
        self.same = same

    def forward(self, input_ids: Tensor, position_ids: Tensor, logit_rows: Tensor) -> tuple[Tensor, Tensor]:
        x = self.embed(input_ids)
        return self.attention(x, x if self.same else x.tanh()), self.router(x)


def linears(module: fx.GraphModule) -> list[int]:
    nodes = module.graph.find_nodes(op="call_function", target=torch.ops.aten.linear.default)
    return sorted(n.meta["val"].shape[-1] for n in nodes)


@pytest.mark.parametrize("biases", [(False,) * 3, (True,) * 3])
def test_merges(biases: tuple[bool, bool, bool], export, run) -> None:
    module = export(Model(biases))
    before = run(module)
    assert MergeLinears()(module)
    assert linears(module) == [4, 32], "rule 2: the router stays apart"
    torch.testing.assert_close(run(module), before)
    assert all("val" in n.meta for n in module.graph.nodes if n.op != "output")
    assert not MergeLinears()(module), "a second run changes nothing"


def test_rule_1_leaves_other_inputs_alone(export, run) -> None:
    module = export(Model(same=False))
    before = run(module)
    assert MergeLinears()(module)
    assert linears(module) == [4, 8, 24]
    torch.testing.assert_close(run(module), before)


def test_rule_3_keeps_those_without_bias_apart(export) -> None:
    module = export(Model((True, False, False)))
    assert MergeLinears()(module)
    assert linears(module) == [4, 16, 16]


def test_rule_4_keeps_dtypes_apart(export) -> None:
    module = export(Model())
    module.meta[WEIGHT_DTYPES] = {
        f"attention.{name}.weight": dtype for name, dtype in (("q", "bfloat16"), ("k", "bfloat16"), ("v", "float32"))
    }
    assert MergeLinears()(module)
    assert linears(module) == [4, 8, 24]


def test_leaves_single_linears_alone(export) -> None:
    module = export(Model((True, False, True), same=False))
    assert not MergeLinears()(module)
    assert linears(module) == [4, 8, 8, 16]
