import torch
from torch import Tensor, nn

from llmc.passes.fx.evaluate import classify
from llmc.passes.fx.nodes import op_name
from llmc.passes.fx.rope_regions import Region, find_regions, token_axis


class Model(nn.Module):
    """x [1, T, 2, 4] -> (x and its halves swapped, both scaled by position), rearranged; and what is none of that."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.weight = nn.Embedding(32, 8), nn.Parameter(torch.rand(4))

    def forward(self, input_ids: Tensor, position_ids: Tensor, logit_rows: Tensor) -> tuple[Tensor, ...]:
        x = self.embed(input_ids).tanh().view(1, -1, 2, 4).transpose(1, 2)
        cos = position_ids[:, None, :, None].float().cos()
        y = (x * cos + torch.cat((-x[..., 2:], x[..., :2]), -1) * cos).transpose(1, 2)
        by_weight = x * self.weight
        shifted = x + cos
        return y.exp(), by_weight.exp(), shifted.exp()


def regions(module: torch.fx.GraphModule) -> list[Region]:
    return list(find_regions(module.graph, classify(module)))


def test_finds_the_region_and_where_it_may_begin_and_end(export) -> None:
    module = export(Model())
    (region,) = regions(module)
    assert [op_name(n) for n in region.inputs] == ["aten.transpose", "aten.view", "aten.tanh"]
    assert [op_name(n) for n in region.outputs] == ["aten.add", "aten.transpose"]
    assert {op_name(n) for n in region.positions} == {"aten.cos"}


def test_token_axis(export) -> None:
    module = export(Model())
    (region,) = regions(module)
    assert [token_axis(n) for n in region.inputs] == [2, 1, 1]
    assert token_axis(next(n for n in module.graph.nodes if n.name == "input_ids")) is None, "the last axis"


def test_rope_tables_have_their_own_region_each(export) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(32, 8)

        def forward(self, input_ids: Tensor, position_ids: Tensor, logit_rows: Tensor) -> Tensor:
            x = self.embed(input_ids)
            cos = position_ids[..., None].float().cos()
            return (x.exp() * cos) @ (x.sin() * cos).transpose(1, 2)

    assert len(regions(export(Two()))) == 2
