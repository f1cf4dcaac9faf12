"""Numbers the KV slots of attention calls, in call order."""

from collections.abc import Hashable

import torch
from torch import fx

from llmc.passes.fx.base import FxPass


class NumberSlots(FxPass):
    """Give each llmc::paged_attention its ``slot`` and ``write``.

    1. Calls are numbered in the order of the graph; layer indices of modules repeat in some models.
    2. A call on the same k and v as an earlier one reads that one's slot, and doesn't write it again.
    """

    runs_after = ("CleanUp",)

    def call(self, module: fx.GraphModule) -> bool:
        """Number the calls; k and v are compared by node, so common subexpressions have to be merged before."""
        slots: dict[Hashable, int] = {}
        changed = False
        for node in module.graph.find_nodes(op="call_function", target=torch.ops.llmc.paged_attention.default):
            key = node.args[1:3]
            found = {"write": key not in slots, "slot": slots.setdefault(key, len(slots))}
            if {name: node.kwargs[name] for name in found} != found:
                node.kwargs = {**node.kwargs, **found}
                changed = True
        return changed
