"""In-place ops: what they write is seen wherever the same memory is read, and nowhere else."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx, nn

from llmc.errors import CompileError
from llmc.passes.fx.functionalize import Functionalize

Export = Callable[[nn.Module], fx.GraphModule]
Run = Callable[[fx.GraphModule], list[Tensor]]


class Module(nn.Module):
    """A function of ids [1, T] as floats [1, T, 6], as the module to export."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, input_ids: Tensor, position_ids: Tensor, logit_rows: Tensor) -> Tensor:
        x = input_ids.float()[..., None] * torch.arange(1.0, 7.0)
        return self.function(x)[:, logit_rows]


def arithmetic(x: Tensor) -> Tensor:
    y = x + 1
    y.mul_(2).add_(x)
    y.clamp_(max=40)
    y /= 3
    return y


def through_a_slice(x: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    y[..., :2] = x[..., 4:]
    y[..., 2:] += x[..., :4]
    return y


def through_many_views(x: Tensor) -> Tensor:
    y = x.clone()
    y.view(1, -1, 2, 3).transpose(2, 3)[..., 1].mul_(-1)
    y.unsqueeze(0).squeeze(0).permute(2, 0, 1)[5].add_(100)
    return y


def a_view_sees_what_its_owner_gets(x: Tensor) -> Tensor:
    y = x.clone()
    view = y[..., 1:3]
    before = view * 1
    y.fill_(7)
    return torch.cat([view, before, y[..., :2]], -1)


def an_owner_sees_what_its_view_gets(x: Tensor) -> Tensor:
    y = x.clone()
    left, right = y.chunk(2, -1)
    left.zero_()
    right.copy_(left + 5)
    y.unbind(-1)[0].fill_(1)
    return y * 2


def a_reshape_that_copies_is_no_view(x: Tensor) -> Tensor:
    y = x.clone().transpose(1, 2)
    copy = y.reshape(1, -1)  # rows are no longer contiguous
    copy.zero_()
    return y.transpose(1, 2)


def a_cast_that_copies_is_no_view(x: Tensor) -> Tensor:
    y = x.clone()
    y.to(torch.float64).zero_()
    y.to(torch.float32).add_(1)
    return y


def masks_and_indices(x: Tensor) -> Tensor:
    y = x.clone()
    y.masked_fill_(y > 50, -1.0)
    y.scatter_(-1, torch.zeros_like(y[..., :1], dtype=torch.long), 3.0)
    y[..., torch.tensor([1, 3])] = 9.0
    return y


def broadcast_and_cast(x: Tensor) -> Tensor:
    y = torch.empty_like(x, dtype=torch.float64)
    y.copy_(x[..., :1])
    return y.float()


CASES = (
    arithmetic,
    through_a_slice,
    through_many_views,
    a_view_sees_what_its_owner_gets,
    an_owner_sees_what_its_view_gets,
    a_reshape_that_copies_is_no_view,
    a_cast_that_copies_is_no_view,
    masks_and_indices,
    broadcast_and_cast,
)


@pytest.mark.parametrize("function", CASES, ids=lambda f: f.__name__)
def test_in_place_ops_become_functional(function: Callable[[Tensor], Tensor], export: Export, run: Run) -> None:
    module = export(Module(function))
    (expected,) = run(module)
    assert Functionalize()(module)
    assert not any(
        node.target._schema.is_mutable for node in module.graph.nodes if isinstance(node.target, torch._ops.OpOverload)
    )
    (found,) = run(module)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert not Functionalize()(module)


def test_a_functional_graph_stays_as_it_is(export: Export) -> None:
    assert not Functionalize()(export(Module(lambda x: torch.relu(x + 1))))


def test_a_changed_buffer_is_refused(export: Export) -> None:
    class Counter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(6))

        def forward(self, input_ids: Tensor, position_ids: Tensor, logit_rows: Tensor) -> Tensor:
            self.seen.add_(1)
            return (input_ids[..., None] + self.seen)[:, logit_rows]

    module = export(Counter())
    with pytest.raises(CompileError, match="the model changes seen while it runs"):
        Functionalize()(module)


def test_a_change_through_a_repeating_view_is_refused(export: Export) -> None:
    def repeated(x: Tensor) -> Tensor:
        y = x[..., :1].clone()
        y.expand(-1, -1, 6).mul_(2)
        return y

    module = export(Module(repeated))
    with pytest.raises(CompileError, match=r"through aten\.expand"):
        Functionalize()(module)


def test_random_numbers_are_refused(export: Export) -> None:
    module = export(Module(lambda x: x.clone().uniform_()))
    with pytest.raises(CompileError, match=r"aten\.uniform_"):
        Functionalize()(module)
