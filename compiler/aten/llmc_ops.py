"""The ops of plugins/, which mean the same in both graphs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import onnx_ir as ir
from torch import Tensor, fx

from llmc.plugins import Op, all_ops

if TYPE_CHECKING:
    from llmc.compiler.graph import Converter, Emitter

AS_STORED = {"linear": ("weight",), "embedding": ("weight",), "moe": ("gate_up", "down")}
"""Inputs that keep the dtype of the checkpoint; all other floats are float32."""


def _same_op(op: Op) -> Converter:
    def convert(e: Emitter, node: fx.Node) -> Any:
        inputs: list[ir.Value | None] = []
        for name, argument in zip(op.inputs, node.args, strict=True):
            if argument is None:
                inputs.append(None)
            elif name in AS_STORED.get(op.name, ()) and e.is_weight(argument):
                assert isinstance(argument, fx.Node), f"{node}: {name} is no node"
                inputs.append(e.stored(argument))
            else:
                inputs.append(e.operand(argument))
        attributes = {name: (int if kind is bool else kind)(node.kwargs[name]) for name, kind in op.attributes.items()}
        single = isinstance(node.meta["val"], Tensor)
        count = 1 if single else len(node.meta["val"])
        outputs = [(e.dtype(node, None if single else i), e.dims(node, None if single else i)) for i in range(count)]
        values = e.build.node(op.name, inputs, outputs, attributes, "llmc")
        return values[0] if single else values

    return convert


CONVERTERS: dict[str, Converter] = {f"llmc.{name}": _same_op(op) for name, op in all_ops().items()}
