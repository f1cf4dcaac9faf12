"""Norms that a model calls as functions -> llmc::norm, as the norm modules are already."""

import torch
from torch import fx

from llmc.passes.fx.base import FxPass
from llmc.passes.fx.nodes import arguments, call, replace, tensor

KINDS = {torch.ops.aten.layer_norm.default: "layer", torch.ops.aten.rms_norm.default: "rms"}


class FormNorms(FxPass):
    """torch's layer_norm and rms_norm -> llmc::norm.

    1. They are over the last axis alone.
    """

    runs_after = ("CleanUp",)

    def call(self, module: fx.GraphModule) -> bool:
        """See FxPass."""
        formed = [_try_form(module.graph, node) for node in list(module.graph.nodes) if node.target in KINDS]
        return any(formed)


def _try_form(graph: fx.Graph, node: fx.Node) -> bool:
    kind = KINDS[node.target]  # type: ignore[index]
    x, shape, weight, epsilon = arguments(node, ("input", "normalized_shape", "weight", "eps"))
    found = tensor(x)
    if len(shape) != 1 or found is None:
        return False
    bias = arguments(node, ("bias",))[0] if kind == "layer" else None
    epsilon = torch.finfo(found.dtype).eps if epsilon is None else float(epsilon)
    with graph.inserting_before(node):
        attributes = {"epsilon": epsilon, "kind": kind, "offset": 0.0}
        norm = call(graph, torch.ops.llmc.norm.default, (x, weight, bias), node, attributes)
    replace(node, norm)
    graph.erase_node(node)
    return True
