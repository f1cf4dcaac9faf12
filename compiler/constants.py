"""What a graph computes from weights alone: folded into weight sources, lazily where that is a view of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
from numpy.typing import NDArray
from onnx.reference import ReferenceEvaluator

from llmc.compiler import weights
from llmc.compiler.weights import Array, WeightSource
from llmc.errors import CompileError
from llmc.plugins import all_ops

_OPAQUE = frozenset(("paged_attention", "RandomNormal", "RandomUniform", "Bernoulli"))
_NARROW = tuple(np.dtype(t) for t in (ml_dtypes.bfloat16, np.float16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2))


class Constants:
    """The values of a graph that depend on its initializers only. Nothing is read before someone asks."""

    def __init__(self, graph: ir.Graph) -> None:
        self._known: dict[ir.Value, WeightSource | None] = {}
        for value in graph.initializers.values():
            if value.const_value is None:
                raise CompileError(f"initializer {value.name!r} has no tensor")
            self._known[value] = weights.source_of(value.const_value)
        for node in graph:
            if self._is_constant(node):
                self._known.update(dict.fromkeys(node.outputs))

    def __contains__(self, value: ir.Value | None) -> bool:
        return value in self._known or (value is not None and value.const_value is not None)

    def source(self, value: ir.Value) -> WeightSource:
        """The numbers of a constant value."""
        found = self._known.get(value)
        if found is None:
            if value.const_value is not None:
                self._known[value] = weights.source_of(value.const_value)
            else:
                node = value.producer()
                assert node is not None, f"{value.name} is no constant"
                self._known.update(zip(node.outputs, self._fold(node), strict=True))
            found = self._known[value]
            assert found is not None, f"{value.name} was not folded"
        return found

    def array(self, value: ir.Value) -> NDArray[Any]:
        """A constant value as an array, for those that are known to be small."""
        return weights.read(self.source(value))

    def _is_constant(self, node: ir.Node) -> bool:
        if node.op_type in _OPAQUE or any(a.type == ir.AttributeType.GRAPH for a in node.attributes.values()):
            return False
        if node.op_type == "Shape":
            shape = node.inputs[0].shape if node.inputs[0] is not None else None
            return shape is not None and all(isinstance(size, int) for size in shape)
        return all(value is None or value in self for value in node.inputs)

    def _fold(self, node: ir.Node) -> Sequence[WeightSource]:
        if node.domain == "" and node.op_type in _VIEWS:
            view = _VIEWS[node.op_type](self, node)
            if view is not None:
                return view
        return [Array(array) for array in self._evaluate(node)]

    def _evaluate(self, node: ir.Node) -> Sequence[NDArray[Any]]:
        if node.op_type == "Shape":
            shape = node.inputs[0].shape if node.inputs[0] is not None else None
            assert shape is not None, "Shape of a value whose shape is unknown"
            begin, end = _attribute(node, "start", 0), _attribute(node, "end", None)
            return [np.array([int(size) for size in shape][begin:end], np.int64)]  # type: ignore[arg-type]
        inputs = [None if value is None else _widen(self.array(value)) for value in node.inputs]
        if node.domain == "llmc":
            return _evaluate_plugin(node, inputs)
        return _evaluate_onnx(node, inputs)


def _widen(array: NDArray[Any]) -> NDArray[Any]:
    """Arithmetic on weights is done in float32, like that on activations."""
    return array.astype(np.float32) if array.dtype in _NARROW else array


def _evaluate_onnx(node: ir.Node, inputs: Sequence[NDArray[Any] | None]) -> Sequence[NDArray[Any]]:
    proto = ir.to_proto(node)
    assert isinstance(proto, onnx.NodeProto), "a node serialises to a NodeProto"
    names = [f"i{i}" if array is not None else "" for i, array in enumerate(inputs)]
    outputs = [f"o{i}" for i in range(len(node.outputs))]
    del proto.input[:], proto.output[:]
    proto.input.extend(names)
    proto.output.extend(outputs)
    feeds = {name: array for name, array in zip(names, inputs, strict=True) if array is not None}
    infos = [
        onnx.helper.make_tensor_value_info(name, onnx.helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)
        for name, array in feeds.items()
    ]
    results = [onnx.helper.make_empty_tensor_value_info(name) for name in outputs]
    graph = onnx.helper.make_graph([proto], "constant", infos, results)
    version = node.graph.opset_imports.get("", 23) if node.graph is not None else 23
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", version)])
    try:
        found = ReferenceEvaluator(model).run(None, feeds)
    except Exception as error:
        raise CompileError(f"{node.op_type} {node.name!r}: can't be computed from weights alone ({error})") from error
    return [np.asarray(array) for array in found]


def _evaluate_plugin(node: ir.Node, inputs: Sequence[NDArray[Any] | None]) -> Sequence[NDArray[Any]]:
    import torch

    op = all_ops()[node.op_type]
    given = {name: kind(_attribute(node, name, None)) for name, kind in op.attributes.items()}
    tensors = [None if array is None else torch.from_numpy(np.array(array)) for array in inputs]
    results = op.reference(*tensors, *[None] * (len(op.inputs) - len(tensors)), **given)
    return [result.numpy() for result in (results if isinstance(results, tuple) else (results,))]


def _attribute(node: ir.Node, name: str, default: Any) -> Any:
    return node.attributes[name].value if name in node.attributes else default


def _ints(constants: Constants, node: ir.Node, index: int) -> list[int] | None:
    if index >= len(node.inputs) or (value := node.inputs[index]) is None:
        return None
    return [int(x) for x in constants.array(value).reshape(-1)]


def _input(constants: Constants, node: ir.Node, index: int = 0) -> WeightSource:
    value = node.inputs[index]
    assert value is not None, f"{node.name} has no input {index}"
    return constants.source(value)


def _identity(constants: Constants, node: ir.Node) -> list[WeightSource]:
    return [_input(constants, node)]


def _cast(constants: Constants, node: ir.Node) -> list[WeightSource] | None:
    source = _input(constants, node)
    to = ir.DataType(_attribute(node, "to", 0)).numpy().name
    both_float = ir.DataType.from_numpy(weights.numpy_dtype(source.dtype)).is_floating_point()
    if not both_float or not ir.DataType(_attribute(node, "to", 0)).is_floating_point():
        return None
    return [source if source.dtype == to else weights.Cast(source, to)]


def _transpose(constants: Constants, node: ir.Node) -> list[WeightSource]:
    source = _input(constants, node)
    order = _attribute(node, "perm", range(len(source.shape))[::-1])
    return [weights.Transpose(source, tuple(order))]


def _reshape(constants: Constants, node: ir.Node) -> list[WeightSource]:
    source, target = _input(constants, node), _ints(constants, node, 1)
    assert target is not None, "Reshape has a target"
    if not _attribute(node, "allowzero", 0):
        target = [source.shape[i] if size == 0 else size for i, size in enumerate(target)]
    return [weights.Reshape(source, np.broadcast_to(np.int8(0), source.shape).reshape(target).shape)]


def _flatten(constants: Constants, node: ir.Node) -> list[WeightSource]:
    source, axis = _input(constants, node), _attribute(node, "axis", 1)
    rows = int(np.prod(source.shape[:axis]))
    return [weights.Reshape(source, (rows, int(np.prod(source.shape)) // max(rows, 1)))]


def _squeeze(constants: Constants, node: ir.Node) -> list[WeightSource]:
    source, axes = _input(constants, node), _ints(constants, node, 1)
    shape = np.broadcast_to(np.int8(0), source.shape).squeeze(None if axes is None else tuple(axes)).shape
    return [weights.Reshape(source, shape)]


def _unsqueeze(constants: Constants, node: ir.Node) -> list[WeightSource]:
    source, axes = _input(constants, node), _ints(constants, node, 1)
    assert axes is not None, "Unsqueeze has axes"
    return [weights.Reshape(source, np.expand_dims(np.broadcast_to(np.int8(0), source.shape), tuple(axes)).shape)]


def _slice(constants: Constants, node: ir.Node) -> list[WeightSource]:
    source = _input(constants, node)
    starts, ends = _ints(constants, node, 1), _ints(constants, node, 2)
    assert starts is not None and ends is not None, "Slice has starts and ends"
    axes = _ints(constants, node, 3) or list(range(len(starts)))
    steps = _ints(constants, node, 4) or [1] * len(starts)
    cuts = [slice(None)] * len(source.shape)
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        size = source.shape[axis]
        last: int | None = max(end, -size) if step > 0 else (None if end < -size else end)
        cuts[axis] = slice(start, last, step)
    return [weights.Slice(source, tuple(cuts))]


def _split(constants: Constants, node: ir.Node) -> list[WeightSource]:
    source, sizes = _input(constants, node), _ints(constants, node, 1)
    axis = _attribute(node, "axis", 0) % len(source.shape)
    if sizes is None:
        part = -(-source.shape[axis] // len(node.outputs))
        sizes = [min(part, source.shape[axis] - i * part) for i in range(len(node.outputs))]
    results: list[WeightSource] = []
    begin = 0
    for size in sizes:
        cuts = [slice(None)] * axis + [slice(begin, begin + size)]
        results.append(weights.Slice(source, tuple(cuts)))
        begin += size
    return results


def _concat(constants: Constants, node: ir.Node) -> list[WeightSource]:
    parts = [_input(constants, node, i) for i in range(len(node.inputs))]
    if len({part.dtype for part in parts}) > 1:
        parts = [part if part.dtype == "float32" else weights.Cast(part, "float32") for part in parts]
    return [weights.concat(parts, _attribute(node, "axis", 0) % len(parts[0].shape))]


def _select(constants: Constants, node: ir.Node) -> list[WeightSource] | None:
    """Gather with one index: a slice, the axis of which goes away."""
    source, ids = _input(constants, node), _input(constants, node, 1)
    axis = _attribute(node, "axis", 0) % len(source.shape)
    if ids.shape:
        return None
    index = int(weights.read(ids)) % source.shape[axis]
    cut = weights.Slice(source, (*[slice(None)] * axis, slice(index, index + 1)))
    return [weights.Reshape(cut, (*source.shape[:axis], *source.shape[axis + 1 :]))]


_VIEWS: Mapping[str, Callable[[Constants, ir.Node], list[WeightSource] | None]] = {
    "Identity": _identity,
    "Cast": _cast,
    "Transpose": _transpose,
    "Reshape": _reshape,
    "Flatten": _flatten,
    "Squeeze": _squeeze,
    "Unsqueeze": _unsqueeze,
    "Slice": _slice,
    "Split": _split,
    "Concat": _concat,
    "Gather": _select,
}
"""op: its result as views of its inputs, or None where it has to be computed."""
