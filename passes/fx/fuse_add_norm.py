"""norm(a + b) -> llmc::add_norm, which gives the sum and its norm."""

import operator

import torch
from torch import fx

from llmc.passes.fx.base import FxPass
from llmc.passes.fx.nodes import arguments, call, is_dynamic, op_name, replace, same_shape, tensor

aten = torch.ops.aten
VIEWS = frozenset(("aten.view", "aten.reshape", "aten._unsafe_view", "aten.squeeze", "aten.unsqueeze", "aten.flatten"))


class FuseAddNorm(FxPass):
    """norm(a + b) -> llmc::add_norm(a, b).

    1. a and b are tensors of the same shape, and neither is scaled by the addition.
    2. Of several norms of one sum, the first is fused; the others read the sum.
    3. Between sum and norm, the axes before the last may be merged or split.
    """

    runs_after = ("CleanUp", "FormLinears", "FormNorms", "FuseRope", "FuseGlu")

    def call(self, module: fx.GraphModule) -> bool:
        """See FxPass."""
        norms = module.graph.find_nodes(op="call_function", target=torch.ops.llmc.norm.default)
        fused = [_try_fuse(module.graph, node) for node in norms]
        if any(fused):
            module.graph.eliminate_dead_code()
        return any(fused)


def _try_fuse(graph: fx.Graph, norm: fx.Node) -> bool:
    read, *parameters = norm.args
    total = _through_views(read)
    if total is None or op_name(total) != "aten.add":
        return False
    a, b, alpha = total.args[0], total.args[1], arguments(total, ("alpha",))[0]
    if alpha != 1 or not same_shape(a, b) or not same_shape(a, total):
        return False
    order = {node: number for number, node in enumerate(graph.nodes)}
    for parameter in parameters:
        if isinstance(parameter, fx.Node) and order[parameter] > order[total]:
            if parameter.op != "get_attr":
                return False
            total.prepend(parameter)
    with graph.inserting_after(total):
        fused = call(graph, torch.ops.llmc.add_norm.default, (a, b, *parameters), norm, dict(norm.kwargs))
    with graph.inserting_after(fused):
        normed = call(graph, operator.getitem, (fused, 1), norm)
        summed = call(graph, operator.getitem, (fused, 0), total)
    if read is not total:
        with graph.inserting_before(norm):
            normed = call(graph, aten.reshape.default, (normed, _sizes(norm)), norm)
    replace(total, summed)
    replace(norm, normed)
    return True


def _through_views(node: object) -> fx.Node | None:
    """The tensor that a chain of views rearranges, as long as they leave the last axis alone."""
    while isinstance(node, fx.Node) and op_name(node) in VIEWS:
        before, after = tensor(node.args[0]), tensor(node)
        if before is None or after is None or str(before.shape[-1]) != str(after.shape[-1]):
            return None
        node = node.args[0]
    return node if isinstance(node, fx.Node) else None


def _sizes(node: fx.Node) -> list[int]:
    found = tensor(node)
    assert found is not None, f"{node} has no fake value"
    return [-1 if is_dynamic(size) else int(size) for size in found.shape]
