"""Rewrites in-place ops as functional ones."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from llmc.errors import CompileError
from llmc.passes.fx.base import FxPass
from llmc.passes.fx.nodes import call, is_dynamic, op_name, tensor

aten = torch.ops.aten

_SAME_MEMORY = frozenset(("aten.alias", "aten.detach", "aten.contiguous", "aten.to", "aten.lift_fresh"))
_RESHAPES = frozenset(
    ("aten.view", "aten.reshape", "aten.flatten", "aten.unflatten", "aten.unsqueeze", "aten.squeeze", "aten.view_as")
) | {"aten._unsafe_view", "aten.reshape_as"}
_SWAPS = frozenset(("aten.transpose", "aten.t", "aten.swapaxes", "aten.swapdims", "aten.numpy_T", "aten.mT"))
_LISTS = frozenset(("aten.split", "aten.chunk", "aten.split_with_sizes", "aten.tensor_split", "aten.unbind"))


class Functionalize(FxPass):
    """Give every node one value: ``op_(x)`` becomes ``y = op(x)``, and later readers of x read y.

    1. If x is a view, y is written back through the views into the tensor that owns the memory (slice_scatter,
       select_scatter, the inverse of a layout change), and other views of that tensor are taken anew where they are
       read.
    2. A change of a parameter or buffer, of a view that repeats elements (expand), and an op without a functional form
       are refused by name.
    """

    def call(self, module: fx.GraphModule) -> bool:
        """Rewrite the graph."""
        if not any(_is_in_place(node) for node in module.graph.nodes):
            return False
        rewriter = _Rewriter(module.graph)
        for node in list(module.graph.nodes):
            rewriter.visit(node)
        return True


def _is_in_place(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


class _Rewriter:
    """Walks the graph once, knowing at each node which earlier nodes share memory and what they hold by now."""

    def __init__(self, graph: fx.Graph) -> None:
        self._graph = graph
        self._parent: dict[fx.Node, fx.Node] = {}
        """View -> what it is a view of."""
        self._split: dict[fx.Node, fx.Node] = {}
        """Call that gives a list of views -> what they are views of."""
        self._newest: dict[fx.Node, fx.Node] = {}
        """Owner of memory that has been changed -> the node that has its contents now."""
        self._taken: dict[fx.Node, tuple[fx.Node, fx.Node]] = {}
        """View -> (contents of its owner, the view of these)."""

    def visit(self, node: fx.Node) -> None:
        """Let a node read what its inputs hold by now; if it changes one, replace it."""
        if node.op != "call_function":
            if node.op == "output":
                self._read_newest(node)
            return
        if _is_in_place(node):
            self._replace(node)
            return
        parent = self._split.get(node.args[0]) if op_name(node) == "getitem" else _view_of(node)  # type: ignore[arg-type]
        if op_name(node) in _LISTS and isinstance(node.args[0], fx.Node):
            self._split[node] = node.args[0]
        self._read_newest(node)
        if parent is not None:
            self._parent[node] = parent
            owner = self._owner(node)
            if owner in self._newest:
                self._taken[node] = (self._newest[owner], node)

    def _read_newest(self, node: fx.Node) -> None:
        for source in node.all_input_nodes:
            newest = self._now(source, node)
            if newest is not source:
                node.replace_input_with(source, newest)

    def _owner(self, node: fx.Node) -> fx.Node:
        while node in self._parent:
            node = self._parent[node]
        return node

    def _now(self, node: fx.Node, reader: fx.Node) -> fx.Node:
        """The node that holds what this one holds by now; a view is taken again, before the reader, if it has to be."""
        owner = self._owner(node)
        if owner not in self._newest:
            return node
        newest = self._newest[owner]
        if node is owner:
            return newest
        if node in self._taken and self._taken[node][0] is newest:
            return self._taken[node][1]
        source = self._now(self._parent[node], reader)
        with self._graph.inserting_before(reader):
            again = _retake(self._graph, node, source)
        self._taken[node] = (newest, again)
        return again

    def _replace(self, node: fx.Node) -> None:
        """Put the functional form in the place of an in-place op."""
        changed = node.args[0]
        assert isinstance(changed, fx.Node), f"{node.target} changes {changed}"
        owner = self._owner(changed)
        if op_name(node) != "aten.detach_":
            if owner.op == "get_attr":
                raise CompileError(
                    f"the model changes {owner.target} while it runs ({node.target}), which is not supported"
                )
            self._read_newest(node)
            with self._graph.inserting_before(node):
                result = _functional(self._graph, node)
                self._store(changed, result, node)
            if changed is not owner:
                self._taken[changed] = (self._newest[owner], result)
        node.replace_all_uses_with(changed, propagate_meta=False)
        self._graph.erase_node(node)

    def _store(self, target: fx.Node, contents: fx.Node, reader: fx.Node) -> None:
        """From now on ``target`` holds ``contents``; what it is a view of changes with it."""
        if target not in self._parent:
            self._newest[target] = contents
            return
        parent = self._parent[target]
        whole = self._now(parent, reader)
        self._store(parent, _write_back(self._graph, target, whole, contents), reader)


def _view_of(node: fx.Node) -> fx.Node | None:
    """What a node is a view of, if it shares the memory of an input."""
    schema = getattr(node.target, "_schema", None)
    if schema is None or not node.args or not isinstance(node.args[0], fx.Node) or op_name(node) in _LISTS:
        return None
    declared = schema.arguments[0].alias_info
    return node.args[0] if declared is not None and _shares_memory(node) else None


def _shares_memory(node: fx.Node) -> bool:
    """Whether the output is a view indeed: reshape, contiguous and to copy only where they must."""
    target: Any = node.target
    args: Any = fx.node.map_arg(node.args, lambda n: n.meta["val"])
    kwargs: Any = fx.node.map_arg(node.kwargs, lambda n: n.meta["val"])
    result = target(*args, **kwargs)
    if not isinstance(result, Tensor):
        return False
    same: bool = result.untyped_storage()._cdata == args[0].untyped_storage()._cdata
    return same


def _retake(graph: fx.Graph, view: fx.Node, source: fx.Node) -> fx.Node:
    """The same view of another tensor."""
    if op_name(view) == "getitem":
        dim, start, size, is_list_of_slices = _part(view)
        if is_list_of_slices:
            return _node(call(graph, aten.slice.Tensor, (source, dim, start, start + size), view))
        return _node(call(graph, aten.select.int, (source, dim, start), view))
    return _node(call(graph, view.target, (source, *view.args[1:]), view, dict(view.kwargs)))


def _write_back(graph: fx.Graph, view: fx.Node, whole: fx.Node, contents: fx.Node) -> fx.Node:
    """``whole`` with the part that ``view`` shows replaced by ``contents``."""
    name, rest = op_name(view), view.args[1:]
    if name == "aten.slice":
        return _node(call(graph, aten.slice_scatter.default, (whole, contents, *rest), view))
    if name == "aten.select":
        return _node(call(graph, aten.select_scatter.default, (whole, contents, *rest), view))
    if name == "getitem":
        dim, start, size, is_list_of_slices = _part(view)
        if is_list_of_slices:
            return _node(call(graph, aten.slice_scatter.default, (whole, contents, dim, start, start + size), view))
        return _node(call(graph, aten.select_scatter.default, (whole, contents, dim, start), view))
    if name in _SAME_MEMORY:
        return contents
    if name in _SWAPS:
        return _node(call(graph, view.target, (contents, *rest), view))
    if name == "aten.permute":
        permutation: Any = rest[0]
        order = [int(d) % len(permutation) for d in permutation]
        return _node(call(graph, aten.permute.default, (contents, [order.index(d) for d in range(len(order))]), view))
    if name in _RESHAPES:
        shape = [-1 if is_dynamic(size) else int(size) for size in _known(whole).shape]
        if shape.count(-1) < 2:
            return _node(call(graph, aten.reshape.default, (contents, shape), view))
    raise CompileError(f"a change in place through {view.target} ({view.name}) is not supported")


def _part(item: fx.Node) -> tuple[int, int, int, bool]:
    """(dim, first index, size, whether parts are slices) of an item of a split."""
    source, index = item.args
    assert isinstance(source, fx.Node) and isinstance(index, int), f"{item} is not an item of a split"
    unbinds = op_name(source) == "aten.unbind"
    dim = source.args[1 if unbinds else 2] if len(source.args) > (1 if unbinds else 2) else source.kwargs.get("dim", 0)
    assert isinstance(dim, int), f"{source} splits along {dim}"
    if unbinds:
        return dim, index, 1, False
    sizes = [int(part.shape[dim]) for part in source.meta["val"]]
    return dim, sum(sizes[:index]), sizes[index], True


def _functional(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """The op without the underscore, with the dtype of the tensor that was to change."""
    target: Any = node.target
    changed = _known(node.args[0])
    name = op_name(node).removeprefix("aten.")
    if name == "copy_":
        return _filled(graph, node, node.args[1], changed)
    if name in ("fill_", "zero_"):
        number = node.args[1] if name == "fill_" else 0
        if isinstance(number, fx.Node):
            return _filled(graph, node, number, changed)
        return _node(call(graph, aten.full_like.default, (node.args[0], number), node))
    spelling = {"__iand__": "bitwise_and", "__ior__": "bitwise_or", "__ixor__": "bitwise_xor"}.get(name, name[:-1])
    packet = getattr(aten, spelling, None)
    overload = getattr(packet, target._overloadname, None)
    if overload is None or overload._schema.is_mutable or torch.Tag.nondeterministic_seeded in target.tags:
        raise CompileError(f"the model uses {target}, which is not supported")
    result = _node(call(graph, overload, node.args, node, dict(node.kwargs)))
    if _known(result).dtype != changed.dtype:
        result = _node(call(graph, aten.to.dtype, (result, changed.dtype), node))
    return result


def _filled(graph: fx.Graph, node: fx.Node, source: Any, changed: Tensor) -> fx.Node:
    """``source`` with the dtype and the shape of the tensor that it is copied into."""
    value = _known(source)
    if value.dtype != changed.dtype:
        source = _node(call(graph, aten.to.dtype, (source, changed.dtype), node))
    if [str(s) for s in value.shape] != [str(s) for s in changed.shape]:
        source = _node(call(graph, aten.expand_as.default, (source, node.args[0]), node))
    return _node(source)


def _known(node: Any) -> Tensor:
    found = tensor(node)
    assert found is not None, f"{node} has no fake tensor"
    return found


def _node(value: Any) -> fx.Node:
    assert isinstance(value, fx.Node), f"{value} is no node"
    return value
