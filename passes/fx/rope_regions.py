"""Finds what may be rotary embeddings: what is linear in one tensor, with factors made from positions."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import fx

from llmc.passes.fx.evaluate import Source
from llmc.passes.fx.nodes import is_dynamic, op_name, tensor

LAYOUT = frozenset(
    f"aten.{name}"
    for name in (
        *("view", "reshape", "_unsafe_view", "flatten", "unflatten", "view_as", "expand_as", "expand", "broadcast_to"),
        *("transpose", "permute", "movedim", "swapaxes", "t", "numpy_T", "mT", "squeeze", "unsqueeze", "squeeze_copy"),
        *("slice", "select", "narrow", "split", "split_with_sizes", "chunk", "unbind", "tensor_split", "unsafe_split"),
        *("index", "index_select", "flip", "roll", "repeat", "repeat_interleave", "alias", "clone", "contiguous"),
        *("to", "_to_copy", "detach", "lift_fresh_copy", "view_as_complex", "view_as_real", "real", "imag", "neg"),
        *("constant_pad_nd", "pad"),
    )
) | {"getitem"}
"""One tensor that depends on the data in, rearranged; all other arguments are constant."""

SUMS = frozenset(
    f"aten.{name}"
    for name in (
        "add",
        "sub",
        "rsub",
        "cat",
        "concat",
        "stack",
        "complex",
        "slice_scatter",
        "select_scatter",
        "copy",
        "index_put",
    )
)
"""Every tensor among the operands depends on the data."""

PRODUCTS = frozenset(f"aten.{name}" for name in ("mul", "matmul", "mm", "bmm"))
"""Exactly one of the two factors depends on the data."""


@dataclass(frozen=True)
class Region:
    """Where a rotary embedding may begin and end: try the pairs in this order."""

    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    positions: frozenset[fx.Node]
    """The nodes outside that bring the positions in."""


def find_regions(graph: fx.Graph, sources: Mapping[fx.Node, Source]) -> Iterator[Region]:
    """Maximal regions.

    1. Every node inside is linear in its inputs that depend on the data (the sets above, and ``where`` and ``div``).
    2. All of them go back to one tensor, the anchor.
    3. Some product inside has a factor that depends on positions, and on no data.
    """
    anchor, rotated = _trace(graph, sources)
    for node in graph.nodes:
        if node not in anchor or not rotated[node] or tensor(node) is None:
            continue
        if any(anchor.get(user) is anchor[node] and rotated.get(user) for user in node.users):
            continue
        outputs = [node]
        while _is_layout_of_same_width(node := outputs[-1]) and rotated.get(_first(node)):
            outputs.append(_first(node))
        outputs.reverse()
        inside = _between(anchor[outputs[0]], outputs[0], sources)
        entering = {i for n in inside for i in n.all_input_nodes if sources[i] is Source.POSITION}
        inputs = _inputs(anchor[outputs[0]], outputs[0], inside, rotated)
        if entering and inputs:
            yield Region(tuple(inputs), tuple(outputs), frozenset(entering))


def _trace(graph: fx.Graph, sources: Mapping[fx.Node, Source]) -> tuple[dict[fx.Node, fx.Node], dict[fx.Node, bool]]:
    """For each node on data: the anchor that it is linear in, and whether a position-dependent factor lies between."""
    anchor: dict[fx.Node, fx.Node] = {}
    rotated: dict[fx.Node, bool] = {}
    for node in graph.nodes:
        if sources[node] is not Source.DATA or node.op == "output":
            continue
        data = [i for i in node.all_input_nodes if sources[i] is Source.DATA]
        anchors = {anchor[i] for i in data}
        if len(anchors) == 1 and _is_linear(node, sources):
            anchor[node] = anchors.pop()
            by_position = any(sources[i] is Source.POSITION for i in node.all_input_nodes)
            rotated[node] = by_position or any(rotated[i] for i in data)
        else:
            anchor[node], rotated[node] = node, False
    return anchor, rotated


def _is_linear(node: fx.Node, sources: Mapping[fx.Node, Source]) -> bool:
    def on_data(argument: object) -> bool:
        return isinstance(argument, fx.Node) and sources[argument] is Source.DATA

    name = op_name(node)
    data = [i for i in node.all_input_nodes if on_data(i)]
    if name in LAYOUT:
        return len(data) == 1 and node.args[0] is data[0]
    if name in SUMS:
        operands = node.args[0] if isinstance(node.args[0], list | tuple) else _sum_operands(node)
        return all(on_data(a) for a in operands) and set(data) == set(operands)
    if name in PRODUCTS:
        return len(data) == 1 and node.args[0] is not node.args[1]
    if name == "aten.div":
        return on_data(node.args[0]) and len(data) == 1 and node.kwargs.get("rounding_mode") is None
    if name == "aten.where":
        return len(node.args) == 3 and not on_data(node.args[0]) and on_data(node.args[1]) and on_data(node.args[2])
    return False


def _sum_operands(node: fx.Node) -> list[fx.node.Argument]:
    return [node.args[0], node.args[2]] if op_name(node) == "aten.index_put" else list(node.args[:2])


def _first(node: fx.Node) -> fx.Node:
    first = node.args[0]
    assert isinstance(first, fx.Node), f"{node} rearranges no tensor"
    return first


def _is_layout_of_same_width(node: fx.Node) -> bool:
    if op_name(node) not in LAYOUT or op_name(node) in ("getitem", "aten.slice", "aten.index", "aten.index_select"):
        return False
    before, after = tensor(node.args[0]), tensor(node)
    if before is None or after is None or not before.dim() or not after.dim():
        return False
    return str(before.shape[-1]) == str(after.shape[-1]) and before.dtype == after.dtype


def _between(start: fx.Node, end: fx.Node, sources: Mapping[fx.Node, Source]) -> set[fx.Node]:
    inside: set[fx.Node] = set()
    pending = [end]
    while pending:
        node = pending.pop()
        if node in inside or sources[node] is not Source.DATA or node is start:
            continue
        inside.add(node)
        pending += node.all_input_nodes
    return inside


def _inputs(start: fx.Node, end: fx.Node, inside: set[fx.Node], rotated: Mapping[fx.Node, bool]) -> list[fx.Node]:
    """The anchor and what layout ops make of it before it forks, the last of them first."""
    chain = [start]
    while True:
        users = [user for user in chain[-1].users if user in inside]
        if len(users) != 1 or users[0] is end or op_name(users[0]) not in LAYOUT or rotated[users[0]]:
            break
        chain.append(users[0])
    return [node for node in reversed(chain) if _has_token_axis(node)]


def _has_token_axis(node: fx.Node) -> bool:
    found = tensor(node)
    return found is not None and found.dtype.is_floating_point and sum(map(is_dynamic, found.shape)) == 1


def token_axis(node: fx.Node) -> int | None:
    """The axis of the packed tokens; None unless it alone changes in size, is whole, and is not the last."""
    found = tensor(node)
    if found is None or not isinstance(found, torch.Tensor):
        return None
    axes = [i for i, size in enumerate(found.shape) if is_dynamic(size)]
    if len(axes) != 1 or axes[0] == found.dim() - 1:
        return None
    return axes[0] if found.shape[axes[0]].node.expr.is_symbol else None  # type: ignore[attr-defined]
