"""Torch ops that have no converter are taken apart into ops that have, by torch's own decompositions."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch._decomp import core_aten_decompositions, decomposition_table
from torch.fx.experimental.proxy_tensor import make_fx

from llmc.passes.fx.nodes import INHERITED, op_name

MAX_ROUNDS = 4
"""Decompositions may give ops that have to be decomposed again."""


def decompose(module: fx.GraphModule, is_known: Callable[[fx.Node], bool]) -> None:
    """Replace calls of unknown ops by what torch says that they are; those that torch takes for basic stay."""
    for _ in range(MAX_ROUNDS):
        unknown = [n for n in module.graph.nodes if _is_candidate(n) and not is_known(n)]
        if not any([_inline(module.graph, node, is_known) for node in unknown]):
            break
    module.graph.eliminate_dead_code()
    module.graph.lint()
    module.recompile()


def _is_candidate(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and isinstance(node.meta.get("val"), Tensor | tuple | list)


def _inline(graph: fx.Graph, node: fx.Node, is_known: Callable[[fx.Node], bool]) -> bool:
    """Put the nodes of its decomposition in the place of a call. Returns whether torch has one that helps."""
    inputs = node.all_input_nodes
    traced = _trace(node, inputs)
    if traced is None or any(n.target is node.target for n in traced.graph.nodes):
        return False
    if any(op_name(n).startswith("prims.") and not is_known(n) for n in traced.graph.nodes):
        return False
    places = traced.graph.find_nodes(op="placeholder")
    known: dict[fx.Node, Any] = dict(zip(places, inputs, strict=True))
    with graph.inserting_before(node):
        for inner in traced.graph.nodes:
            if inner.op == "get_attr":  # a constant of the decomposition
                return False
            if inner.op == "call_function":
                copied = graph.node_copy(inner, lambda n: known[n])
                copied.meta.update({key: node.meta[key] for key in INHERITED if key in node.meta})
                known[inner] = copied
    (output,) = traced.graph.find_nodes(op="output")
    result = output.args[0]
    if isinstance(result, fx.Node):
        node.replace_all_uses_with(known[result], propagate_meta=False)
        graph.erase_node(node)
        return True
    assert isinstance(result, list | tuple), f"{node}: a decomposition gives {result}"
    for user in list(node.users):
        part = result[user.args[1]]  # type: ignore[index]
        assert isinstance(part, fx.Node), f"{node}: a part that is not computed is read"
        user.replace_all_uses_with(known[part], propagate_meta=False)
        graph.erase_node(user)
    graph.erase_node(node)
    return True


def _trace(node: fx.Node, inputs: list[fx.Node]) -> fx.GraphModule | None:
    target = node.target
    assert isinstance(target, torch._ops.OpOverload), f"{node} calls no op"
    table = _table(target)

    def run(*values: Any) -> Any:
        given = dict(zip(inputs, values, strict=True))
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), given.__getitem__)
        if target not in table:
            composite = target.decompose(*args, **kwargs)
            if composite is NotImplemented:
                raise LookupError
            return composite
        return target(*args, **kwargs)

    try:
        with torch.no_grad():
            return make_fx(run, decomposition_table=dict(table), _allow_non_fake_inputs=True)(
                *(n.meta["val"] for n in inputs)
            )
    except LookupError:
        return None


def _table(target: torch._ops.OpOverload) -> Mapping[Any, Callable[..., Any]]:
    """The core decompositions, and that of the op itself if torch has one that is not core."""
    table: dict[Any, Callable[..., Any]] = core_aten_decompositions()
    if target not in table and target in decomposition_table:
        table = {**table, target: decomposition_table[target]}
    return table
