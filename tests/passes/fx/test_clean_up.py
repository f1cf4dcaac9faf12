"""CleanUp: each rule, one near miss for each, and a second run that changes nothing."""

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx, nn

from llmc.passes.fx.clean_up import CleanUp
from llmc.passes.fx.functionalize import Functionalize
from llmc.passes.fx.nodes import op_name

Export = Callable[[nn.Module], fx.GraphModule]
Run = Callable[[fx.GraphModule], list[Tensor]]


class Module(nn.Module):
    """A function of ids as floats [1, T, 6] and a weight [6, 6], as the module to export."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.randn(6, 6))

    def forward(self, input_ids: Tensor, position_ids: Tensor, logit_rows: Tensor) -> Tensor:
        return self.function(input_ids.float()[..., None] * self.weight[0], self.weight)[:, logit_rows]


@pytest.fixture
def cleaned(export: Export, run: Run) -> Callable[[Callable[[Tensor, Tensor], Tensor]], Counter[str]]:
    """The ops that are left; the numbers are the same, and a second run changes nothing."""

    def call(function: Callable[[Tensor, Tensor], Tensor]) -> Counter[str]:
        module = export(Module(function))
        (expected,) = run(module)
        Functionalize()(module)
        CleanUp()(module)
        (found,) = run(module)
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
        assert not CleanUp()(module)
        kinds = [node.op for node in module.graph.nodes]
        assert kinds == sorted(kinds, key=["placeholder", "get_attr", "call_function", "output"].index)
        return Counter(op_name(n) for n in module.graph.nodes if n.op == "call_function")

    return call


Cleaned = Callable[[Callable[[Tensor, Tensor], Tensor]], Counter[str]]


def test_what_passes_its_input_on_goes(cleaned: Cleaned) -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        y = nn.functional.dropout(x.clone().contiguous().detach(), 0.5, training=False)
        y = y.to(torch.float32).view(1, -1, 6).expand(1, -1, 6)[..., 0:6]
        return (y * 1.0 + 0) / 1

    assert not cleaned(function).keys() & {"aten.clone", "aten.dropout", "aten.to.dtype", "aten.expand", "aten.div"}
    assert cleaned(function)["aten.mul"] == 1  # the one that makes x
    assert cleaned(function)["aten.add"] == 0


def test_what_changes_something_stays(cleaned: Cleaned) -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        y = x.to(torch.float64).to(torch.float32)  # rounds nothing away here, but the dtype does change
        return (y * 1.5 + 0.5)[..., 1:6].expand(1, -1, 5)

    found = cleaned(function)
    assert found["aten.to"] == 3  # one more makes floats of the ids
    assert (found["aten.mul"], found["aten.add"]) == (2, 1)
    assert found["aten.slice"] == 1


def test_a_sum_with_an_integer_zero_that_makes_floats_stays(export: Export) -> None:
    class Promote(nn.Module):
        def forward(self, input_ids: Tensor, position_ids: Tensor, logit_rows: Tensor) -> Tensor:
            return (input_ids * 1.0)[:, logit_rows]

    module = export(Promote())
    CleanUp()(module)
    assert "aten.mul" in {op_name(n) for n in module.graph.nodes}


def test_equal_calls_are_merged(cleaned: Cleaned) -> None:
    assert cleaned(lambda x, w: torch.cat([x.sin(), x.sin(), x.cos()], -1))["aten.sin"] == 1


def test_calls_that_differ_in_a_literal_are_not_merged(cleaned: Cleaned) -> None:
    found = cleaned(lambda x, w: torch.cat([x.clamp(max=3), x.clamp(max=3.5), x.clamp(min=3)], -1))
    assert found["aten.clamp"] == 3


def test_a_weight_is_read_once(export: Export) -> None:
    module = export(Module(lambda x, w: (x @ w) @ w))
    CleanUp()(module)
    assert len(module.graph.find_nodes(op="get_attr")) == 1


def test_attention_is_never_merged(export: Export) -> None:
    class Twice(nn.Module):
        def forward(self, input_ids: Tensor, position_ids: Tensor, logit_rows: Tensor) -> Tensor:
            q = input_ids[0, :, None, None].float().expand(-1, 2, 4)
            options = {"slot": 0, "write": True, "scale": 1.0, "window": 0, "chunk": 0, "softcap": 0.0}
            attend = torch.ops.llmc.paged_attention
            return (attend(q, q, q, None, None, **options) + attend(q, q, q, None, None, **options))[logit_rows]

    module = export(Twice())
    CleanUp()(module)
    assert sum(op_name(n) == "llmc.paged_attention" for n in module.graph.nodes) == 2


def test_reshapes_name_no_symbol(export: Export) -> None:
    module = export(Module(lambda x, w: x.view(1, x.shape[1], 2, 3).transpose(1, 2).reshape(1, 2, x.shape[1] * 3)))
    CleanUp()(module)
    assert "aten.sym_size" not in {op_name(n) for n in module.graph.nodes}


def test_slices_that_fill_a_tensor_are_a_cat(cleaned: Cleaned) -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        y = x.new_empty(1, x.shape[1], 10)
        y[..., 4:] = x
        y[..., :4] = x[..., :4] * 2
        return y

    found = cleaned(function)
    assert found["aten.cat"] == 1
    assert not found.keys() & {"aten.slice_scatter", "aten.new_empty"}


def test_slices_that_leave_a_gap_are_no_cat(cleaned: Cleaned) -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        y = x.new_zeros(1, x.shape[1], 10)
        y[..., 5:] = x[..., :5]
        y[..., :4] = x[..., :4] * 2
        return y

    found = cleaned(function)
    assert found["aten.cat"] == 0
    assert found["aten.slice_scatter"] == 2
