"""function(gate) * up -> llmc::glu."""

import torch
from torch import fx

from llmc.passes.fx.base import FxPass
from llmc.passes.fx.nodes import arguments, call, op_name, replace, same_shape

ATEN = {"aten.silu": "silu", "aten.relu": "relu", "aten.sigmoid": "sigmoid", "aten.tanh": "tanh"}
ACTIVATIONS = frozenset(("silu", "gelu", "gelu_tanh", "quick_gelu", "relu", "relu2", "sigmoid", "tanh", "softplus"))


class FuseGlu(FxPass):
    """function(gate) * up -> llmc::glu(gate, up).

    1. One factor is an activation: llmc::elementwise, or the same from torch. Of two, the left one.
    2. No other node reads the activation.
    3. The factors have the same shape.
    """

    runs_after = ("CleanUp",)

    def call(self, module: fx.GraphModule) -> bool:
        """See FxPass."""
        products = module.graph.find_nodes(op="call_function", target=torch.ops.aten.mul.Tensor)
        fused = [_try_fuse(module.graph, node) for node in products]
        if any(fused):
            module.graph.eliminate_dead_code()
        return any(fused)


def _try_fuse(graph: fx.Graph, product: fx.Node) -> bool:
    for gate, up in (product.args[:2], product.args[1::-1]):
        function = _activation(gate)
        if function is None or not isinstance(gate, fx.Node) or len(gate.users) != 1 or gate is up:
            continue
        if not same_shape(gate, up):
            continue
        with graph.inserting_before(product):
            fused = call(graph, torch.ops.llmc.glu.default, (gate.args[0], up), product, {"function": function})
        replace(product, fused)
        return True
    return False


def _activation(node: object) -> str | None:
    if not isinstance(node, fx.Node):
        return None
    name = op_name(node)
    if name == "llmc.elementwise":
        function = str(node.kwargs["function"])
        return function if function in ACTIVATIONS else None
    if name == "aten.gelu":
        return "gelu_tanh" if arguments(node, ("approximate",)) == ["tanh"] else "gelu"
    return ATEN.get(name)
