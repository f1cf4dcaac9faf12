"""What passes ask of FX nodes, and how they add new ones."""

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

MODULE = "nn_module_stack"
INHERITED = (MODULE, "stack_trace")
"""What a new node takes over from the node that it replaces."""


def op_name(node: fx.Node) -> str:
    """``aten.mul`` or ``llmc.norm`` of a call, whatever its overload; ``getitem``; else the kind of node."""
    if node.op != "call_function":
        return node.op
    if node.target is operator.getitem:
        return "getitem"
    packet = getattr(node.target, "overloadpacket", None)
    return str(packet if packet is not None else getattr(node.target, "__name__", node.target))


def value(node: Any) -> Any:
    """The fake value: a tensor, a symbolic size, or a tuple of these; None where it is not known."""
    return node.meta.get("val") if isinstance(node, fx.Node) else None


def tensor(node: Any) -> Tensor | None:
    """The fake tensor, or None if the node is something else."""
    found = value(node)
    return found if isinstance(found, Tensor) else None


def is_dynamic(size: Any) -> bool:
    """Whether a size depends on T or N."""
    return isinstance(size, torch.SymInt) and not size.node.expr.is_number


def same_shape(a: Any, b: Any) -> bool:
    """Whether two nodes are tensors of the same shape, symbols included."""
    first, second = tensor(a), tensor(b)
    if first is None or second is None or first.dim() != second.dim():
        return False
    return all(str(x) == str(y) for x, y in zip(first.shape, second.shape, strict=True))


def arguments(node: fx.Node, names: Sequence[str]) -> list[Any]:
    """The values of these arguments of a call, positional or by keyword, else the default of the schema."""
    schema = node.target._schema  # type: ignore[union-attr]
    found = []
    for name in names:
        index, declared = next((i, a) for i, a in enumerate(schema.arguments) if a.name == name)
        default = declared.default_value if declared.has_default_value() else None
        found.append(node.args[index] if index < len(node.args) else node.kwargs.get(name, default))
    return found


def call(
    graph: fx.Graph, target: Any, args: tuple[Any, ...], like: fx.Node, kwargs: dict[str, Any] | None = None
) -> Any:
    """Add a call at the graph's insert point; its fake value is computed, its module is that of ``like``."""
    node = graph.call_function(target, args, kwargs or {})
    node.meta.update({key: like.meta[key] for key in INHERITED if key in like.meta})
    fake_args, fake_kwargs = fx.node.map_arg((node.args, node.kwargs), _known_value)
    node.meta["val"] = target(*fake_args, **fake_kwargs)
    return node


def replace(old: fx.Node, new: fx.Node) -> None:
    """Let the readers of ``old`` read ``new``, which keeps its own facts."""
    old.replace_all_uses_with(new, propagate_meta=False)


def add_buffer(module: fx.GraphModule, stem: str, data: Tensor) -> str:
    """Register a buffer under the stem and the next free number; returns its name."""
    number = 0
    while hasattr(module, f"{stem}_{number}"):
        number += 1
    module.register_buffer(f"{stem}_{number}", data, persistent=False)
    return f"{stem}_{number}"


def get_attr(module: fx.GraphModule, name: str, anchor: fx.Node) -> fx.Node:
    """The node that reads a buffer, at the top of the graph, so that any later node may use it.

    ``anchor`` is any node with a fake tensor: its fake mode is used.
    """
    known_nodes: list[fx.Node] = list(module.graph.find_nodes(op="get_attr", target=name))
    if known_nodes:
        return known_nodes[0]
    first = next(node for node in module.graph.nodes if node.op != "placeholder")
    with module.graph.inserting_before(first):
        node = module.graph.get_attr(name)
    known = tensor(anchor)
    assert known is not None, f"{anchor} has no fake tensor"
    buffer = module.get_buffer(name)
    node.meta["val"] = known.new_empty(buffer.shape, dtype=buffer.dtype)
    return node


def position_rows(module: fx.GraphModule) -> fx.Node:
    """position_ids without its batch axis: one node right after inputs and weights, so that any call may use it."""
    graph = module.graph
    position_ids: fx.Node = next(n for n in graph.find_nodes(op="placeholder") if n.name == "position_ids")
    first: fx.Node = next(node for node in graph.nodes if node.op not in ("placeholder", "get_attr"))
    for user in position_ids.users:
        if user.target is torch.ops.aten.select.int and user.args[1:] == (0, 0):
            if user is not first:
                first.prepend(user)
            return user
    with graph.inserting_before(first):
        made: fx.Node = call(graph, torch.ops.aten.select.int, (position_ids, 0, 0), position_ids)
    return made


def _known_value(node: fx.Node) -> Any:
    assert "val" in node.meta, f"{node} has no fake value"
    return node.meta["val"]
