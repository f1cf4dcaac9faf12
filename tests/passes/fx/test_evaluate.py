import pytest
import torch
from torch import Tensor, nn

from llmc.passes.fx.evaluate import Evaluator, Source, classify, module_path
from llmc.passes.fx.nodes import op_name


class Inner(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.tanh()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.scale, self.inner = nn.Embedding(32, 4), nn.Parameter(torch.rand(4)), Inner()
        self.register_buffer("step", torch.arange(4.0), persistent=False)

    def forward(self, input_ids: Tensor, position_ids: Tensor, logit_rows: Tensor) -> Tensor:
        angle = torch.sin(position_ids[:, :, None] * self.step.exp()) + torch.ones(input_ids.shape[1], 1)
        return self.inner(self.embed(input_ids) * angle * self.scale.sqrt())


def test_classifies_by_what_a_value_depends_on(export) -> None:
    module = export(Model())
    found = {op_name(node): source for node, source in classify(module).items()}
    assert found["aten.exp"] is Source.CONSTANT
    assert found["aten.ones"] is Source.CONSTANT
    assert found["aten.sin"] is Source.POSITION
    assert found["aten.sqrt"] is Source.DATA, "a parameter"
    assert found["aten.embedding"] is Source.DATA


def test_buffers_without_numbers_are_data(export) -> None:
    module = export(Model())
    module._buffers["step"] = module.step.to("meta")
    found = {op_name(node): source for node, source in classify(module).items()}
    assert found["aten.exp"] is Source.DATA


def test_evaluates_at_positions_with_a_value_given(export) -> None:
    module = export(Model())
    nodes = {op_name(node): node for node in module.graph.nodes}
    positions = torch.tensor([7, 0, 100])
    evaluator = Evaluator(module, positions)
    angle = torch.sin(positions[None, :, None] * module.step.exp()) + 1
    torch.testing.assert_close(evaluator.run(nodes["aten.add"], {}), angle)
    given = torch.rand(1, 3, 4)
    (first,) = (n for n in nodes["aten.embedding"].users)
    torch.testing.assert_close(evaluator.run(first, {nodes["aten.embedding"]: given}), given * angle)
    torch.testing.assert_close(evaluator.run(first, {nodes["aten.embedding"]: 2 * given}), 2 * given * angle)


def test_says_what_it_does_not_know(export) -> None:
    module = export(Model())
    nodes = {op_name(node): node for node in module.graph.nodes}
    with pytest.raises(ValueError, match="input_ids is not known here"):
        Evaluator(module, torch.arange(3)).run(nodes["aten.embedding"], {})


def test_module_path(export) -> None:
    module = export(Model())
    assert {module_path(n) for n in module.graph.nodes if op_name(n) == "aten.tanh"} == {"inner"}
    assert module_path(next(iter(module.graph.nodes))) == ""
