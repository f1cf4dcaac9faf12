"""Runs a graph with the references of the ops, without an engine: for checks and tests, not for speed.

Standard nodes are run by ONNX's own reference implementation, so that what we emit is held to what ONNX says.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
import torch
from numpy.typing import NDArray
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

from llmc.plugins import Op, all_ops

Array = NDArray[Any]


def run_graph(
    model: ir.Model, inputs: Mapping[str, Array], weights: Mapping[str, Array] | None = None
) -> dict[str, Array]:
    """The outputs by name.

    Args:
        model: its initializers are read, but for those that ``weights`` replaces.
        inputs: int32 ``input_ids`` and ``position_ids`` [T], ``logit_rows`` [N].
        weights: other numbers for some initializers, by name; the dtype may be another one, too.
    """
    proto = ir.to_proto(_without_weights(model))
    feeds = {name: np.asarray(value) for name, value in inputs.items() if name in {i.name for i in model.graph.inputs}}
    for name, value in model.graph.initializers.items():
        assert value.const_value is not None, f"{name} has no value"
        feeds[name] = weights[name] if weights and name in weights else value.const_value.numpy()
    evaluator = ReferenceEvaluator(proto, new_ops=[_op_class(op) for op in all_ops().values()])
    results = evaluator.run(None, feeds)
    return {str(out.name): result for out, result in zip(model.graph.outputs, results, strict=True)}


def _without_weights(model: ir.Model) -> ir.Model:
    """The graph with its initializers as inputs: their numbers stay where they are."""
    graph = model.graph.clone()
    for name, value in list(graph.initializers.items()):
        del graph.initializers[name]
        value.const_value = None
        graph.inputs.append(value)
    return ir.Model(graph, ir_version=model.ir_version)


def _op_class(op: Op) -> type[OpRun]:
    """ONNX's way to add an op: a class named like it."""

    def run(_: OpRun, *inputs: Array | None, **given_attributes: Any) -> tuple[Array, ...]:
        attributes = {name: kind(_text(given_attributes[name])) for name, kind in op.attributes.items()}
        given = [None if x is None else _to_torch(x) for x in inputs]
        given += [None] * (len(op.inputs) - len(given))
        with torch.no_grad():
            result = op.reference(*given, **attributes)
        return tuple(y.numpy() for y in (result if isinstance(result, tuple) else (result,)))

    return type(op.name, (OpRun,), {"op_domain": "llmc", "_run": run})


def _text(value: Any) -> Any:
    return value.decode() if isinstance(value, bytes) else value


def _to_torch(array: Array) -> torch.Tensor:
    array = np.ascontiguousarray(array).reshape(np.shape(array))
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.uint16).astype(np.int32)).to(torch.int16).view(torch.bfloat16)
    return torch.from_numpy(array.copy())
