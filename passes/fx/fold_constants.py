"""What depends on no input and on no parameter is computed once, at build."""

import torch
from torch import Tensor, fx

from llmc.passes.fx.base import FxPass
from llmc.passes.fx.evaluate import Evaluator, Source, classify
from llmc.passes.fx.nodes import add_buffer, get_attr, is_dynamic, replace, tensor

MAX_ELEMENTS = 1 << 22
"""A larger constant is left in the graph as the ops that make it."""


class FoldConstants(FxPass):
    """A call on constants -> a buffer.

    1. It depends on buffers and literals alone, not on sizes that change, and is a tensor of at most ``MAX_ELEMENTS``.
    2. Some node reads it that can't be folded.
    """

    runs_after = ("CleanUp", "FuseRope")

    def call(self, module: fx.GraphModule) -> bool:
        """See FxPass."""
        sources = classify(module)
        constant = {n for n, source in sources.items() if source is Source.CONSTANT and _is_foldable(n)}
        frontier = [n for n in sources if n in constant and any(user not in constant for user in n.users)]
        if not frontier:
            return False
        evaluator = Evaluator(module, torch.zeros(0, dtype=torch.long))
        for node in frontier:
            found = evaluator.run(node, {})
            assert isinstance(found, Tensor), f"{node} is no tensor"
            name = add_buffer(module, "constant", found.detach().clone(memory_format=torch.contiguous_format))
            replace(node, get_attr(module, name, node))
        module.graph.eliminate_dead_code()
        return True


def _is_foldable(node: fx.Node) -> bool:
    found = tensor(node)
    if found is None or node.op != "call_function" or any(map(is_dynamic, found.shape)):
        return False
    inputs = [tensor(i) for i in node.all_input_nodes]
    if any(i is None or any(map(is_dynamic, i.shape)) for i in inputs):
        return False
    return found.numel() <= MAX_ELEMENTS
