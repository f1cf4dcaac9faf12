"""FX graph -> onnx_ir graph: llmc ops, a few standard ones, and weights that stay in the checkpoint.

Inputs are int32 ``input_ids`` [T], ``position_ids`` [T] and ``logit_rows`` [N], as batches have them; the output is
``logits`` float32 [N, V]. Floats of the traced model are float32, whatever it asks for. Weights of linear, embedding
and moe keep the dtype of the checkpoint; what else reads a weight gets it cast to float32 (folded by lowering).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, Protocol

import onnx_ir as ir
import torch
from torch import Tensor, fx

from llmc import discover
from llmc.compiler.decompose import decompose
from llmc.compiler.graph_builder import FLOAT, INT32, INT64, OPSETS, GraphBuilder, dims_of
from llmc.compiler.sizes import Sizes
from llmc.compiler.weights import Array, SourceTensor, WeightSource
from llmc.errors import CompileError
from llmc.passes.fx.evaluate import module_path
from llmc.passes.fx.nodes import arguments, op_name
from llmc.runtime.plan import Dim

DTYPES: Mapping[torch.dtype, ir.DataType] = {
    **dict.fromkeys((torch.float32, torch.float64, torch.float16, torch.bfloat16), ir.DataType.FLOAT),
    **dict.fromkeys((torch.int32, torch.int16, torch.int8, torch.uint8), ir.DataType.INT32),
    torch.int64: ir.DataType.INT64,
    torch.bool: ir.DataType.BOOL,
}
FLOATS = frozenset((ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16, ir.DataType.DOUBLE))


class Traced(Protocol):
    """What of a traced program is needed here (compiler/trace.py)."""

    @property
    def module(self) -> fx.GraphModule:
        """Functional, over packed tokens."""
        ...

    @property
    def parameter_names(self) -> Mapping[str, str]:
        """get_attr target -> name of the parameter."""
        ...

    @property
    def buffers(self) -> Mapping[str, Tensor]:
        """get_attr target -> value, for what is not stored."""
        ...


Converter = Callable[["Emitter", fx.Node], Any]
"""Adds the nodes of one call; returns an ir.Value, or a list of them where the call returns several."""


def emit(program: Traced, weight_source: Callable[[str], WeightSource] | None = None) -> ir.Model:
    """The traced and fused program as an onnx_ir model.

    Args:
        program: its module may hold any torch op that is in the tables of compiler/aten, or that torch decomposes into
            such ones.
        weight_source: where the numbers of a parameter are, by its Hugging Face name; without it the module has them.

    Raises:
        CompileError: the graph holds an op that can't be expressed, named with its module.
    """
    decompose(program.module, lambda node: converter(node) is not None)
    return Emitter(program, weight_source).run()


@cache
def converters() -> Mapping[str, Converter]:
    """The converter of each op, by its name without or with its overload."""
    found: dict[str, Converter] = {}
    for module in discover.modules("llmc.compiler.aten"):
        for name, function in getattr(module, "CONVERTERS", {}).items():
            assert name not in found, f"two converters for {name}"
            found[name] = function
    return found


def converter(node: fx.Node) -> Converter | None:
    """The converter of a call: that of its overload, else that of the op."""
    table = converters()
    return table.get(str(node.target)) or table.get(op_name(node))


class Emitter:
    """Walks over the FX graph and keeps what its nodes have become."""

    def __init__(self, program: Traced, weight_source: Callable[[str], WeightSource] | None) -> None:
        self.build = GraphBuilder()
        self._program = program
        self._weight_source = weight_source
        self._sizes = Sizes(program.module)
        self._known: dict[fx.Node, Any] = {}
        self._weights: dict[object, ir.Value] = {}
        self._stored: set[ir.Value] = set()
        self._casts: dict[ir.Value, ir.Value] = {}

    def run(self) -> ir.Model:
        """Emit the whole graph."""
        inputs = self._inputs()
        output: ir.Value | None = None
        for node in self._program.module.graph.nodes:
            self.build.module = module_path(node)
            if node.op == "get_attr":
                self._known[node] = self._weight(node)
            elif node.op == "output":
                result = node.args[0][0] if isinstance(node.args[0], list | tuple) else node.args[0]
                output = self._logits(result)
            elif node.op == "call_function" and isinstance(node.meta.get("val"), Tensor | list | tuple):
                self._known[node] = self._convert(node)
        assert output is not None, "the graph has no output"
        graph = ir.Graph(
            inputs,
            [output],
            nodes=self.build.nodes,
            initializers=list(self.build.initializers.values()),
            opset_imports=OPSETS,
            name=str(type(self._program.module).__name__),
        )
        model = ir.Model(graph, ir_version=11, producer_name="llmc")
        _remove_unused(model)
        return model

    # What converters ask -----------------------------------------------------

    def operand(self, argument: Any, dtype: ir.DataType | None = None) -> ir.Value:
        """A tensor or number as a value of this dtype, by default the one that torch gives it."""
        if not isinstance(argument, fx.Node):
            if isinstance(argument, Tensor):
                return self.build.constant(argument.numpy(), dtype or DTYPES[argument.dtype])
            return self.build.constant(argument, dtype or _dtype_of_number(argument))
        found = self.stored(argument)
        wanted = dtype or DTYPES[argument.meta["val"].dtype]
        if found.dtype == wanted:
            return found
        if found in self._stored:  # a weight: one Cast for all that read it
            if found not in self._casts:
                self._casts[found] = self.build.cast(found, FLOAT)
            return self.build.cast(self._casts[found], wanted)
        return self.build.cast(found, wanted)

    def stored(self, argument: fx.Node) -> ir.Value:
        """A tensor as it is, without a conversion: weights have the dtype of the checkpoint."""
        if argument not in self._known:
            raise CompileError(f"{self.where(argument)}: a number of tokens is used as data, which is not supported")
        found = self._known[argument]
        assert isinstance(found, ir.Value), f"{argument} is no tensor"
        return found

    def parts(self, argument: fx.Node) -> list[ir.Value]:
        """The values of a call that returns several."""
        found = self._known[argument]
        assert isinstance(found, list), f"{argument} is a tensor"
        return found

    def is_weight(self, argument: Any) -> bool:
        """Whether it is a weight in its dtype in the checkpoint, rearranged or not."""
        return isinstance(argument, fx.Node) and self._known.get(argument) in self._stored

    def keep_stored(self, *values: ir.Value) -> None:
        """These are weights, rearranged."""
        self._stored.update(values)

    def dims(self, node: fx.Node, index: int | None = None) -> tuple[Dim, ...]:
        """The shape that torch found for the result of a call, or for one of its results."""
        value = node.meta["val"]
        return self._sizes.dims((value if index is None else value[index]).shape)

    def size(self, argument: Any) -> Dim:
        """A size: an int, or a node that computes one."""
        return self._sizes.dim(argument.meta["val"] if isinstance(argument, fx.Node) else argument)

    def dtype(self, node: fx.Node, index: int | None = None) -> ir.DataType:
        """The dtype that torch found, as it is computed here."""
        value = node.meta["val"]
        torch_dtype = (value if index is None else value[index]).dtype
        if torch_dtype not in DTYPES:
            raise self.unsupported(node, f"gives {torch_dtype}")
        return DTYPES[torch_dtype]

    def where(self, node: fx.Node) -> str:
        """The op and its module, for messages."""
        path = module_path(node)
        return f"{op_name(node)}{f' in {path}' if path else ''}"

    def unsupported(self, node: fx.Node, why: str) -> CompileError:
        """The error to raise for a call that can't be expressed."""
        return CompileError(
            f"{self.where(node)} {why}, which no kernel does. Give the model's family a fix (compiler/families/) that "
            "computes it otherwise, or add a converter to compiler/aten/."
        )

    # Parts of run ------------------------------------------------------------

    def _inputs(self) -> list[ir.Value]:
        tokens, rows = (Dim(tokens=1),), (Dim(rows=1),)
        inputs = [self.build.value(name, INT32, tokens) for name in ("input_ids", "position_ids")]
        inputs.append(self.build.value("logit_rows", INT32, rows))
        self.build.tokens, self.build.rows = inputs[0], inputs[2]
        # The rows come first, so that a pass can pick them from anything that follows.
        for node in reversed(self._program.module.graph.find_nodes(op="placeholder")):
            value = next(v for v in inputs if v.name == node.name)
            self._known[node] = self.build.reshape(self.build.cast(value, INT64), self.dims(node))
        return inputs

    def _weight(self, node: fx.Node) -> ir.Value:
        target = str(node.target)
        name = self._program.parameter_names.get(target, target)
        source: WeightSource
        if name != target or target in self._program.parameter_names:
            source = self._weight_source(name) if self._weight_source else _in_memory(self._program, target)
        else:
            source = _in_memory(self._program, target)
        key = id(source) if self._weight_source and target in self._program.parameter_names else name
        if key not in self._weights:  # tied parameters have the same source
            self._weights[key] = self.build.initializer(name, SourceTensor(source, name))
        value = self._weights[key]
        if dims_of(value) != self.dims(node):
            raise CompileError(
                f"{name}: shape {source.shape} in the checkpoint, {tuple(node.meta['val'].shape)} in the model"
            )
        if value.dtype in FLOATS:
            self._stored.add(value)
        return value

    def _convert(self, node: fx.Node) -> Any:
        function = converter(node)
        if function is None:
            raise self.unsupported(node, f"is an op of torch ({node.target})")
        first = len(self.build.nodes)
        try:
            result = function(self, node)
        except CompileError as error:
            if op_name(node) in str(error):
                raise
            raise CompileError(f"{self.where(node)}: {error}") from error
        self._check(node, result)
        produced = {id(value) for made in self.build.nodes[first:] for value in made.outputs}
        if isinstance(result, ir.Value) and id(result) in produced:
            result.name = node.name
        return result

    def _check(self, node: fx.Node, result: Any) -> None:
        """What was emitted has the shape and dtype that torch found."""
        single = isinstance(result, ir.Value)
        for i, value in enumerate([result] if single else result):
            if value is None:
                continue
            index = None if single else i
            assert dims_of(value) == self.dims(node, index), f"{node}: {dims_of(value)} is not {self.dims(node, index)}"
            assert value in self._stored or value.dtype == self.dtype(node, index), f"{node}: {value.dtype}"

    def _logits(self, node: fx.Node) -> ir.Value:
        logits = self.operand(node, FLOAT)
        result = self.build.reshape(logits, dims_of(logits)[-2:])
        if result.producer() is None:
            result = self.build.unary("Identity", result)
        result.name = "logits"
        return result


def _in_memory(program: Traced, target: str) -> Array:
    value = program.buffers.get(target)
    if value is None:
        path, _, last = target.rpartition(".")
        value = getattr(program.module.get_submodule(path), last)
    if value.is_meta:
        raise CompileError(f"{target}: it has no numbers")
    value = value.detach().cpu().contiguous()
    if value.dtype == torch.bfloat16:
        import ml_dtypes

        return Array(value.view(torch.uint16).numpy().view(ml_dtypes.bfloat16))
    if value.dtype in (torch.float64, torch.int16, torch.int8, torch.uint8):
        value = value.to(torch.float32 if value.dtype.is_floating_point else torch.int32)
    return Array(value.numpy())


def _dtype_of_number(number: Any) -> ir.DataType:
    if isinstance(number, bool):
        return ir.DataType.BOOL
    return INT64 if isinstance(number, int) else FLOAT


def _remove_unused(model: ir.Model) -> None:
    """Nodes and initializers that nothing reads, such as casts of weights that are only read as they are."""
    graph = model.graph
    for node in reversed(list(graph)):
        if not any(out.uses() or out.is_graph_output() for out in node.outputs):
            graph.remove(node, safe=True)
    for name, value in list(graph.initializers.items()):
        if not value.uses() and not value.is_graph_output():
            del graph.initializers[name]


__all__ = ["Converter", "Emitter", "Traced", "arguments", "converter", "converters", "emit"]
