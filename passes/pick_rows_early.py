"""Logits are asked for a few rows: what only they depend on is computed for no others."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import ClassVar

import onnx_ir as ir

from llmc.passes.base import GraphPass, Stage

ROWS = "logit_rows"
TOKENS, PICKED = "T", "N"

# fmt: off
POINTWISE = frozenset((
    "Abs", "Add", "And", "Cast", "Ceil", "Clip", "Cos", "Div", "Equal", "Erf", "Exp", "Floor", "Gelu", "Greater",
    "GreaterOrEqual", "IsNaN", "Less", "LessOrEqual", "Log", "Max", "Min", "Mod", "Mul", "Neg", "Not", "Or", "Pow",
    "Reciprocal", "Relu", "Round", "Sigmoid", "Sign", "Sin", "Softplus", "Sqrt", "Sub", "Tanh", "Where", "Xor",
))
# fmt: on
LAST_AXIS = frozenset(
    ("linear", "embedding", "norm", "add_norm", "glu", "elementwise", "moe", "softmax", "topk", "reduce")
)
"""Ops of the llmc domain that treat each row by itself."""
ALONG_AXIS = frozenset(("Concat", "Softmax", "LogSoftmax", "Split", "TopK", "ArgMax", "ArgMin"))
"""Ops with an attribute ``axis``: rows stay apart if it is not theirs."""
LAYOUT = frozenset(("Reshape", "Transpose", "Squeeze", "Unsqueeze", "Identity"))
PRODUCTS = frozenset(("linear", "moe"))


class PickRowsEarly(GraphPass):
    """Gather(f(x), logit_rows) -> f(Gather(x, logit_rows)), for all of f that nothing else reads.

    1. Every reader of what f computes is the Gather, or a part of f itself.
    2. f treats each row by itself: attention is never a part of it.
    3. f has a linear, so that it pays: more than one value may have to be gathered.
    """

    stage: ClassVar[Stage] = Stage.CLEAN_UP
    runs_after: ClassVar[tuple[str, ...]] = ("FoldLayout",)

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """See onnx_ir."""
        graph = model.graph
        picks = {node: axis for node in graph if (axis := picked_axis(node)) is not None}
        moved = _row_by_row(graph, picks)
        if not any(node.domain == "llmc" and node.op_type in PRODUCTS for node in moved):
            return ir.passes.PassResult(model, modified=False)
        ids = next(iter(picks)).inputs[1]
        assert ids is not None, "a Gather has ids"
        gathered: dict[ir.Value, ir.Value] = {}
        for node in [node for node in graph if node in moved]:
            for index, value in enumerate(node.inputs):
                if value is not None and _token_axis(value) is not None and value.producer() not in moved:
                    if value not in gathered:
                        gathered[value] = _gather(graph, value, ids, node)
                    node.replace_input_with(index, gathered[value])
            for value in node.outputs:
                _shorten(value)
        for node in picks:
            data = node.inputs[0]
            if data is not None and data.producer() in moved:
                ir.convenience.replace_all_uses_with(node.outputs[0], data, replace_graph_outputs=True)
                graph.remove(node, safe=True)
        return ir.passes.PassResult(model, modified=True)


def picked_axis(node: ir.Node) -> int | None:
    """The axis of the tokens, if the node gathers the rows of the logits from it."""
    if node.op_type != "Gather" or node.domain != "":
        return None
    data, ids = node.inputs
    while ids is not None and (cast := ids.producer()) is not None and cast.op_type in ("Cast", "Identity"):
        ids = cast.inputs[0]
    if data is None or ids is None or ids.name != ROWS or not ids.is_graph_input():
        return None
    axis = _token_axis(data)
    given = node.attributes.get_int("axis", 0)
    return axis if axis is not None and data.shape is not None and axis == given % len(data.shape) else None


def _row_by_row(graph: ir.Graph, picks: dict[ir.Node, int]) -> set[ir.Node]:
    """The nodes of which only the picked rows are needed."""
    moved: set[ir.Node] = set()
    for node in reversed(graph):
        readers = [use.node for value in node.outputs for use in value.uses()]
        if not readers or any(value.is_graph_output() for value in node.outputs):
            continue
        if all(r in moved or (r in picks and r.inputs[0] in node.outputs) for r in readers) and _keeps_rows_apart(node):
            moved.add(node)
    return moved


def _keeps_rows_apart(node: ir.Node) -> bool:
    axes = [_token_axis(value) for value in node.outputs]
    if any(axis is None for axis in axes):
        return False
    if node.domain == "llmc":
        ranks = [len(value.shape) for value in node.outputs if value.shape is not None]
        return node.op_type in LAST_AXIS and all(axis != rank - 1 for axis, rank in zip(axes, ranks, strict=True))
    if node.op_type in POINTWISE:
        return True
    if node.op_type in ALONG_AXIS:
        shape = node.outputs[0].shape
        default = 0 if node.op_type in ("Concat", "Split", "ArgMax", "ArgMin") else -1
        along = node.attributes.get_int("axis", default)
        return shape is not None and along % len(shape) != axes[0] and node.attributes.get_int("keepdims", 1) == 1
    return node.op_type in LAYOUT and _says_no_size(node)


def _says_no_size(node: ir.Node) -> bool:
    """Whether a layout op stays right for fewer rows: its input has the axis too, and a target says -1 for it."""
    x = node.inputs[0]
    if x is None or _token_axis(x) is None:
        return False
    target = node.inputs[1].const_value if node.op_type == "Reshape" and node.inputs[1] is not None else None
    if node.op_type != "Reshape":
        return True
    axis = _token_axis(node.outputs[0])
    return target is not None and axis is not None and int(target.numpy()[axis]) == -1


def _token_axis(value: ir.Value) -> int | None:
    """The axis of the tokens, if it is the only one that changes."""
    changing = [axis for axis, size in enumerate(value.shape or ()) if not isinstance(size, int)]
    if value.shape is None or len(changing) != 1:
        return None
    return changing[0] if str(_symbol(value.shape[changing[0]])) == TOKENS else None


def _symbol(size: int | ir.SymbolicDim) -> int | str | None:
    return size if isinstance(size, int) else size.value


def _gather(graph: ir.Graph, value: ir.Value, ids: ir.Value, before: ir.Node) -> ir.Value:
    axis = _token_axis(value)
    assert axis is not None, f"{value.name} has no axis of tokens"
    node = ir.node("Gather", [value, ids], {"axis": axis})
    producer = value.producer()
    node.metadata_props.update((producer or before).metadata_props)
    result = node.outputs[0]
    result.name, result.type, result.shape = f"{value.name}.picked", value.type, value.shape
    result.meta.update(value.meta)
    _shorten(result)
    graph.insert_before(before, node)
    return result


def _shorten(value: ir.Value) -> None:
    """Replace T by N in the shape of a value."""
    assert value.shape is not None, f"{value.name} has no shape"
    value.shape = ir.Shape([PICKED if _symbol(size) == TOKENS else size for size in value.shape])
    if "dims" in value.meta:
        value.meta["dims"] = tuple(_of_rows(value.meta["dims"]))


def _of_rows(dims: tuple[object, ...]) -> Iterator[object]:
    for dim in dims:
        tokens = getattr(dim, "tokens", 0)
        yield replace(dim, tokens=0, rows=tokens) if tokens else dim  # type: ignore[type-var]
