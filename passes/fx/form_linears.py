"""Products with a weight, however they are spelled -> aten.linear."""

import torch
from torch import fx

from llmc.passes.fx.base import FxPass
from llmc.passes.fx.nodes import arguments, call, op_name, replace, tensor

aten = torch.ops.aten
TRANSPOSITIONS = ("aten.t", "aten.numpy_T", "aten.mT", "aten.transpose", "aten.permute")


class FormLinears(FxPass):
    """x @ w.T + b -> linear(x, w, b), so that later passes see one spelling.

    1. matmul, mm or addmm by a matrix that is a parameter, or the transpose of one. A parameter [in, out] (the Conv1D
       of GPT-2) is transposed by a node of its own, which is folded into the stored weight.
    2. A vector that is a parameter, added to a linear without a bias that nobody else reads, is its bias.
    """

    runs_after = ("CleanUp",)

    def call(self, module: fx.GraphModule) -> bool:
        """See FxPass."""
        nodes = list(module.graph.nodes)
        formed = [
            _form(module.graph, node) for node in nodes if op_name(node) in ("aten.matmul", "aten.mm", "aten.addmm")
        ]
        sums = [n for n in module.graph.nodes if n.target is aten.add.Tensor]
        biased = [_take_bias(module.graph, node) for node in sums]
        if not any(formed + biased):
            return False
        module.graph.eliminate_dead_code()
        return True


def _form(graph: fx.Graph, node: fx.Node) -> bool:
    bias: tuple[fx.node.Argument, ...] = ()
    x, weight = node.args[-2:]
    if op_name(node) == "aten.addmm":
        if arguments(node, ("beta", "alpha")) != [1, 1] or not _is_parameter(node.args[0], 1):
            return False
        bias = (node.args[0],)
        x, weight = node.args[1:3]
    assert isinstance(weight, fx.Node), f"{node} multiplies by no tensor"
    found = tensor(weight)
    if found is None or found.dim() != 2 or not isinstance(x, fx.Node) or (t := tensor(x)) is None or not t.dim():
        return False
    with graph.inserting_before(node):
        if _is_transposed_parameter(weight):
            stored = weight.args[0]
        elif _is_parameter(weight, 2):
            stored = call(graph, aten.t.default, (weight,), node)
        else:
            return False
        linear = call(graph, aten.linear.default, (x, stored, *bias), node)
    replace(node, linear)
    graph.erase_node(node)
    return True


def _is_parameter(node: object, rank: int) -> bool:
    """A weight, or a constant like it."""
    found = tensor(node)
    return isinstance(node, fx.Node) and node.op == "get_attr" and found is not None and found.dim() == rank


def _is_transposed_parameter(node: fx.Node) -> bool:
    return op_name(node) in TRANSPOSITIONS and _is_parameter(node.args[0], 2) and _swaps(node)


def _swaps(node: fx.Node) -> bool:
    """Whether both axes change places, which no more than one of the ways to write it leaves open."""
    rest = node.args[1:]
    if op_name(node) == "aten.transpose":
        return {int(a) % 2 for a in rest} == {0, 1}  # type: ignore[arg-type]
    if op_name(node) == "aten.permute":
        return [int(a) % 2 for a in arguments(node, ("dims",))[0]] == [1, 0]
    return True


def _take_bias(graph: fx.Graph, total: fx.Node) -> bool:
    if arguments(total, ("alpha",)) != [1]:
        return False
    for linear, bias in (total.args[:2], total.args[1::-1]):
        if not isinstance(linear, fx.Node) or linear.target is not aten.linear.default or len(linear.users) != 1:
            continue
        weight, has_bias = tensor(linear.args[1]), len(linear.args) > 2 and linear.args[2] is not None
        vector = tensor(bias)
        if has_bias or not _is_parameter(bias, 1) or weight is None or vector is None:
            continue
        if vector.shape[0] != weight.shape[0]:
            continue
        with graph.inserting_before(total):
            merged = call(graph, aten.linear.default, (*linear.args[:2], bias), linear)
        replace(total, merged)
        graph.erase_node(total)
        return True
    return False
