from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx, nn

from llmc.passes.fx.use_positions import UsePositions

Count = Callable[[Tensor], Tensor]


class Model(nn.Module):
    def __init__(self, count: Count) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 8)
        self.count = count

    def forward(self, input_ids: Tensor, position_ids: Tensor, logit_rows: Tensor) -> Tensor:
        return self.count(self.embed(input_ids)[0])


def counts(module: fx.GraphModule) -> int:
    return sum("arange" in str(n.target) for n in module.graph.nodes)


def tokens(x: Tensor) -> Tensor:
    return torch.arange(x.shape[0])


def test_replaces_counted_tokens(export) -> None:
    module = export(Model(lambda x: x * torch.log1p(torch.floor((tokens(x).float() + 1) / 4))[:, None]))
    positions = torch.tensor([[9, 10, 3]])
    assert UsePositions()(module)
    assert counts(module) == 0
    ids = torch.tensor([[1, 2, 3]])
    expected = module.embed.weight[ids[0]] * torch.log1p(torch.floor((positions[0].float() + 1) / 4))[:, None]
    torch.testing.assert_close(module(ids, positions, torch.tensor([0])), expected)
    assert not UsePositions()(module), "a second run changes nothing"


def test_whole_sequences_keep_their_numbers(export) -> None:
    module = export(Model(lambda x: x + torch.where(tokens(x) % 3 == 0, 1.0, 2.0)[:, None]))
    ids = torch.arange(5)[None]
    before = module(ids, ids, ids[0])
    assert UsePositions()(module)
    torch.testing.assert_close(module(ids, ids, ids[0]), before)


@pytest.mark.parametrize(
    "count",
    [
        pytest.param(lambda x: x * torch.arange(1, x.shape[0] + 1)[:, None], id="rule 1: from 1"),
        pytest.param(lambda x: x * torch.arange(8), id="rule 1: not the tokens"),
        pytest.param(lambda x: x[tokens(x), x.argmax(-1)], id="rule 2: an index of rows"),
        pytest.param(lambda x: x.flatten()[tokens(x) * 8 + x.argmax(-1)], id="rule 2: computed of it"),
        pytest.param(lambda x: x.gather(0, tokens(x)[:, None]), id="rule 2: gather"),
    ],
)
def test_leaves_near_misses_alone(count: Count, export) -> None:
    module = export(Model(count))
    assert not UsePositions()(module)
    assert counts(module) == 1


def test_tables_are_looked_up(export) -> None:
    """Rules 2 and 3: a table of a fixed size that is cut to, or indexed by, the number of tokens."""
    table = torch.arange(float(1 << 21))[:, None].sqrt()  # longer than any T, so that no bound on T is traced
    module = export(Model(lambda x: x + table[: x.shape[0]] + table[tokens(x)]))
    assert UsePositions()(module)
    assert counts(module) == 0
    ids, positions = torch.tensor([[1, 2, 3]]), torch.tensor([[9, 0, 3]])
    expected = module.embed.weight[ids[0]] + 2 * table[positions[0]]
    torch.testing.assert_close(module(ids, positions, torch.tensor([0])), expected)
    assert not UsePositions()(module), "a second run changes nothing"


def test_a_table_cut_behind_its_first_entry_stays(export) -> None:
    table = torch.arange(float(1 << 21))[:, None]
    assert not UsePositions()(export(Model(lambda x: x + table[1 : x.shape[0] + 1])))
