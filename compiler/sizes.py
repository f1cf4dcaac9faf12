"""Symbolic sizes of a traced graph as sizes of a plan: linear in the tokens T and the logit rows N."""

from typing import Any

import torch
from torch import Tensor, fx

from llmc.errors import CompileError
from llmc.runtime.plan import Dim

_TRIED = ((1, 1), (2, 1), (3, 2), (7, 1), (64, 64), (1021, 5))
"""Pairs of T and N at which a formula has to hold; an expression such as Max(1, T) is linear in all that occur."""


class Sizes:
    """Translates the symbols of one graph."""

    def __init__(self, module: fx.GraphModule) -> None:
        inputs = {node.name: node.meta["val"] for node in module.graph.find_nodes(op="placeholder")}
        self._tokens = [_symbol(inputs[name], 1) for name in ("input_ids", "position_ids")]  # one, unless unused
        self._rows = _symbol(inputs["logit_rows"], 0)
        self._known: dict[str, Dim] = {}

    def dim(self, size: int | torch.SymInt) -> Dim:
        """The size as a formula.

        Raises:
            CompileError: it is not linear in T and N.
        """
        if not isinstance(size, torch.SymInt):
            return Dim(int(size))
        key = str(size)
        if key not in self._known:
            self._known[key] = self._linear(size.node.expr)
        return self._known[key]

    def dims(self, shape: Any) -> tuple[Dim, ...]:
        """Each size of a shape."""
        return tuple(self.dim(size) for size in shape)

    def _linear(self, expression: Any) -> Dim:
        if expression.is_number:
            return Dim(int(expression))
        at = {pair: self._at(expression, *pair) for pair in (*_TRIED, (1, 2))}
        tokens, rows = at[2, 1] - at[1, 1], at[1, 2] - at[1, 1]
        dim = Dim(at[1, 1] - tokens - rows, tokens, rows)
        if any(dim.at(*pair) != value for pair, value in at.items()):
            raise CompileError(
                f"a size of the graph is {expression}, which is not linear in the tokens {self._tokens[0]} and the "
                f"logit rows {self._rows}"
            )
        return dim

    def _at(self, expression: Any, tokens: int, rows: int) -> int:
        number = expression.subs({**dict.fromkeys(self._tokens, tokens), self._rows: rows})
        if not number.is_number:
            raise CompileError(f"a size of the graph is {expression}: it depends on the data")
        return int(number)


def _symbol(value: Any, axis: int) -> Any:
    size = value.shape[axis] if isinstance(value, Tensor) else value
    assert isinstance(size, torch.SymInt), f"the graph was traced for {size} rows only"
    return size.node.expr
