"""What parts of a traced graph compute, found by running them on chosen numbers."""

import enum
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx

from llmc.passes.fx.nodes import MODULE, value


class Source(enum.IntEnum):
    """What a node's value depends on."""

    CONSTANT = 0
    """Buffers, literals and sizes."""
    POSITION = 1
    """position_ids besides."""
    DATA = 2
    """Token ids, parameters, or anything computed from these."""


def classify(module: fx.GraphModule) -> dict[fx.Node, Source]:
    """For each node, what it depends on. Buffers without numbers (on the meta device) count as data."""
    found: dict[fx.Node, Source] = {}
    for node in module.graph.nodes:
        if node.op == "placeholder":
            found[node] = Source.POSITION if node.name == "position_ids" else Source.DATA
        elif node.op == "get_attr":
            attribute = _attribute(module, str(node.target))
            known = isinstance(attribute, Tensor) and not isinstance(attribute, torch.nn.Parameter)
            found[node] = Source.CONSTANT if known and not attribute.is_meta else Source.DATA
        elif _is_size(value(node)):
            found[node] = Source.CONSTANT
        elif node.op == "call_function":
            found[node] = max((found[i] for i in node.all_input_nodes), default=Source.CONSTANT)
        else:
            found[node] = Source.DATA
    return found


class Evaluator:
    """Values of nodes for these positions [T], as if they were the rows of one step.

    Nodes that depend on no data are computed once and kept.
    """

    def __init__(self, module: fx.GraphModule, positions: Tensor) -> None:
        self._module = module
        self._positions = positions
        self._kept: dict[fx.Node, Any] = {}
        places = module.graph.find_nodes(op="placeholder")
        self._position_ids = next(node for node in places if node.name == "position_ids")
        self._symbol = value(self._position_ids).shape[1].node.expr

    def run(self, wanted: fx.Node, given: Mapping[fx.Node, Tensor]) -> Any:
        """The value of a node, where those of others are given. Raises what torch raises if it can't be computed."""
        found: dict[fx.Node, Any] = dict(given)
        pending = [wanted]
        while pending:
            node = pending[-1]
            if node in found or node in self._kept:
                pending.pop()
            elif missing := [i for i in self._inputs(node) if i not in found and i not in self._kept]:
                pending += missing
            else:
                from_data = any(i in found for i in self._inputs(node))
                (found if from_data else self._kept)[node] = self._compute(node, found)
                pending.pop()
        return found.get(wanted, self._kept.get(wanted))

    def _inputs(self, node: fx.Node) -> list[fx.Node]:
        return [] if _is_size(value(node)) else node.all_input_nodes

    def _compute(self, node: fx.Node, found: Mapping[fx.Node, Any]) -> Any:
        size = value(node)
        if _is_size(size):
            return self.size(size)
        if node is self._position_ids:
            return self._positions[None]
        if node.op == "get_attr":
            return _attribute(self._module, str(node.target))
        if node.op != "call_function":
            raise ValueError(f"{node} is not known here")
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: found.get(n, self._kept.get(n)))
        args, kwargs = fx.node.map_aggregate((args, kwargs), _on_cpu)
        return node.target(*args, **kwargs)  # type: ignore[operator]

    def size(self, size: Any) -> Any:
        """A size with T replaced by the number of positions."""
        if not isinstance(size, torch.SymInt | torch.SymFloat | torch.SymBool):
            return size
        number = size.node.expr.subs({self._symbol: len(self._positions)})
        if not number.is_number:
            raise ValueError(f"the size {size} is not known here")
        return type(size.node.hint)(number) if size.node.has_hint() else int(number)


def module_path(node: fx.Node) -> str:
    """Path of the module that a node comes from, "" if it is not known."""
    stack = node.meta.get(MODULE) or {}
    return str(list(stack.values())[-1][0]) if stack else ""


def _attribute(module: fx.GraphModule, target: str) -> Any:
    found: Any = module
    for name in target.split("."):
        found = getattr(found, name)
    return found


def _is_size(found: Any) -> bool:
    return isinstance(found, int | float | torch.SymInt | torch.SymFloat | torch.SymBool)


def _on_cpu(argument: Any) -> Any:
    return torch.device("cpu") if isinstance(argument, torch.device) else argument
