from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F  # noqa: N812 - its usual name

from llmc.passes.fx.form_norms import FormNorms


class Model(nn.Module):
    def __init__(self, norm: Callable[["Model", Tensor], Tensor]) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(32, 8), norm
        self.w, self.b = nn.Parameter(torch.rand(8)), nn.Parameter(torch.rand(8))

    def forward(self, input_ids: Tensor, position_ids: Tensor, logit_rows: Tensor) -> Tensor:
        return self.norm(self, self.embed(input_ids))


def norms(module: fx.GraphModule) -> list[str]:
    return [n.kwargs["kind"] for n in module.graph.nodes if n.target is torch.ops.llmc.norm.default]


@pytest.mark.parametrize(
    ("norm", "kind"),
    [
        (lambda m, x: F.layer_norm(x, (8,), m.w, m.b, 1e-3), "layer"),
        (lambda m, x: F.layer_norm(x, (8,)), "layer"),
        (lambda m, x: F.rms_norm(x, (8,), m.w, 1e-3), "rms"),
        (lambda m, x: F.rms_norm(x, (8,), m.w), "rms"),
    ],
)
def test_forms(norm: Callable[[Model, Tensor], Tensor], kind: str, export, run) -> None:
    module = export(Model(norm))
    before = run(module)
    assert FormNorms()(module)
    assert norms(module) == [kind]
    torch.testing.assert_close(run(module), before)
    assert not FormNorms()(module), "a second run changes nothing"


def test_rule_1_leaves_norms_of_two_axes_alone(export) -> None:
    module = export(Model(lambda m, x: F.layer_norm(x.view(1, -1, 2, 4), (2, 4))))
    assert not FormNorms()(module)
    assert norms(module) == []
