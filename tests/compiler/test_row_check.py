"""Nothing but attention may mix the tokens of a step."""

from collections.abc import Callable

import exported
import pytest
import torch
from torch import Tensor, nn

from llmc.compiler.row_check import check_rows
from llmc.errors import CompileError
from llmc.passes.fx.clean_up import CleanUp


class Module(nn.Module):
    """A function of x [1, T, 6] and positions [1, T]."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.randn(6, 6, 3))

    def forward(self, input_ids: Tensor, position_ids: Tensor, logit_rows: Tensor) -> Tensor:
        x = input_ids.float()[..., None] * self.weight[0, :, 0]
        return self.function(x, position_ids)[:, logit_rows]


KEPT = {
    "pointwise": lambda x, p: (x * p[..., None]).relu() + x.sin(),
    "reductions of a row": lambda x, p: x.softmax(-1) + x.mean(-1, keepdim=True) + x.cumsum(-1),
    "reshape": lambda x, p: x.view(1, -1, 2, 3).transpose(1, 2).sum(1),
    "flattened experts": lambda x, p: x[0].repeat(4, 1).view(4, -1, 6).sum(0)[None],
    "repeated heads": lambda x, p: x.view(1, -1, 2, 3).repeat_interleave(2, 2).flatten(2),
    "choices": lambda x, p: x.gather(-1, x.topk(2, -1)[1]),
    "a table": lambda x, p: torch.arange(12.0).view(4, 3)[p % 4],
    "a product": lambda x, p: x @ torch.ones(6, 4),
    "rows of the batch": lambda x, p: x.reshape(-1, 6)[None],
}
MIXED = {
    "cumulative sum": lambda x, p: x.cumsum(1),
    "convolution": lambda x, p: nn.functional.conv1d(x.transpose(1, 2), torch.ones(6, 6, 3), padding=1).transpose(1, 2),
    "shift": lambda x, p: nn.functional.pad(x, (0, 0, 1, -1)),
    "roll": lambda x, p: x.roll(1, 1),
    "last token": lambda x, p: x + x[:, -1:],
    "mean": lambda x, p: x - x.mean(1, keepdim=True),
    "largest position": lambda x, p: x * p.max(),
    "scores": lambda x, p: (x @ x.transpose(1, 2)).softmax(-1) @ x,
    "reshape": lambda x, p: x.reshape(1, 6, -1).transpose(1, 2),
    "sorted tokens": lambda x, p: x[:, x[0, :, 0].argsort()],
    "counted tokens": lambda x, p: x + torch.arange(x.shape[1])[None, :, None],
    "a table cut to the tokens": lambda x, p: x + torch.arange(12e6).view(-1, 6)[: x.shape[1]],
    "product over tokens": lambda x, p: x @ (x.transpose(1, 2) @ x)[0],
}


def checked(function: Callable[[Tensor, Tensor], Tensor]) -> None:
    module = exported.export(Module(function))
    CleanUp()(module)
    check_rows(module)


@pytest.mark.parametrize("name", KEPT)
def test_rows_that_keep_to_themselves_pass(name: str) -> None:
    checked(KEPT[name])


@pytest.mark.parametrize("name", MIXED)
def test_rows_that_see_others_are_refused(name: str) -> None:
    with pytest.raises(CompileError, match="only attention may do that"):
        checked(MIXED[name])
