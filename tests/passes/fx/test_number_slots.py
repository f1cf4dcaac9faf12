"""KV slots: one a call, in call order; calls on the same keys and values share one."""

from collections.abc import Callable

import torch
from torch import Tensor, fx, nn

from llmc.passes.fx.clean_up import CleanUp
from llmc.passes.fx.nodes import op_name
from llmc.passes.fx.number_slots import NumberSlots

OPTIONS = {"slot": 0, "write": True, "scale": 1.0, "window": 0, "chunk": 0, "softcap": 0.0}


class Calls(nn.Module):
    """Attention on (k, v), (k, w), and (k, v) again with other queries."""

    def forward(self, input_ids: Tensor, position_ids: Tensor, logit_rows: Tensor) -> Tensor:
        x = input_ids[0, :, None, None].float().expand(-1, 2, 4)
        k, v, w = x + 1, x + 2, x + 3
        y = sum(
            torch.ops.llmc.paged_attention(q, k, values, None, None, **OPTIONS)
            for q, values in ((x, v), (x, w), (x + 4, v))
        )
        return y[logit_rows]


def numbers(module: fx.GraphModule) -> list[tuple[int, bool]]:
    found = [n for n in module.graph.nodes if op_name(n) == "llmc.paged_attention"]
    return [(n.kwargs["slot"], n.kwargs["write"]) for n in found]


def test_calls_are_numbered_in_order_and_shared_slots_are_written_once(
    export: Callable[[nn.Module], fx.GraphModule],
) -> None:
    module = export(Calls())
    CleanUp()(module)
    assert NumberSlots()(module)
    assert numbers(module) == [(0, True), (1, True), (0, False)]
    assert not NumberSlots()(module)
