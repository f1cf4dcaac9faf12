"""Checks that nothing but attention mixes the rows of a step along T, the axis of packed tokens.

A model may equal Hugging Face on one sequence and be wrong as soon as two share a step: by a convolution over time, a
cumulative sum, a shift by one token, positions that it counts by itself. Such a graph must not become an engine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx

from llmc.errors import CompileError
from llmc.passes.fx.nodes import MODULE, is_dynamic, op_name, tensor

Layout = tuple[int, int]
"""(outer, inner) of the axis that holds T: its index is (outer index * T + row) * inner + inner index."""

_NEW_LAYOUT = frozenset(
    f"aten.{name}"
    for name in (
        *("view", "reshape", "_unsafe_view", "flatten", "unflatten", "view_as", "reshape_as", "squeeze", "unsqueeze"),
        *("transpose", "permute", "t", "numpy_T", "mT", "swapaxes", "movedim", "expand", "expand_as", "broadcast_to"),
        *(
            "stack",
            "clone",
            "contiguous",
            "alias",
            "detach",
            "to",
            "_to_copy",
            "type_as",
            "sym_size",
            "view_as_complex",
        ),
        *("view_as_real", "lift_fresh_copy", "broadcast_tensors", "real", "imag"),
    )
)
_RESHAPES = frozenset(
    (
        "aten.view",
        "aten.reshape",
        "aten._unsafe_view",
        "aten.flatten",
        "aten.unflatten",
        "aten.view_as",
        "aten.reshape_as",
    )
)
_ROW_BY_ROW = frozenset(
    f"aten.{name}"
    for name in (
        *("embedding", "one_hot", "full_like", "zeros_like", "ones_like", "empty_like", "new_zeros", "new_ones"),
        *(
            "new_full",
            "new_empty",
            "full",
            "zeros",
            "ones",
            "empty",
            "where",
            "masked_fill",
            "dropout",
            "isin",
            "bernoulli",
        ),
        *(
            "__or__",
            "__and__",
            "__xor__",
            "triu",
            "tril",
            "multiply",
            "divide",
            "subtract",
            "absolute",
            "clip",
            "bucketize",
            "copy",
            "scalar_tensor",
            "masked_scatter",
            "fill",
            "polar",
        ),
    )
)
"""Besides those that torch tags as pointwise."""
_PRODUCTS = frozenset(("aten.matmul", "aten.mm", "aten.bmm", "aten.linear", "aten.addmm", "aten.baddbmm"))
_REDUCTIONS = frozenset(
    f"aten.{name}" for name in ("sum", "mean", "max", "min", "prod", "any", "all", "argmax", "argmin", "amax", "amin")
) | {"aten.var", "aten.std", "aten.norm", "aten.linalg_vector_norm", "aten.var_mean", "aten.count_nonzero"}
_COUNTERS = frozenset(("aten.arange", "aten.linspace", "aten.eye"))
_DIM_ARGUMENTS = ("dim", "dims", "dim0", "dim1", "axis")


def check_rows(module: fx.GraphModule) -> None:
    """Refuse a graph in which a row depends on another one by anything else than ``llmc::paged_attention``.

    Raises:
        CompileError: names the op, and the module that it belongs to.
    """
    checker = _Checker(module.graph)
    for node in module.graph.nodes:
        if node.op == "call_function":
            checker.visit(node)


class _Checker:
    def __init__(self, graph: fx.Graph) -> None:
        places = {node.name: node for node in graph.find_nodes(op="placeholder")}
        self._symbol = places["input_ids"].meta["val"].shape[1].node.expr
        self._rows = places["logit_rows"]
        self._known_symbols = {self._symbol, *self._rows.meta["val"].shape[0].node.expr.free_symbols}
        self._layout: dict[fx.Node, Layout] = {}

    def visit(self, node: fx.Node) -> None:
        """Check a node, whose inputs have been checked."""
        for value in _tensors(node):
            self._check_sizes(node, value)
        name = op_name(node)
        if name == "aten.slice":
            self._slice(node)
        inputs = [i for i in node.all_input_nodes if self._axis(i) is not None]
        if name in _COUNTERS and self._axis(node) is not None:
            raise _error(node, "counts the tokens of the step, where it should read position_ids")
        if name == "llmc.paged_attention" or not inputs:
            return
        layouts = {self._layout.get(i, (1, 1)) for i in inputs}
        if len(layouts) > 1:
            raise _error(node, "joins tokens with copies of tokens")
        self._layout[node] = layouts.pop()
        self._check_axis(node, name, inputs)

    def _check_axis(self, node: fx.Node, name: str, inputs: list[fx.Node]) -> None:
        special = _SPECIAL.get(name)
        if special is not None:
            special(self, node)
        elif name in _NEW_LAYOUT:
            self._reshape(node)
        elif name in _PRODUCTS:
            self._product(node)
        elif name == "getitem" or name in _ROW_BY_ROW or _is_pointwise(node):
            return
        elif name.startswith("llmc."):
            for i in inputs:
                if self._axis(i) == _rank(i) - 1 and _rank(i) > 1:
                    raise _error(node, "works along the tokens of the step")
        elif (dims := _dims(node)) is not None or name in _REDUCTIONS:
            if dims is None or any(self._axis(i) in {d % max(1, _rank(i)) for d in dims} for i in inputs):
                raise _error(node, "works along the tokens of the step")
        else:
            raise _error(node, "is an op of which it is not known whether it keeps tokens apart")

    def _check_sizes(self, node: fx.Node, value: torch.Tensor) -> None:
        dynamic: list[Any] = [size for size in value.shape if is_dynamic(size)]
        for size in dynamic:
            if strange := size.node.expr.free_symbols - self._known_symbols:
                raise _error(node, f"has a size that depends on data ({', '.join(map(str, strange))})")
        if sum(self._symbol in size.node.expr.free_symbols for size in dynamic) > 1:
            raise _error(node, "relates the tokens of the step with each other")

    def _axis(self, node: fx.Node) -> int | None:
        """The axis whose size depends on T."""
        for value in _tensors(node):
            sizes: tuple[Any, ...] = tuple(value.shape)
            for axis, size in enumerate(sizes):
                if is_dynamic(size) and self._symbol in size.node.expr.free_symbols:
                    return axis
        return None

    def _factor(self, size: Any) -> int:
        """C of a size c * T."""
        factor = size.node.expr / self._symbol
        return int(factor) if factor.is_number and factor.is_integer else 0

    def _reshape(self, node: fx.Node) -> None:
        """Whether a row stays a row: elements before, and in, a row are as many as they were."""
        source = node.args[0]
        axis = self._axis(node)
        if not isinstance(source, fx.Node) or self._axis(source) is None or axis is None:
            return
        if op_name(node) not in _RESHAPES:
            return
        before, after = tensor(source), tensor(node)
        old_axis = self._axis(source)
        if before is None or after is None or old_axis is None:
            raise _error(node, "is of an unknown shape")
        outer, inner = self._layout.get(source, (1, 1))
        total = math.prod(map(int, before.shape[:old_axis])) * outer
        behind = math.prod(map(int, before.shape[old_axis + 1 :])) * inner
        lead = math.prod(map(int, after.shape[:axis]))
        trail = math.prod(map(int, after.shape[axis + 1 :]))
        factor = self._factor(after.shape[axis])
        if total % lead or behind % trail or (total // lead) * (behind // trail) != factor:
            raise _error(node, "mixes the tokens of the step")
        self._layout[node] = (total // lead, behind // trail)

    def _product(self, node: fx.Node) -> None:
        """The summed axis must not be T: the last of the first factor, the last but one of the second."""
        name = op_name(node)
        first, second = node.args[1:3] if name in ("aten.addmm", "aten.baddbmm") else node.args[:2]
        assert isinstance(first, fx.Node) and isinstance(second, fx.Node), f"{node} multiplies {first} and {second}"
        summed = _rank(second) - (1 if name == "aten.linear" or _rank(second) == 1 else 2)
        if self._axis(first) == _rank(first) - 1 or self._axis(second) == summed:
            raise _error(node, "sums over the tokens of the step")

    def _slice(self, node: fx.Node) -> None:
        dims = _dims(node) or [0]
        source = node.args[0]
        assert isinstance(source, fx.Node), f"{node} cuts {source}"
        if self._axis(source) is None and self._axis(node) is not None:
            raise _error(node, "counts the tokens of the step, where it should read position_ids")
        cut = self._axis(source) == dims[0] % _rank(source)
        if cut and str(tensor(source).shape) != str(tensor(node).shape):  # type: ignore[union-attr]
            raise _error(node, "takes a part of the tokens of the step")

    def _nothing(self, node: fx.Node) -> None:
        """Checked already."""

    def _repeat(self, node: fx.Node) -> None:
        source, repeats = node.args[:2]
        assert isinstance(source, fx.Node) and isinstance(repeats, list | tuple), f"{node} repeats {source}"
        axis = self._axis(node)
        if axis is not None:
            outer, inner = self._layout[node]
            self._layout[node] = (outer * int(repeats[axis]), inner)  # type: ignore[arg-type]

    def _repeat_interleave(self, node: fx.Node) -> None:
        source, repeats = node.args[:2]
        dims = _dims(node)
        assert isinstance(source, fx.Node), f"{node} repeats {source}"
        if dims is None or not isinstance(repeats, int):
            raise _error(node, "works along the tokens of the step")
        if self._axis(source) == dims[0] % _rank(source):
            outer, inner = self._layout[node]
            self._layout[node] = (outer, inner * repeats)

    def _index(self, node: fx.Node) -> None:
        """T may be indexed by logit_rows only; an axis of something else may be indexed by anything, row by row."""
        source, indices = node.args[:2]
        assert isinstance(source, fx.Node) and isinstance(indices, list | tuple), f"{node} indexes {source}"
        axis = self._axis(source)
        if axis is not None and axis < len(indices) and indices[axis] not in (None, self._rows):
            raise _error(node, "picks tokens of the step")

    def _gather(self, node: fx.Node) -> None:
        """A lookup is as good as its table: the index may hold one entry a token."""
        source, dim = node.args[:2]
        assert isinstance(source, fx.Node) and isinstance(dim, int), f"{node} indexes {source}"
        if self._axis(source) is not None and self._axis(source) == dim % _rank(source):
            raise _error(node, "picks tokens of the step")

    def _index_select(self, node: fx.Node) -> None:
        source, dim, index = node.args[:3]
        assert isinstance(source, fx.Node) and isinstance(dim, int), f"{node} indexes {source}"
        if self._axis(source) == dim % _rank(source) and index is not self._rows:
            raise _error(node, "picks tokens of the step")

    def _pad(self, node: fx.Node) -> None:
        source, pad = node.args[:2]
        assert isinstance(source, fx.Node) and isinstance(pad, list | tuple), f"{node} pads {source}"
        axis = self._axis(source)
        if axis is not None and any(pad[2 * (_rank(source) - 1 - axis) :][:2]):
            raise _error(node, "shifts the tokens of the step")

    def _normalized(self, node: fx.Node) -> None:
        source, shape = node.args[:2]
        assert isinstance(source, fx.Node) and isinstance(shape, list | tuple), f"{node} normalises {source}"
        axis = self._axis(source)
        if axis is not None and axis >= _rank(source) - len(shape):
            raise _error(node, "works along the tokens of the step")


_SPECIAL: dict[str, Callable[[_Checker, fx.Node], None]] = {
    "aten.slice": _Checker._nothing,
    "aten.narrow": _Checker._slice,
    "aten.repeat": _Checker._repeat,
    "aten.repeat_interleave": _Checker._repeat_interleave,
    "aten.index": _Checker._index,
    "aten.index_put": _Checker._index,
    "aten.gather": _Checker._gather,
    "aten.index_select": _Checker._index_select,
    "aten.constant_pad_nd": _Checker._pad,
    "aten.pad": _Checker._pad,
    "aten.layer_norm": _Checker._normalized,
    "aten.rms_norm": _Checker._normalized,
    "aten.native_layer_norm": _Checker._normalized,
}


def _tensors(node: fx.Node) -> Iterator[torch.Tensor]:
    value = node.meta.get("val")
    yield from (v for v in (value if isinstance(value, list | tuple) else [value]) if isinstance(v, torch.Tensor))


def _rank(node: fx.Node) -> int:
    return next(_tensors(node)).dim()


def _is_pointwise(node: fx.Node) -> bool:
    return torch.Tag.pointwise in getattr(node.target, "tags", ())


def _dims(node: fx.Node) -> list[int] | None:
    """What an op names as the axes that it works along, or None if it names none."""
    schema = getattr(node.target, "_schema", None)
    for position, argument in enumerate(schema.arguments if schema is not None else ()):
        if argument.name in _DIM_ARGUMENTS:
            default = argument.default_value if argument.has_default_value() else None
            found = node.args[position] if position < len(node.args) else node.kwargs.get(argument.name, default)
            if isinstance(found, int):
                return [found]
            return [d for d in found if isinstance(d, int)] if isinstance(found, list | tuple) and found else None
    return None


def _error(node: fx.Node, what: str) -> CompileError:
    stack = node.meta.get(MODULE)
    where = f"{list(stack.values())[-1][0]}: " if stack else ""
    return CompileError(
        f"{where}{node.target} {what}; sequences share a step, so only attention may do that (layers with a state or a "
        "convolution over time are not supported)"
    )
