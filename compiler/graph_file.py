"""graph.onnx: the optimised graph for people and for cross-checks, without the weights."""

from __future__ import annotations

from collections.abc import Collection

import onnx_ir as ir

INLINE_BYTES = 4096
"""Constants up to this size stay in the file."""


def to_bytes(model: ir.Model, weights: Collection[str]) -> bytes:
    """Serialise a model, with weights and large tables as inputs; the model is of no other use afterwards."""
    graph = model.graph
    for name, value in sorted(graph.initializers.items()):
        tensor = value.const_value
        if tensor is not None and tensor.nbytes <= INLINE_BYTES and name not in weights:
            value.const_value = ir.tensor(tensor.numpy(), name=name)
            continue
        del graph.initializers[name]
        value.const_value = None
        graph.inputs.append(value)
    content: bytes = ir.to_proto(model).SerializeToString(deterministic=True)
    return content
