"""Sibling linears of one input (query, key and value; gate and up) -> one linear and a split."""

import operator
from collections import defaultdict
from collections.abc import Hashable

import torch
from torch import fx

from llmc.passes.fx.base import WEIGHT_DTYPES, FxPass
from llmc.passes.fx.nodes import call, replace, tensor

aten = torch.ops.aten


class MergeLinears(FxPass):
    """linear(x, a), linear(x, b), ... -> split(linear(x, cat(a, b, ...))).

    1. They read the same x.
    2. Their weights are parameters of modules with the same parent; so a router, which is kept in high precision, stays
       apart from the experts' neighbours.
    3. All have a bias, or none has.
    4. The checkpoint stores all weights in the same dtype, and all biases.
    """

    runs_after = ("CleanUp", "FormLinears", "FuseRope", "FuseGlu", "FuseAddNorm")

    def call(self, module: fx.GraphModule) -> bool:
        """See FxPass."""
        dtypes = module.meta.get(WEIGHT_DTYPES, {})
        groups: dict[Hashable, list[fx.Node]] = defaultdict(list)
        for node in module.graph.find_nodes(op="call_function", target=aten.linear.default):
            _, weight, bias = (*node.args, None)[:3]
            parameters = [p for p in (weight, bias) if p is not None]
            if not all(isinstance(p, fx.Node) and p.op == "get_attr" for p in parameters):
                continue
            names = [str(p.target) for p in parameters if isinstance(p, fx.Node)]
            parent = names[0].rsplit(".", 2)[0]
            groups[node.args[0], parent, len(names), *map(dtypes.get, names)].append(node)
        siblings = [group for group in groups.values() if len(group) > 1]
        for group in siblings:
            _merge(module.graph, group)
        return bool(siblings)


def _merge(graph: fx.Graph, linears: list[fx.Node]) -> None:
    first = linears[0]
    order = {node: number for number, node in enumerate(graph.nodes)}
    inputs = [first.args[0]]
    with graph.inserting_before(first):
        for parameters in list(zip(*(node.args[1:] for node in linears), strict=True)):
            if None in parameters:
                continue
            for parameter in parameters:
                assert isinstance(parameter, fx.Node), "rule 2"
                if order[parameter] > order[first]:
                    first.prepend(parameter)
            inputs.append(call(graph, aten.cat.default, (list(parameters),), first))
        product = call(graph, aten.linear.default, tuple(inputs), first)
        sizes = [int(_weight_rows(node)) for node in linears]
        parts = call(graph, aten.split_with_sizes.default, (product, sizes, -1), first)
        outputs = [call(graph, operator.getitem, (parts, i), node) for i, node in enumerate(linears)]
    for node, output in zip(linears, outputs, strict=True):
        replace(node, output)
        graph.erase_node(node)


def _weight_rows(linear: fx.Node) -> int:
    weight = tensor(linear.args[1])
    assert weight is not None, f"{linear}: the weight has no fake value"
    return int(weight.shape[0])
