"""What holds after each stage: checked always, cheaply, and the message names the node that breaks it.

A broken invariant is a mistake of the stage before, or a model that does what no stage knows.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import onnx_ir as ir
import torch
from torch import Tensor, fx

from llmc.compiler.lowering.nodes import declared_shape
from llmc.compiler.lowering.values import show
from llmc.compiler.targets.base import Target
from llmc.compiler.weights import SourceTensor
from llmc.errors import CompileError
from llmc.plugins import all_ops, kernels
from llmc.runtime.plan import BATCH_INPUTS, Dim, Plan, Storage

MAX_CONSTANT_BYTES = 64 << 20
"""An initializer in memory (a rope table at most) may have so many bytes; weights stay in the checkpoint."""


def traced(module: fx.GraphModule, weights: Collection[str]) -> None:
    """After tracing: sizes depend on T and N only, nothing is [T, T] (a mask), and every weight is known.

    Args:
        module: the traced module.
        weights: targets of get_attr nodes whose numbers are known.

    Raises:
        CompileError: names the node.
    """
    inputs = {node.name: node.meta["val"] for node in module.graph.find_nodes(op="placeholder")}
    if set(inputs) != set(BATCH_INPUTS):
        raise CompileError(f"the traced graph has the inputs {sorted(inputs)}, expected {sorted(BATCH_INPUTS)}")
    symbols = {symbol for value in inputs.values() for symbol in _symbols(value)}
    for node in module.graph.nodes:
        where = _where_fx(node)
        for value in _tensors(node.meta.get("val")):
            if unknown := _symbols(value) - symbols:
                raise CompileError(f"{where}: its shape depends on {unknown.pop()}, which only the data decides")
            if sum(bool(_size_symbols(size)) for size in value.shape) > 1:
                raise CompileError(
                    f"{where}: has the shape {_shown(value)}, each token beside each other; only attention may do that"
                )
        if node.op == "get_attr" and str(node.target) not in weights:
            raise CompileError(f"{where}: reads {node.target}, which is neither a weight nor a buffer of the model")


def fused(module: fx.GraphModule) -> None:
    """After the FX passes: nothing is changed in place, and attention slots are numbered in call order.

    Raises:
        CompileError: names the node.
    """
    slots = 0
    for node in module.graph.find_nodes(op="call_function", target=torch.ops.llmc.paged_attention.default):
        slot, writes = node.kwargs["slot"], node.kwargs["write"]
        if slot != slots if writes else not 0 <= slot < slots:
            raise CompileError(f"{_where_fx(node)}: uses slot {slot} after {slots} slots were written")
        slots += bool(writes)
    for node in module.graph.nodes:
        schema = getattr(node.target, "_schema", None)
        if node.op == "call_function" and schema is not None and schema.is_mutable:
            raise CompileError(f"{_where_fx(node)}: {node.target} changes its input in place")


def emitted(model: ir.Model) -> None:
    """After emission and each graph pass: known ops, exact types and shapes, defined before use, weights not loaded.

    Raises:
        CompileError: names the node.
    """
    graph = model.graph
    if [value.name for value in graph.inputs] != list(BATCH_INPUTS):
        raise CompileError(f"the graph has the inputs {[v.name for v in graph.inputs]}, expected {list(BATCH_INPUTS)}")
    known: dict[str, ir.Value] = {}
    for value in (*graph.inputs, *graph.initializers.values()):
        _check_value(value, known, "graph")
    for value in graph.initializers.values():
        tensor = value.const_value
        if not isinstance(tensor, SourceTensor) and (tensor is None or tensor.nbytes > MAX_CONSTANT_BYTES):
            raise CompileError(f"initializer {value.name!r} is {'loaded' if tensor else 'without a tensor'}")
    for node in graph:
        where = _where(node)
        _check_op(node, where)
        for read in node.inputs:
            if read is not None and known.get(str(read.name)) is not read:
                raise CompileError(f"{where}: reads {read.name!r} before anything computes it")
        for value in node.outputs:
            _check_value(value, known, where)
    _check_logits(graph)


def legal(model: ir.Model, target: Target) -> None:
    """After the graph passes: every node is an op of plugins/ or an ONNX op that the target lists.

    Raises:
        CompileError: names the node.
    """
    for node in model.graph:
        if node.domain == "" and node.op_type not in target.onnx_ops:
            raise CompileError(f"{_where(node)}: target {target.name} can't lower this op")


def lowered(plan: Plan, weights: Collection[str], target: Target) -> None:
    """After lowering: every kernel exists for the target, and every weight is there and read.

    Raises:
        CompileError: names the step.
    """
    compiled = set(kernels.ops()) if target.device == "cpu" else set(all_ops())
    for number, step in enumerate(plan.steps):
        if step.op not in compiled:
            raise CompileError(f"step {number} ({step.module}): target {target.name} has no kernel for {step.op}")
    read = {value.base for value in plan.values if value.storage is Storage.WEIGHT}
    if read != set(weights):
        raise CompileError(f"weights and plan disagree on {', '.join(sorted(map(str, read ^ set(weights))))}")


def _check_op(node: ir.Node, where: str) -> None:
    if node.domain not in ("", "llmc"):
        raise CompileError(f"{where}: the domain {node.domain!r} is unknown")
    if node.domain == "llmc":
        op = all_ops().get(node.op_type)
        if op is None:
            raise CompileError(f"{where}: there is no such op; known: {', '.join(all_ops())}")
        required = sum(not name.endswith("?") for name in op.inputs)
        if not required <= len(node.inputs) <= len(op.inputs) or len(node.outputs) != len(op.outputs):
            raise CompileError(f"{where}: has {len(node.inputs)} inputs, expected {', '.join(op.inputs)}")
        if set(node.attributes) != set(op.attributes):
            raise CompileError(f"{where}: has the attributes {list(node.attributes)}, expected {list(op.attributes)}")


def _check_value(value: ir.Value, known: dict[str, ir.Value], where: str) -> None:
    if not value.name or value.name in known:
        raise CompileError(f"{where}: two values have the name {value.name!r}")
    if value.dtype is None or declared_shape(value) is None:
        raise CompileError(f"{where}: {value.name!r} has no exact dtype and shape")
    known[value.name] = value


def _check_logits(graph: ir.Graph) -> None:
    """The first output; what comes behind it are features [.., T, width]."""
    shapes = [declared_shape(value) or () for value in graph.outputs]
    if not shapes or len(shapes[0]) != 2 or shapes[0][0] != Dim(rows=1) or not shapes[0][1].is_constant:
        raise CompileError(f"the graph gives {', '.join(map(show, shapes))}, expected logits [N, vocabulary]")


def _where(node: ir.Node) -> str:
    op = f"{node.domain}::{node.op_type}" if node.domain else node.op_type
    module = node.metadata_props.get("module", "")
    return f"{op} {node.name or node.outputs[0].name!r}" + (f" in {module}" if module else "")


def _where_fx(node: fx.Node) -> str:
    stack: Mapping[str, Any] = node.meta.get("nn_module_stack") or {}
    path = [entry[0] for entry in stack.values()][-1:]
    return f"{node.name} in {path[0]}" if path else node.name


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


def _symbols(value: Any) -> set[str]:
    return {symbol for size in value.shape for symbol in _size_symbols(size)} if isinstance(value, Tensor) else set()


def _size_symbols(size: Any) -> set[str]:
    return set(map(str, size.node.expr.free_symbols)) if isinstance(size, torch.SymInt) else set()


def _shown(value: Tensor) -> str:
    return f"[{', '.join(map(str, value.shape))}]"
