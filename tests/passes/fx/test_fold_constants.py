import torch
from torch import Tensor, nn

from llmc.passes.fx.fold_constants import FoldConstants


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.scale = nn.Embedding(32, 8), nn.Parameter(torch.rand(8))
        self.register_buffer("table", torch.rand(8), persistent=False)

    def forward(self, input_ids: Tensor, position_ids: Tensor, logit_rows: Tensor) -> tuple[Tensor, ...]:
        x = self.embed(input_ids)
        constant = torch.erfinv(self.table * 0.5) + torch.arange(8)
        by_size = x + torch.zeros(input_ids.shape[1], 1)
        return x * constant, x * self.scale.exp(), x + position_ids[:, :, None] * self.table, by_size


def test_folds_what_is_known(export, run) -> None:
    module = export(Model())
    before = run(module)
    assert FoldConstants()(module)
    names = [str(n.target) for n in module.graph.nodes if n.op == "call_function"]
    assert not any("erfinv" in name or "arange" in name for name in names)
    assert any("exp" in name for name in names), "rule 1: a parameter"
    assert any("zeros" in name for name in names), "rule 1: a size that changes"
    assert any("unsqueeze" in name for name in names), "rule 1: positions"
    assert [tuple(b.shape) for name, b in module.named_buffers() if name.startswith("constant")] == [(8,)]
    torch.testing.assert_close(run(module), before)
    assert not FoldConstants()(module), "a second run changes nothing"
