"""The steps of a model in the form that CUDA kernels take: activations of 16 bits, weights in their packed layout.

Everything before works on the form for the CPU: quantization, golden prompts, measurements. What stays float32 are the
logits, the scores of routers and what is computed with exponentials and the like, tables and small weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmc.compiler.lower import LoweredGraph
from llmc.compiler.lowering.builder import LoweredStep, PackedWeight
from llmc.compiler.lowering.values import Buffer, View, contiguous, dims, product
from llmc.compiler.safetensors_writer import Tensor
from llmc.compiler.weights import CHUNK_BYTES, numpy_dtype
from llmc.errors import CompileError
from llmc.plugins.cuda_packing import PANEL
from llmc.plugins.linear import cuda_packing as plain
from llmc.plugins.quantized_linear import cuda_packing as quantized
from llmc.plugins.quantized_linear import packing as cpu
from llmc.runtime.plan import Dim, Storage

NARROW = ("bfloat16", "float16")
"""What activations may be."""

SCORES = ("softmax", "topk", "cumsum", "gather_elements", "scatter_elements", "reduce")
"""Ops whose inputs and outputs stay float32."""

WIDE_FUNCTIONS = ("exp", "log", "log1p", "expm1", "sin", "cos", "pow", "sqrt", "rsqrt", "reciprocal")
"""The same for functions of elementwise."""

PASSING = ("elementwise", "gather")
"""Ops whose inputs stay float32 where their output does."""

Array = NDArray[Any]


@dataclass(frozen=True, eq=False)
class DeviceTensor:
    """A weight for the device; ``pieces`` makes its bytes when they are written."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    pieces: Callable[[], Iterator[Array]]

    @property
    def nbytes(self) -> int:
        """Bytes in all."""
        return math.prod(self.shape) * numpy_dtype(self.dtype).itemsize

    def chunks(self) -> Iterator[Array]:
        """The bytes in order."""
        yield from self.pieces()


def cuda_form(graph: LoweredGraph, dtype: str, capability: int, packed: dict[Buffer, View]) -> LoweredGraph:
    """The same steps on other buffers and weights.

    Args:
        graph: as it is for the CPU.
        dtype: of activations: bfloat16 or float16.
        capability: what packed layouts are for.
        packed: what weights have become; those of a part of the engine that drafts may be the model's.

    Raises:
        CompileError: a weight or a step has no form for CUDA.
    """
    buffers = _buffers(graph, dtype)
    packer = _Packer(graph, capability, packed)
    steps: list[LoweredStep] = []

    def moved(view: View | None) -> View | None:
        return None if view is None else replace(view, buffer=buffers.get(view.buffer, view.buffer))

    for step in graph.steps:
        inputs, given = [moved(view) for view in packer.inputs(step)], step.attributes
        outputs = [replace(view, buffer=buffers.get(view.buffer, view.buffer)) for view in step.outputs]
        if step.op == "paged_attention":
            inputs[:3] = [_narrowed(view, dtype, steps, step.module) for view in inputs[:3]]
        elif step.op == "moe":
            given = {**given, "inner": packer.inner(step)}
        steps.append(LoweredStep(step.op, tuple(inputs), tuple(outputs), given, step.module))
    logits, *features = (replace(v, buffer=buffers.get(v.buffer, v.buffer)) for v in (graph.logits, *graph.features))
    written = tuple(buffers.get(buffer, buffer) for buffer in graph.given)
    weights = {**graph.weights, **packer.weights}
    return LoweredGraph(steps, logits, weights, graph.kv_slots, written, tuple(features))


def _buffers(graph: LoweredGraph, dtype: str) -> dict[Buffer, Buffer]:
    """What float buffers of the arena become."""
    wide = _wide(graph.steps, graph.logits.buffer)
    made = [view.buffer for step in graph.steps for view in step.outputs if _is_float(view)]
    return {b: Buffer(b.name, b.storage, dtype, b.elements) for b in (*graph.given, *made) if b not in wide}


def _wide(steps: Sequence[LoweredStep], logits: Buffer) -> set[Buffer]:
    """Buffers that stay float32; found backwards, so that what they are computed from is there in full."""
    wide = {logits}
    for step in reversed(steps):
        floats = [view.buffer for view in (*step.inputs, *step.outputs) if view is not None and _is_float(view)]
        results = {view.buffer for view in step.outputs}
        if step.op in SCORES or step.attributes.get("function") in WIDE_FUNCTIONS:
            wide.update(floats)
        elif step.op == "moe":
            weights = step.inputs[2]
            assert weights is not None
            wide.add(weights.buffer)
        elif step.op in PASSING and results & wide:
            wide.update(floats)
        if step.op == "paged_attention":  # gives 16 bits only
            wide -= results
    return wide


def _is_float(view: View) -> bool:
    return view.buffer.storage is Storage.ARENA and view.dtype == "float32"


def _narrowed(view: View | None, dtype: str, steps: list[LoweredStep], module: str) -> View | None:
    """The view, or a copy of 16 bits that a step before makes."""
    if view is None or view.dtype in NARROW:
        return view
    buffer = Buffer(f"{view.buffer.name}:narrow", Storage.ARENA, dtype, product(view.shape))
    copy = View(buffer, view.shape, contiguous(view.shape))
    steps.append(LoweredStep("elementwise", (view,), (copy,), {"function": "copy"}, module))
    return copy


class _Packer:
    """Replaces the packed weights of steps."""

    def __init__(self, graph: LoweredGraph, capability: int, packed: dict[Buffer, View]) -> None:
        self._given, self._capability, self._views = graph.weights, capability, packed
        self.weights: dict[str, Tensor] = {}
        for step in graph.steps:  # products first: tied tables take their form
            if step.op in ("linear", "quantized_linear"):
                self.inputs(step)

    def inputs(self, step: LoweredStep) -> list[View | None]:
        """The inputs of a step, weights as the device has them."""
        inputs, given = list(step.inputs), step.attributes
        if step.op == "linear":
            inputs[1] = self._plain(_there(inputs, 1))
        elif step.op == "embedding":
            table = _there(inputs, 1)
            if given.get("format", "plain") != "plain":
                rows = self._rows_of(table)
                self._quantized(inputs, (1, 2, 3), step, rows, _size(step.outputs[0]))
            elif table.rank > 2:
                inputs[1] = self._plain(table)
        elif step.op == "quantized_linear":
            halves = 2 if given.get("function") else 1
            self._quantized(inputs, (1, 2, 3), step, halves * _size(step.outputs[0]), _size(_there(inputs, 0)))
        elif step.op == "moe":
            self._experts(inputs, step)
        return inputs

    def _experts(self, inputs: list[View | None], step: LoweredStep) -> None:
        if step.attributes.get("format", "plain") == "plain":
            for place in (3, 4):
                inputs[place] = self._plain(_there(inputs, place))
            return
        hidden, given = _size(_there(inputs, 0)), step.attributes
        inner = self.inner(step)
        if not inner:
            raise CompileError(f"{step.module}: experts of this kind have no form for CUDA yet")
        self._quantized(inputs, (3, 7, 8), step, inner * (2 if given["gated"] else 1), hidden)
        self._quantized(inputs, (4, 9, 10), step, hidden, inner)

    def inner(self, step: LoweredStep) -> int:
        """Columns of down, which packed weights do not tell; 0: unknown."""
        given, gate_up = step.attributes, self._given[_there(step.inputs, 3).buffer.name]
        if given.get("format", "plain") != "plain" or not isinstance(gate_up, PackedWeight):
            return int(given.get("inner", 0))
        return gate_up.source.shape[1] // (2 if given["gated"] else 1)

    def _plain(self, view: View) -> View:
        """A weight of 16 bits in fragments."""
        if view.buffer not in self._views:
            weight = self._given[view.buffer.name]
            if not isinstance(weight, PackedWeight) or weight.dtype not in NARROW:
                raise CompileError(f"weight {weight.name} is {weight.dtype} and has no form for CUDA yet")
            *experts, rows, columns = weight.source.shape
            layout = plain.layout(rows, columns)
            source, count, step = weight.source, math.prod(experts), max(PANEL, CHUNK_BYTES // (2 * columns))
            step = step // PANEL * PANEL

            def pieces() -> Iterator[Array]:
                for expert in range(count):
                    if experts:
                        yield plain.pack(source.rows(expert, expert + 1)[0])
                        continue
                    for start in range(0, rows, step):
                        yield plain.pack(np.asarray(source.rows(start, min(rows, start + step))))

            self._store(view, weight.dtype, (*experts, *layout.shape), pieces)
        return self._views[view.buffer]

    def _quantized(
        self, inputs: list[View | None], places: tuple[int, int, int], step: LoweredStep, rows: int, columns: int
    ) -> None:
        given = step.attributes
        format, group = str(given["format"]), int(given["group"])
        compute, x_group = str(given.get("compute", "float32")), int(given.get("x_group", 0))
        layout = quantized.layout(format, group, compute, x_group, rows, columns, self._capability)
        for number, place in enumerate(places):
            view = inputs[place] if place < len(inputs) else None
            if view is None:
                continue
            if view.buffer not in self._views:
                weight = self._given[view.buffer.name]
                rank = len(cpu.packed_shape(format, rows, columns, group)) if not number else 3
                lead = weight.shape[: len(weight.shape) - rank]
                shape = layout.shape if not number else quantized.scale_shape(rows, columns, group)
                pack = _code_packer(format, group, rows, columns, layout) if not number else _scale_packer(rows)
                self._store(view, weight.dtype, (*lead, *shape), _pieces(weight, len(lead), pack))
            inputs[place] = self._views[view.buffer]

    def _rows_of(self, table: View) -> int:
        """Rows of a quantized table: those of the product that shares it, or all that its panels hold."""
        shared = self._views.get(table.buffer)
        return self._given[table.buffer.name].shape[0] * 16 if shared is None else shared.shape[0].constant * PANEL

    def _store(self, view: View, dtype: str, shape: tuple[int, ...], pieces: Callable[[], Iterator[Array]]) -> None:
        name, sizes = view.buffer.name, dims(shape)
        self.weights[name] = DeviceTensor(name, dtype, shape, pieces)
        buffer = Buffer(name, Storage.WEIGHT, dtype, product(sizes))
        self._views[view.buffer] = View(buffer, sizes, contiguous(sizes))


def _code_packer(format: str, group: int, rows: int, columns: int, layout: Any) -> Callable[[Array], Array]:
    def pack(packed: Array) -> Array:
        found: Array = quantized.pack(layout, np.ascontiguousarray(cpu.unpack(format, group, packed, rows, columns)))
        return found

    return pack


def _scale_packer(rows: int) -> Callable[[Array], Array]:
    def pack(packed: Array) -> Array:
        found: Array = quantized.pack_scales(cpu.unpack_scales(packed, rows), packed.dtype.name)
        return found

    return pack


def _pieces(weight: Tensor, lead: int, pack: Callable[[Array], Array]) -> Callable[[], Iterator[Array]]:
    """The whole weight in the other layout, one matrix after the other."""

    def pieces() -> Iterator[Array]:
        parts = [np.asarray(chunk).reshape(-1) for chunk in weight.chunks()]
        whole = np.concatenate(parts).view(numpy_dtype(weight.dtype)).reshape(weight.shape)
        for matrix in whole.reshape(-1, *weight.shape[lead:]):
            yield pack(matrix)

    return pieces


def _there(inputs: Sequence[View | None], place: int) -> View:
    view = inputs[place]
    assert view is not None, f"input {place} is absent"
    return view


def _size(view: View) -> int:
    size: Dim = view.shape[-1]
    return size.constant
