"""The coarse llmc ops: norms, rotary embeddings, gated units, experts, attention."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir as ir

from llmc.compiler import weights
from llmc.compiler.lowering.builder import Builder, Rule
from llmc.compiler.lowering.nodes import attribute
from llmc.compiler.lowering.values import View, show
from llmc.compiler.weights import WeightSource
from llmc.errors import CompileError
from llmc.plugins import all_ops
from llmc.runtime.plan import Attribute, Dim, KvSlot


def attributes(node: ir.Node) -> dict[str, Attribute]:
    """The attributes that the op declares, in their types (ONNX has no bool).

    Raises:
        CompileError: one is missing, or not declared.
    """
    declared = all_ops()[node.op_type].attributes
    if set(node.attributes) != set(declared):
        raise CompileError(f"has the attributes {sorted(node.attributes)}, expected {sorted(declared)}")
    return {name: kind(attribute(node, name)) for name, kind in declared.items()}


def _embedding(builder: Builder, node: ir.Node) -> Sequence[View]:
    ids, table = builder.raw(node.inputs[0]), node.inputs[1]
    if not builder.is_constant(table) or table is None:
        return [builder.gather(builder.view(table), ids, 0)]
    source = builder.constants.source(table)
    if len(source.shape) != 2:
        raise CompileError(f"embedding in a table of shape {list(source.shape)}")
    y = builder.allocate([*ids.shape, Dim(source.shape[1])], "float32")
    builder.emit("embedding", [ids.squeeze(), builder.table(source, table.name or "table")], [_rows_of(y, ids)])
    return [y]


def _rows_of(y: View, ids: View) -> View:
    """The result without the axes of size 1 that ids has."""
    return y.squeeze([axis for axis in range(ids.rank) if ids.shape[axis] == Dim(1)])


def _norm(builder: Builder, node: ir.Node) -> Sequence[View]:
    x = builder.view(node.inputs[0])
    weight, bias, keep = _scales(builder, node, 1)
    y = builder.allocate(x.shape, "float32")
    rows, out = _norm_rows(builder, x, y, keep)
    builder.emit("norm", [rows, weight, bias], [out], **attributes(node))
    return [y]


def _scales(builder: Builder, node: ir.Node, index: int) -> tuple[View | None, View | None, int]:
    """Weight, bias, and how many of the last axes they cover: [D] or [H, D]."""
    found = [builder.optional(node, index), builder.optional(node, index + 1)]
    keep = 1
    for i, view in enumerate(found):
        if view is not None:
            while view.rank > 1 and view.shape[0] == Dim(1):
                view = view.squeeze([0])
            keep = max(keep, view.rank)
            found[i] = view
    if keep > 2:
        raise CompileError(f"a norm whose scale has {keep} axes is not supported")
    return found[0], found[1], keep


def _norm_rows(builder: Builder, x: View, y: View, keep: int) -> tuple[View, View]:
    """Both as [rows, D] or as [rows, H, D]; x, which may be a part of something, with a unit inner stride."""
    x = builder.unit_inner(x)
    for rank in (2, 3) if keep == 1 else (3,):
        rows, out = x.collapse(rank, keep), y.collapse(rank, keep)
        if rows is not None and out is not None and rows.shape == out.shape:
            return rows, out
    return builder.rows(x, keep + 1, keep), builder.rows(y, keep + 1, keep)


def _add_norm(builder: Builder, node: ir.Node) -> Sequence[View]:
    a, b = builder.view(node.inputs[0]), builder.view(node.inputs[1])
    weight, bias, keep = _scales(builder, node, 2)
    total, y = (builder.allocate(a.shape, "float32", value.name) for value in node.outputs)
    rank = keep + 1
    inputs = [builder.rows(x.expand(a.shape), rank, keep) for x in (a, b)]
    outputs = [builder.rows(x, rank, keep) for x in (total, y)]
    builder.emit("add_norm", [*inputs, weight, bias], outputs, **attributes(node))
    return [total, y]


def _rope(builder: Builder, node: ir.Node) -> Sequence[View]:
    x, positions = builder.view(node.inputs[0]), builder.raw(node.inputs[1])
    table, index, sign = (builder.view(value) for value in node.inputs[2:])
    index = builder.convert(index, "int32")
    if x.rank != 3 or positions.rank != 1:
        raise CompileError(f"rope of {show(x.shape)} at {show(positions.shape)}, expected [T, H, D] at [T]")
    y = builder.allocate([*x.shape[:2], index.shape[1]], "float32")
    builder.emit("rope", [builder.unit_inner(x), positions, table, index, sign], [y])
    return [y]


def _glu(builder: Builder, node: ir.Node) -> Sequence[View]:
    gate, up = builder.view(node.inputs[0]), builder.view(node.inputs[1])
    y = builder.allocate(gate.shape, "float32")
    inputs = [builder.rows(x.expand(y.shape)) for x in (gate, up)]
    builder.emit("glu", inputs, [builder.rows(y)], **attributes(node))
    return [y]


def _moe(builder: Builder, node: ir.Node) -> Sequence[View]:
    x, ids, scales = builder.view(node.inputs[0]), builder.view(node.inputs[1]), builder.view(node.inputs[2])
    given = attributes(node)
    gate_up, down = _experts(builder, node, 3), _experts(builder, node, 4)
    biases: list[WeightSource | None] = [
        builder.constants.source(value) if value is not None else None for value in (*node.inputs[5:7], None, None)[:2]
    ]
    if builder.dtype == "bfloat16" and down.shape[2] % 2:  # pairs of columns don't say that the last one is missing
        gate_up, biases[0] = _even(gate_up, given), None if biases[0] is None else _even(biases[0], given)
    y = builder.allocate(x.shape, "float32")
    rows = [builder.rows(view) for view in (x, ids, scales)]
    packed = [builder.packed(part, _name(node, i)) for i, part in ((3, gate_up), (4, down))]
    stored = [None if part is None else builder.stored(part, _name(node, i)) for i, part in enumerate(biases, 5)]
    builder.emit("moe", [*rows, *packed, *stored], [builder.rows(y)], **given)
    return [y]


def _experts(builder: Builder, node: ir.Node, index: int) -> WeightSource:
    value = node.inputs[index]
    if not builder.is_constant(value) or value is None:
        raise CompileError("the weights of the experts depend on the tokens")
    source = builder.constants.source(value)
    if len(source.shape) != 3:
        raise CompileError(f"the experts' weight has shape {list(source.shape)}, expected [experts, rows, columns]")
    return source


def _even(source: WeightSource, given: Mapping[str, Attribute]) -> WeightSource:
    """One more row of zeros for an odd number of inner units: [E, 2I, ...] or [E, I, ...]."""
    experts, rows, *rest = source.shape
    split = (rows,) if not given["gated"] else ((rows // 2, 2) if given["interleaved"] else (2, rows // 2))
    axis = 1 + (len(split) > 1 and not given["interleaved"])
    parts = weights.Reshape(source, (experts, *split, *rest))
    shape = list(parts.shape)
    shape[axis] = 1
    zeros = weights.Array(np.broadcast_to(np.zeros((), weights.numpy_dtype(source.dtype)), shape))
    return weights.Reshape(weights.Concat((parts, zeros), axis), (experts, rows + len(split), *rest))


def _name(node: ir.Node, index: int) -> str:
    value = node.inputs[index]
    return (value.name if value is not None else None) or "experts"


def _paged_attention(builder: Builder, node: ir.Node) -> Sequence[View]:
    q, k, v = (builder.view(value) for value in node.inputs[:3])
    sinks, slopes = builder.optional(node, 3), builder.optional(node, 4)
    if not q.rank == k.rank == v.rank == 3:
        raise CompileError(
            f"attention of {show(q.shape)}, {show(k.shape)} and {show(v.shape)}, expected [T, heads, size]"
        )
    given = attributes(node)
    _add_slot(builder, given, k, v)
    y = builder.allocate([*q.shape[:2], v.shape[2]], "float32")
    inputs = [*(builder.unit_inner(x) for x in (q, k, v)), *(x and builder.vector(x) for x in (sinks, slopes))]
    builder.emit("paged_attention", inputs, [y], **given)
    return [y]


def _add_slot(builder: Builder, given: Mapping[str, Attribute], k: View, v: View) -> None:
    """Collect what the cache has to hold: how far behind is read is the most that any op on the slot asks for."""
    number, window, chunk = (int(given[name]) for name in ("slot", "window", "chunk"))
    reach = min((size for size in (window, chunk) if size), default=0)
    slot = KvSlot(k.shape[1].constant, k.shape[2].constant, v.shape[2].constant, reach)
    known = builder.kv_slots.get(number)
    if known is None and not given["write"]:
        raise CompileError(f"reads the keys of slot {number} before any op has written them")
    if known is not None:
        if given["write"]:
            raise CompileError(f"slot {number} is written twice")
        if (known.kv_heads, known.key_dim, known.value_dim) != (slot.kv_heads, slot.key_dim, slot.value_dim):
            raise CompileError(f"shares slot {number} of {known} with {slot}")
        reach = max(known.window, reach) if known.window and reach else 0
        slot = KvSlot(slot.kv_heads, slot.key_dim, slot.value_dim, reach)
    builder.kv_slots[number] = slot


RULES: Mapping[str, Rule] = {
    "llmc::embedding": _embedding,
    "llmc::norm": _norm,
    "llmc::add_norm": _add_norm,
    "llmc::rope": _rope,
    "llmc::glu": _glu,
    "llmc::moe": _moe,
    "llmc::paged_attention": _paged_attention,
}
