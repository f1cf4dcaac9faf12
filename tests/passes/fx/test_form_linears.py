from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx, nn

from llmc.passes.fx.form_linears import FormLinears

aten = torch.ops.aten
Multiply = Callable[["Model", Tensor], Tensor]


class Model(nn.Module):
    def __init__(self, multiply: Multiply) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.weight, self.transposed = nn.Parameter(torch.rand(24, 16)), nn.Parameter(torch.rand(16, 24))
        self.bias, self.one = nn.Parameter(torch.rand(24)), nn.Parameter(torch.rand(1))
        self.multiply = multiply

    def forward(self, input_ids: Tensor, position_ids: Tensor, logit_rows: Tensor) -> Tensor:
        return self.multiply(self, self.embed(input_ids))


def linears(module: fx.GraphModule) -> list[int]:
    """The number of arguments of each."""
    return [len(n.args) for n in module.graph.find_nodes(op="call_function", target=aten.linear.default)]


@pytest.mark.parametrize(
    ("multiply", "arguments"),
    [
        (lambda m, x: x @ m.weight.T, 2),
        (lambda m, x: x @ m.weight.t(), 2),
        (lambda m, x: x @ m.weight.transpose(-1, -2), 2),
        (lambda m, x: x @ m.weight.permute(1, 0), 2),
        (lambda m, x: x @ m.transposed, 2),
        (lambda m, x: torch.addmm(m.bias, x[0], m.transposed), 3),
        (lambda m, x: torch.mm(x[0], m.weight.T) + m.bias, 3),
        (lambda m, x: m.bias + x @ m.weight.T, 3),
        (lambda m, x: nn.functional.linear(x, m.weight) + m.bias, 3),
    ],
)
def test_forms(multiply: Multiply, arguments: int, export, run) -> None:
    module = export(Model(multiply))
    before = run(module)
    assert FormLinears()(module)
    assert linears(module) == [arguments]
    torch.testing.assert_close(run(module), before)
    assert not FormLinears()(module), "a second run changes nothing"


@pytest.mark.parametrize(
    "multiply",
    [
        pytest.param(lambda m, x: x.transpose(1, 2) @ x, id="rule 1: two activations"),
        pytest.param(lambda m, x: x @ (m.weight * 2).T, id="rule 1: not the parameter itself"),
        pytest.param(lambda m, x: torch.addmm(m.bias, x[0], m.transposed, alpha=2), id="rule 1: scaled"),
        pytest.param(lambda m, x: x @ m.weight[:16].permute(0, 1), id="rule 1: not transposed, not whole"),
    ],
)
def test_leaves_near_misses_alone(multiply: Multiply, export) -> None:
    module = export(Model(multiply))
    assert not FormLinears()(module)
    assert linears(module) == []


@pytest.mark.parametrize(
    "multiply",
    [
        pytest.param(lambda m, x: nn.functional.linear(x, m.weight) + m.one, id="rule 2: one number"),
        pytest.param(lambda m, x: nn.functional.linear(x, m.weight, m.bias) + m.bias, id="rule 2: a second bias"),
        pytest.param(lambda m, x: (y := nn.functional.linear(x, m.weight)) * (y + m.bias), id="rule 2: read twice"),
        pytest.param(lambda m, x: nn.functional.linear(x, m.weight) + m.bias.exp(), id="rule 2: computed"),
    ],
)
def test_leaves_other_sums_alone(multiply: Multiply, export) -> None:
    module = export(Model(multiply))
    before = linears(module)
    assert not FormLinears()(module)
    assert linears(module) == before
