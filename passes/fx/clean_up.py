"""Drops what does nothing, merges what is computed twice, and orders the graph: inputs, weights, calls."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import fx

from llmc.passes.fx.base import FxPass
from llmc.passes.fx.nodes import call, is_dynamic, op_name, replace, same_shape, tensor

aten = torch.ops.aten

_CHECKS = frozenset(
    ("aten._assert_scalar", "aten._assert_tensor_metadata", "aten._assert_async", "aten.sym_constrain_range")
) | {"aten.sym_constrain_range_for_size", "aten._check_is_size"}
_COPIES = frozenset(
    ("aten.alias", "aten.detach", "aten.lift_fresh", "aten.lift_fresh_copy", "aten.contiguous", "aten.clone")
) | {"aten.dropout", "aten.feature_dropout", "aten.alpha_dropout"}
_CASTS = frozenset(("aten.to", "aten._to_copy", "aten.type_as"))
_LAYOUTS = frozenset(
    ("aten.view", "aten.reshape", "aten._unsafe_view", "aten.expand", "aten.expand_as", "aten.slice", "aten.flatten")
) | {"aten.view_as", "aten.reshape_as", "aten.narrow", "aten.squeeze", "aten.broadcast_to"}
_UNINITIALISED = frozenset(("aten.empty", "aten.new_empty", "aten.empty_like", "aten.zeros", "aten.new_zeros"))
_NOT_MERGED = frozenset(("llmc.paged_attention",))


class CleanUp(FxPass):
    """Make the graph as small as it can be without changing a number.

    1. Assertions go; inputs come first, then each weight once, then the calls.
    2. A copy, a cast to the same dtype, a layout change to the same shape, a product with 1, a sum with 0 and the
       dropout of an evaluated model are their input.
    3. reshape and expand name at most one size that changes, as -1.
    4. Slices that are written one after the other into a new tensor, and fill it, are a cat.
    5. Equal calls on equal inputs are one; paged attention is left out, since it writes the cache.
    6. What nobody reads goes. In-place ops would look unread, so they have to be gone before.
    """

    runs_after = ("Functionalize",)

    def call(self, module: fx.GraphModule) -> bool:
        """Run the rules until none applies."""
        graph = module.graph
        changed = _order(graph)
        while _drop_checks(graph) | _rewrite(graph) | _merge(graph) | _drop_unread(graph):
            changed = True
        return changed


def _order(graph: fx.Graph) -> bool:
    """Move placeholders, then weights, to the top."""
    head = [*graph.find_nodes(op="placeholder"), *graph.find_nodes(op="get_attr", sort=True)]
    if list(graph.nodes)[: len(head)] == head:
        return False
    for node in reversed(head):
        first = next(iter(graph.nodes))
        if first is not node:
            first.prepend(node)
    return True


def _drop_checks(graph: fx.Graph) -> bool:
    checks = [node for node in graph.nodes if op_name(node) in _CHECKS]
    for node in reversed(checks):
        graph.erase_node(node)
    return bool(checks)


def _rewrite(graph: fx.Graph) -> bool:
    """Rules 2 to 4."""
    changed = False
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        same = _unchanged_input(node)
        if same is not None:
            replace(node, same)
            graph.erase_node(node)
            changed = True
            continue
        rule = _RULES.get(op_name(node))
        if rule is not None and node.users:
            changed |= rule(graph, node)
    return changed


def _unchanged_input(node: fx.Node) -> fx.Node | None:
    """The input that a node only passes on."""
    name = op_name(node)
    source = node.args[0] if node.args else None
    if not isinstance(source, fx.Node):
        return None
    if name in _COPIES:
        return source
    before, after = tensor(source), tensor(node)
    if before is None or after is None or before.dtype != after.dtype or not same_shape(source, node):
        return None
    if name in _CASTS or name in _LAYOUTS:
        return source
    number = node.args[1] if len(node.args) > 1 else None
    if isinstance(number, int | float) and not isinstance(number, bool) and not node.kwargs:
        neutral = {"aten.mul": 1, "aten.div": 1, "aten.add": 0, "aten.sub": 0, "aten.pow": 1}
        if name in neutral and number == neutral[name]:
            return source
    return None


def _name_one_size(graph: fx.Graph, node: fx.Node) -> bool:
    """Rule 3 for reshape and view: [1, T, 4, 16] -> [1, -1, 4, 16]."""
    sizes = node.args[1]
    value = tensor(node)
    if value is None or not isinstance(sizes, list | tuple) or not any(isinstance(s, fx.Node) for s in sizes):
        return False
    shape = [-1 if is_dynamic(size) else int(size) for size in value.shape]
    if shape.count(-1) > 1:
        return False
    node.args = (node.args[0], shape)
    return True


def _keep_sizes(graph: fx.Graph, node: fx.Node) -> bool:
    """Rule 3 for expand: a size that stays is -1."""
    sizes, before, after = node.args[1], tensor(node.args[0]), tensor(node)
    if before is None or after is None or not isinstance(sizes, list | tuple):
        return False
    old = [None] * (after.dim() - before.dim()) + list(before.shape)
    shape = [-1 if str(a) == str(b) else size for a, b, size in zip(old, after.shape, sizes, strict=True)]
    if shape == list(sizes):
        return False
    node.args = (node.args[0], shape)
    return True


def _cat_of_slices(graph: fx.Graph, node: fx.Node) -> bool:
    """Rule 4."""
    if any(op_name(user) == "aten.slice_scatter" and user.args[0] is node for user in node.users):
        return False
    parts: list[tuple[int, int, fx.Node]] = []
    dims = set()
    base: Any = node
    while op_name(base) == "aten.slice_scatter":
        whole, part, dim, start, end, step = _slice_scatter_arguments(base)
        size = tensor(whole)
        if (
            size is None
            or step != 1
            or not all(isinstance(x, int) for x in (start, end))
            or is_dynamic(size.shape[dim])
        ):
            return False
        length = int(size.shape[dim])
        start, end = (max(0, min(length, x + length if x < 0 else x)) for x in (start, end))
        parts.append((start, end, part))
        dims.add(dim % size.dim())
        base = whole
    if op_name(base) not in _UNINITIALISED or len(dims) != 1:
        return False
    parts.sort(key=lambda p: p[0])
    dim = dims.pop()
    ends = [0, *(end for _, end, _ in parts)]
    value = tensor(node)
    if [start for start, _, _ in parts] != ends[:-1] or value is None or ends[-1] != int(value.shape[dim]):
        return False
    with graph.inserting_before(node):
        replace(node, call(graph, aten.cat.default, ([part for _, _, part in parts], dim), node))
    return True


def _slice_scatter_arguments(node: fx.Node) -> tuple[Any, ...]:
    defaults: tuple[Any, ...] = (None, None, 0, None, None, 1)
    arguments: tuple[Any, ...] = (*node.args, *defaults[len(node.args) :])
    whole, part, dim, start, end, step = arguments
    return whole, part, dim, start or 0, (1 << 62) if end is None else end, step


_RULES: dict[str, Callable[[fx.Graph, fx.Node], bool]] = {
    "aten.view": _name_one_size,
    "aten._unsafe_view": _name_one_size,
    "aten.reshape": _name_one_size,
    "aten.expand": _keep_sizes,
    "aten.slice_scatter": _cat_of_slices,
}


def _merge(graph: fx.Graph) -> bool:
    """Rule 5."""
    seen: dict[Hashable, fx.Node] = {}
    changed = False
    for node in list(graph.nodes):
        if node.op not in ("get_attr", "call_function") or op_name(node) in _NOT_MERGED:
            continue
        tags = getattr(node.target, "tags", ())
        if torch.Tag.nondeterministic_seeded in tags:
            continue
        key = (node.op, node.target, _frozen(node.args), _frozen(node.kwargs))
        first = seen.setdefault(key, node)
        if first is not node:
            replace(node, first)
            graph.erase_node(node)
            changed = True
    return changed


def _frozen(argument: Any) -> Hashable:
    """A hashable form, in which 1, 1.0 and True differ."""
    if isinstance(argument, list | tuple):
        return tuple(map(_frozen, argument))
    if isinstance(argument, dict):
        return tuple((key, _frozen(value)) for key, value in argument.items())
    if isinstance(argument, slice):
        return ("slice", _frozen((argument.start, argument.stop, argument.step)))
    return argument if isinstance(argument, fx.Node) else (type(argument), argument)


def _drop_unread(graph: fx.Graph) -> bool:
    """Rule 6."""
    changed = False
    for node in reversed(list(graph.nodes)):
        if node.op in ("call_function", "get_attr") and not node.users:
            graph.erase_node(node)
            changed = True
    return changed
