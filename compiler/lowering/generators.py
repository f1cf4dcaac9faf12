"""Values made from sizes and constants alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir as ir

from llmc.compiler.lowering.builder import Builder, Rule
from llmc.compiler.lowering.nodes import attribute
from llmc.compiler.lowering.values import View
from llmc.errors import CompileError


def _constant_of_shape(builder: Builder, node: ir.Node) -> Sequence[View]:
    value = attribute(node, "value")
    array = np.zeros((), np.float32) if value is None else value.numpy().reshape(())
    sizes = builder.sizes(node.inputs[0])
    return [builder.array(np.ascontiguousarray(array)).expand(sizes)]


def _range(builder: Builder, node: ir.Node) -> Sequence[View]:
    """0, 1, 2, ... is a running sum of ones."""
    start = builder.view(node.inputs[0])
    (limit,) = builder.sizes(node.inputs[1])
    if builder.ints(node, 0) != [0] or builder.ints(node, 2) != [1]:
        raise CompileError("Range over tokens is supported from 0 in steps of 1 only")
    ones = builder.number(1, start.dtype).expand([limit])
    result = builder.allocate([limit], start.dtype)
    builder.emit("cumsum", [ones], [result], exclusive=True)
    return [result]


RULES: Mapping[str, Rule] = {"ConstantOfShape": _constant_of_shape, "Range": _range}
