"""Lowers heads to a plan of their own, which takes what goes into the output layer and shares that layer if tied."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from llmc.compiler import weights
from llmc.compiler.engine_writer import ArrayTensor
from llmc.compiler.lower import LoweredGraph
from llmc.compiler.lowering.builder import LoweredStep, PackedWeight
from llmc.compiler.lowering.values import ONE, Buffer, View, contiguous
from llmc.compiler.medusa.heads import Heads
from llmc.compiler.quantize.coverage import Predicted
from llmc.compiler.quantize.decisions import MIN_NUMBERS, compute_of, method_text, x_group_of
from llmc.compiler.quantize.replace import CODES, SCALE, ZERO, QuantizedWeight, replace_weights
from llmc.compiler.quantize.sites import stored_view, weight_view
from llmc.compiler.weights import Array, Cast, Concat, WeightSource
from llmc.errors import CompileError
from llmc.plugins import all_ops
from llmc.plugins.quantized_linear import packing
from llmc.quantization.base import Method, Statistics
from llmc.quantization.rtn import Rtn
from llmc.runtime.heads import HIDDEN
from llmc.runtime.plan import Attribute, Dim, Storage

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llmc.compiler.safetensors_writer import Tensor
    from llmc.runtime.lora import Linears

OF_OUTPUTS = ("weight", "scale", "zero", "bias")
"""Inputs of a product that have something for each output."""


@dataclass(frozen=True, eq=False)
class Picked(weights.Sized):
    """Some rows of a source, in rising order."""

    source: WeightSource
    ids: NDArray[np.int32]

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes."""
        return (len(self.ids), *self.source.shape[1:])

    @property
    def dtype(self) -> str:
        """That of the source."""
        return self.source.dtype

    def rows(self, start: int, stop: int) -> NDArray[Any]:
        """Reads what lies between, too, a bounded piece at a time."""
        wanted, found = self.ids[start:stop], [self.source.rows(0, 0)]
        step = max(1, weights.CHUNK_BYTES * len(self.ids) // max(1, self.nbytes))
        for begin in range(int(wanted[0]), int(wanted[-1]) + 1, step) if len(wanted) else ():
            end = min(begin + step, self.source.shape[0])
            found.append(self.source.rows(begin, end)[wanted[(wanted >= begin) & (wanted < end)] - begin])
        return np.concatenate(found)


def output_step(graph: LoweredGraph) -> LoweredStep:
    """The product that makes the logits.

    Raises:
        CompileError: there is none.
    """
    wanted: View | None = graph.logits
    for step in reversed(graph.steps):
        if wanted is not None and any(view.buffer is wanted.buffer for view in step.outputs):
            if step.op in ("linear", "quantized_linear"):
                return step
            wanted = step.inputs[0]
    raise CompileError("--medusa: the model's logits are not made by a product with a weight, which heads could share")


def embedding_step(model: LoweredGraph) -> LoweredStep | None:
    """The step that takes the embeddings of the tokens from a table."""
    for step in model.steps:
        if step.op == "embedding" and step.inputs[0] is not None and step.inputs[0].buffer.name == "input_ids":
            return step
    return None


def output_factors(graph: LoweredGraph, linears: Linears | None) -> Sequence[float]:
    """What its input is divided by, if that is known; (): nothing."""
    weight = output_step(graph).inputs[1]
    assert weight is not None, "a product has a weight"
    linear = None if linears is None else linears.weights.get(weight.buffer.name)
    return () if linear is None else linear.columns


def lower_heads(
    heads: Heads,
    model: LoweredGraph,
    factors: Sequence[float],
    dtype: str,
    method: Method | None,
    compute: str,
    ids: NDArray[np.int32] | None = None,
) -> LoweredGraph:
    """The steps of the heads, and all weights that they read, those of the model too.

    Args:
        heads: the checkpoint.
        model: the steps of the model, as they will be run.
        factors: what the input of its output layer is divided by, () if it is not.
        dtype: of the weights.
        method: how the weights of the model are quantized; those of the heads are rounded to the same format.
        compute: what products with quantized weights compute with.
        ids: tokens, rising, that logits are made of; None: all.
    """
    last = output_step(model)
    assert last.inputs[0] is not None, "a product has an input"
    build = StepBuilder(dtype, "medusa")
    width = last.inputs[0].shape[-1].constant
    x, count = build.add_input(HIDDEN, Dim(rows=1), width), len(heads.heads)
    shared: dict[str, Any] = {}
    begin = _seeing(build, heads, model, x, shared) if heads.sees_token else [x] * count
    rows = build.buffer("rows", Dim(rows=count), width)
    for number, head in enumerate(heads.heads):
        blocks = [(b.weight, b.bias) for b in head.blocks]
        _add_head(build, number, begin[number], blocks, _part(rows, number))
    width = last.outputs[0].shape[-1].constant if ids is None else len(ids)
    logits = build.buffer("logits", Dim(rows=count), width)
    if heads.is_tied:
        if factors:
            inverse = 1 / np.array(factors, np.float32)
            view = build.weight("medusa.input_scale", Array(inverse))
            spread = View(view.buffer, rows.shape, (Dim(0), Dim(1)))
            scaled = build.buffer("scaled", Dim(rows=count), rows.shape[1].constant)
            build.steps.append(LoweredStep("elementwise", (rows, spread), (scaled,), {"function": "mul"}, "medusa"))
            rows = scaled
        given, tensors = _output_layer(last, model, ids)
        shared |= tensors
        build.steps.append(LoweredStep(last.op, (rows, *given), (logits,), last.attributes, "medusa"))
    else:
        for number, head in enumerate(heads.heads):
            assert head.output is not None, "they are not tied"
            output = head.output if ids is None else Picked(head.output, ids)
            build.linear(f"medusa.{number}.output", _part(rows, number), output, None, _part(logits, number))
    graph = LoweredGraph(build.steps, logits, {**shared, **build.weights}, {}, given=build.buffers_given)
    if method is not None:
        graph = with_rounded(graph, build.matrices, method, compute)
    return graph


def _output_layer(
    last: LoweredStep, model: LoweredGraph, ids: NDArray[np.int32] | None
) -> tuple[list[View | None], dict[str, Tensor]]:
    """What the product is given besides x, for these outputs, and the tensors."""
    views, tensors = list(last.inputs[1:]), {}
    for place, (name, view) in enumerate(zip(all_ops()[last.op].inputs[1:], last.inputs[1:], strict=False)):
        if view is not None:
            tensor: Tensor = model.weights[view.buffer.name]
            if ids is not None and name.strip("?") in OF_OUTPUTS:
                tensor = _picked(tensor, ids, f"medusa.output.{name.strip('?')}")
                views[place] = stored_view(tensor.name, tensor.dtype, tensor.shape)
            tensors[tensor.name] = tensor
    return views, tensors


def _picked(tensor: Tensor, ids: NDArray[np.int32], name: str) -> Tensor:
    """Panels, or a vector, for these outputs only, which rise."""
    if isinstance(tensor, PackedWeight):
        return PackedWeight(name, Picked(tensor.source, ids), tensor.panels)
    panels = len(tensor.shape) > 1
    if isinstance(tensor, Predicted):
        return tensor.part(name, -(-len(ids) // packing.PANEL) if panels else len(ids))
    dtype, parts = weights.numpy_dtype(tensor.dtype), []
    size, begin = packing.PANEL if panels else 1, 0
    for chunk in tensor.chunks():
        rows = chunk.reshape(-1).view(dtype).reshape(-1, *tensor.shape[1:])  # it may come as bytes
        mine = ids[(ids >= begin) & (ids < begin + size * len(rows))] - begin
        parts.append(rows[mine // size, :, mine % size] if panels else rows[mine])
        begin += size * len(rows)
    picked = np.concatenate(parts)
    if panels:
        padded = np.zeros((-(-len(ids) // size) * size, *picked.shape[1:]), picked.dtype)
        padded[: len(ids)] = picked
        picked = padded.reshape(-1, size, *picked.shape[1:]).swapaxes(1, 2)
    return ArrayTensor(name, np.ascontiguousarray(picked))


class StepBuilder:
    """Collects the steps and weights of a plan beside the model's. ``module``: what they are a part of."""

    def __init__(self, dtype: str, module: str) -> None:
        self.dtype, self.module = dtype, module
        self.steps: list[LoweredStep] = []
        self.weights: dict[str, Any] = {}
        self.matrices: dict[str, WeightSource] = {}
        """Those that may be quantized."""
        self.given: list[View] = []

    @property
    def buffers_given(self) -> tuple[Buffer, ...]:
        """For `LoweredGraph`."""
        return tuple(view.buffer for view in self.given)

    def add_input(self, name: str, rows: Dim, width: int) -> View:
        """What is written from outside, [rows, width]."""
        self.given.append(self.buffer(name, rows, width))
        return self.given[-1]

    @staticmethod
    def batch(name: str, count: Dim) -> View:
        """Numbers that come with each batch."""
        return View(Buffer(name, Storage.BATCH, "int32", count), (count,), (ONE,))

    def buffer(self, name: str, rows: Dim, width: int) -> View:
        """A new [rows, width]."""
        shape = (rows, Dim(width))
        return View(Buffer(name, Storage.ARENA, "float32", rows * width), shape, contiguous(shape))

    def weight(self, name: str, source: WeightSource) -> View:
        """A float32 vector or matrix, or int32 numbers."""
        dtype = source.dtype if source.dtype == "int32" else "float32"
        self.weights[name] = PackedWeight(name, source if source.dtype == dtype else Cast(source, dtype))
        return weight_view(self.weights[name])

    def step(self, op: str, inputs: Sequence[View | None], *outputs: View, **attributes: Attribute) -> View:
        """Append one; returns its last output."""
        self.steps.append(LoweredStep(op, tuple(inputs), outputs, attributes, self.module))
        return outputs[-1]

    def linear(self, name: str, x: View, weight: WeightSource, bias: View | None, y: View) -> View:
        """X times a matrix, into y."""
        self.matrices[name] = weight
        source = weight if weight.dtype == self.dtype else Cast(weight, self.dtype)
        self.weights[name] = PackedWeight(name, source, panels=True)
        return self.step("linear", (x, weight_view(self.weights[name]), bias), y)


def _seeing(build: StepBuilder, heads: Heads, model: LoweredGraph, x: View, shared: dict[str, Any]) -> list[View]:
    """What each head begins with: x, and what it makes of the embedding of the model's own token."""
    step = embedding_step(model)
    assert step is not None, "it was looked for"
    names = [view.buffer.name for view in step.inputs[1:] if view is not None]
    shared |= {name: model.weights[name] for name in names}
    sources = [head.token for head in heads.heads if head.token is not None]
    (width, size), tokens = sources[0].shape, Dim(tokens=1)
    given = build.buffer("embedded", tokens, size)
    build.step("embedding", [build.batch("input_ids", tokens), *step.inputs[1:]], given, **step.attributes)
    numbers = build.batch("logit_rows", Dim(rows=1))
    rows = build.step("gather", (given, numbers), build.buffer("token", Dim(rows=1), size))
    made = build.buffer("seen", Dim(rows=1), len(sources) * width)
    build.linear("medusa.token.weight", rows, Concat(tuple(sources)), None, made)
    begin = []
    for number in range(len(sources)):
        part = made.narrow(1, Dim(number * width), Dim(width))
        out = build.buffer(f"medusa.{number}.begin", Dim(rows=1), width)
        begin.append(build.step("elementwise", (x, part), out, function="add"))
    return begin


def _add_head(
    build: StepBuilder, number: int, x: View, blocks: Sequence[tuple[WeightSource, WeightSource]], out: View
) -> None:
    """X + silu(W x + b) for each block, the last one into ``out``."""
    width = x.shape[1].constant
    for layer, (weight, bias) in enumerate(blocks):
        name = f"medusa.{number}.{layer}"
        y, z = (build.buffer(f"{name}.{kind}", Dim(rows=1), width) for kind in ("linear", "silu"))
        build.linear(f"{name}.weight", x, weight, build.weight(f"{name}.bias", bias), y)
        result = out if layer == len(blocks) - 1 else build.buffer(name, Dim(rows=1), width)
        build.step("elementwise", (y,), z, function="silu")
        x = build.step("elementwise", (x, z), result, function="add")


def _part(view: View, number: int) -> View:
    """The rows of one head."""
    width = view.shape[1]
    return View(view.buffer, (Dim(rows=1), width), view.strides, width * Dim(rows=number))


def rounding(method: Method) -> Method:
    """What gives the weights of heads the format of a method, which may need to know more than there is to know."""
    if method.needs is Statistics.NONE:
        return method
    scheme = method.weights
    return Rtn(bits=scheme.bits, group=scheme.group, sym=scheme.symmetric)


def describe(method: Method | None) -> str:
    """For the report."""
    return "none" if method is None else method_text(rounding(method))


def with_rounded(graph: LoweredGraph, matrices: dict[str, WeightSource], method: Method, compute: str) -> LoweredGraph:
    """With these weights rounded to the format of a method, but for the smallest."""
    made, scheme = {}, method.weights
    chosen = compute_of(method, compute)
    for name, source in matrices.items():
        if source.shape[0] * source.shape[1] < MIN_NUMBERS:
            continue
        found, _ = rounding(method).quantize(weights.read(source).astype(np.float32), name=name)
        scale = packing.pack_scales(found.scale, packing.scale_dtype(found.scale))
        tensors = {
            CODES: ArrayTensor(name, packing.pack(scheme.format, scheme.group, found.codes)),
            SCALE: ArrayTensor(name + SCALE, scale),
        }
        if found.zero is not None:
            tensors[ZERO] = ArrayTensor(name + ZERO, packing.pack_scales(found.zero, found.zero.dtype.name))
        made[name] = QuantizedWeight(
            scheme.format, scheme.group, chosen, x_group_of(method, chosen), tensors, source.shape[1]
        )
    return replace_weights(graph, made)
