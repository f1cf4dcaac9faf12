"""The graph as a plan: every node becomes steps over views of buffers, weights or batch inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import onnx_ir as ir

from llmc import discover
from llmc.compiler import memory, verify, weights
from llmc.compiler.config import Limits
from llmc.compiler.constants import Constants
from llmc.compiler.lowering.builder import Builder, LoweredStep, Rule
from llmc.compiler.lowering.copies import remove_copies
from llmc.compiler.lowering.nodes import declared_shape
from llmc.compiler.lowering.values import Buffer, View, contiguous, show
from llmc.compiler.safetensors_writer import Tensor
from llmc.compiler.targets.base import Target
from llmc.errors import CompileError
from llmc.plugins.linear import packing
from llmc.runtime.plan import BATCH_INPUTS, Dim, KvSlot, Plan, Step, Storage, Value

BATCH_SHAPES = {"input_ids": Dim(tokens=1), "position_ids": Dim(tokens=1), "logit_rows": Dim(rows=1)}


@dataclass(frozen=True)
class LoweredGraph:
    """The steps of a model before its buffers are placed: what quantization rewrites.

    ``logits`` is the view that they end in. ``weights`` may hold more than the steps read.
    ``given``: buffers that are written from outside before the first step. ``features``: what is there at the end, too.
    """

    steps: Sequence[LoweredStep]
    logits: View
    weights: Mapping[str, Tensor]
    kv_slots: Mapping[int, KvSlot]
    given: tuple[Buffer, ...] = ()
    features: tuple[View, ...] = ()


@dataclass(frozen=True)
class LoweredModel:
    """A plan, and the weights that it reads, in the order in which it reads them."""

    plan: Plan
    weights: Mapping[str, Tensor]


def lower(graph: ir.Model, target: Target, limits: Limits, dtype: str) -> LoweredModel:
    """Lower a graph whose nodes are legal for the target: ``lower_steps``, then ``plan_steps``.

    Raises:
        CompileError: a node can't be lowered; names it, its module and the reason.
    """
    return plan_steps(lower_steps(graph, target, dtype), target, limits)


def lower_steps(graph: ir.Model, target: Target, dtype: str) -> LoweredGraph:
    """The steps of a graph.

    Args:
        graph: inputs are the batch inputs of ``runtime.plan``, the output is the logits [N, V]; maybe features behind.
        target: what it is built for.
        dtype: of the weights of linear, embedding and moe: float32, bfloat16 or float16.

    Raises:
        CompileError: a node can't be lowered; names it, its module and the reason.
    """
    if dtype not in packing.DTYPES:
        raise CompileError(f"weights of dtype {dtype!r} are not supported; known: {', '.join(packing.DTYPES)}")
    verify.legal(graph, target)
    constants = Constants(graph.graph)
    builder = Builder(constants, dtype, _multiplied(graph.graph, constants))
    _bind_inputs(builder, graph.graph)
    for node in graph.graph:
        if not all(builder.is_constant(value) for value in node.outputs):
            _lower_node(builder, node)
    logits = _logits(builder, graph.graph)
    features = tuple(_feature(builder, value) for value in graph.graph.outputs[1:])
    steps = remove_copies(_live_steps(builder.steps, [logits, *features]), [logits, *features])
    return LoweredGraph(steps, logits, builder.weights, builder.kv_slots, features=features)


def plan_steps(lowered: LoweredGraph, target: Target, limits: Limits) -> LoweredModel:
    """Place the buffers of the steps in an arena for steps of the largest size, and write them as a plan.

    Raises:
        CompileError: the steps contradict each other, or the target has no kernel for one.
    """
    kept = [view.buffer for view in (lowered.logits, *lowered.features)]
    arena = memory.plan_arena(lowered.steps, kept, limits.max_batch_tokens, target.alignment, lowered.given)
    plan = _plan(lowered, arena)
    used = {value.base for value in plan.values if value.storage is Storage.WEIGHT}
    model = LoweredModel(plan, {name: weight for name, weight in lowered.weights.items() if name in used})
    verify.lowered(plan, model.weights, target)
    return model


@cache
def rules() -> Mapping[str, Rule]:
    """How each op is lowered: ``Add``, ``llmc::norm``."""
    found: dict[str, Rule] = {}
    for module in discover.modules("llmc.compiler.lowering"):
        for op, rule in getattr(module, "RULES", {}).items():
            assert op not in found, f"{op} is lowered by two rules"
            found[op] = rule
    return found


def _multiplied(graph: ir.Graph, constants: Constants) -> frozenset[object]:
    """Identities of the weights that linears have."""
    used = (node.inputs[1] for node in graph if (node.domain, node.op_type) == ("llmc", "linear"))
    constant = (value for value in used if value is not None and value in constants)
    return frozenset(weights.identity(constants.source(value)) for value in constant)


def _bind_inputs(builder: Builder, graph: ir.Graph) -> None:
    for value in graph.inputs:
        if value.name not in BATCH_INPUTS:
            raise CompileError(f"graph input {value.name!r} is not one of {', '.join(BATCH_INPUTS)}")
        size = BATCH_SHAPES[value.name]
        view = View(Buffer(value.name, Storage.BATCH, "int32", size), (size,), (Dim(1),))
        shape = declared_shape(value)
        if shape is not None and shape != view.shape:
            view = builder.reshape(view, shape)
        builder.bind(value, view)


def _lower_node(builder: Builder, node: ir.Node) -> None:
    builder.enter(node)
    op = f"{node.domain}::{node.op_type}" if node.domain else node.op_type
    try:
        if not builder.bind_sizes(node):
            _apply_rule(builder, node, op)
    except (CompileError, ValueError) as error:
        module = node.metadata_props.get("module", "")
        where = f"{op} {node.name or node.outputs[0].name!r}" + (f" in {module}" if module else "")
        raise CompileError(f"{where}: {error}") from error


def _apply_rule(builder: Builder, node: ir.Node, op: str) -> None:
    if op not in rules():
        raise CompileError("no rule lowers this op; see `llmc ops` for those that are known")
    for value, view in zip(node.outputs, rules()[op](builder, node), strict=False):
        declared = declared_shape(value)
        if declared is not None and declared != view.shape:
            raise CompileError(f"output {value.name} has shape {show(view.shape)}, declared {show(declared)}")
        builder.bind(value, view)


def _logits(builder: Builder, graph: ir.Graph) -> View:
    """The graph's output as contiguous float32 [N, V] in the arena."""
    if not graph.outputs:
        raise CompileError("the graph has no output, expected the logits")
    view = builder.convert(builder.view(graph.outputs[0]), "float32")
    rows = view.collapse(2) if view.rank > 1 else None
    if rows is None or rows.shape[0] != Dim(rows=1) or not rows.shape[1].is_constant:
        raise CompileError(f"the logits have shape {show(view.shape)}, expected [N, vocabulary]")
    if rows.buffer.storage is Storage.ARENA and rows.strides == contiguous(rows.shape):
        return rows
    return builder.copy(rows)


def _feature(builder: Builder, value: ir.Value) -> View:
    """A further output as float32 [T, width] in the arena."""
    view = builder.convert(builder.view(value), "float32")
    rows = view.collapse(2)
    if rows is None or rows.buffer.storage is not Storage.ARENA:
        rows = builder.copy(view).collapse(2)
    if rows is None or rows.shape[0] != Dim(tokens=1) or not rows.shape[1].is_constant:
        raise CompileError(f"the features {value.name} have shape {show(view.shape)}, expected [T, width]")
    return rows


def _live_steps(steps: Sequence[LoweredStep], outputs: Sequence[View]) -> list[LoweredStep]:
    """Without the steps whose results nobody reads; attention stays, since it fills the cache."""
    needed = {view.buffer for view in outputs}
    kept = []
    for step in reversed(steps):
        if step.op == "paged_attention" or any(view.buffer in needed for view in step.outputs):
            needed.update(view.buffer for view in step.inputs if view is not None)
            kept.append(step)
    return kept[::-1]


def _plan(lowered: LoweredGraph, arena: memory.Arena) -> Plan:
    names: dict[View, str] = {}
    values: list[Value] = []
    counts: dict[Buffer, int] = {}

    def name_of(view: View) -> str:
        if view not in names:
            buffer = view.buffer
            count = counts[buffer] = counts.get(buffer, -1) + 1
            names[view] = f"{buffer.name}:{count}" if count else buffer.name
            base = arena.offsets[buffer] if buffer.storage is Storage.ARENA else buffer.name
            values.append(Value(names[view], buffer.storage, base, buffer.dtype, view.shape, view.strides, view.offset))
        return names[view]

    plan_steps = []
    for step in lowered.steps:
        inputs = tuple(None if view is None else name_of(view) for view in step.inputs)
        outputs = tuple(name_of(view) for view in step.outputs)
        plan_steps.append(Step(step.op, inputs, outputs, step.attributes, step.module))
    logits, *features = map(name_of, (lowered.logits, *lowered.features))
    slots = lowered.kv_slots
    if sorted(slots) != list(range(len(slots))):
        raise CompileError(f"the attention ops use the slots {sorted(slots)}, expected 0 to {len(slots) - 1}")
    return Plan(
        tuple(values),
        tuple(plan_steps),
        arena.nbytes,
        logits,
        tuple(slots[number] for number in range(len(slots))),
        features=tuple(features),
    )
