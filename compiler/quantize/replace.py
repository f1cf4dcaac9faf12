"""Puts quantized weights in the place of the others: the steps that read them become those of quantized products."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from llmc.compiler.lower import LoweredGraph
from llmc.compiler.lowering.builder import LoweredStep
from llmc.compiler.lowering.values import View
from llmc.compiler.quantize.sites import DOWN, GATE_UP, stored_view
from llmc.compiler.safetensors_writer import Tensor
from llmc.runtime.plan import Attribute

CODES, SCALE, ZERO, X_SCALE = "", ".scale", ".zero", ".x_scale"


@dataclass(frozen=True)
class QuantizedWeight:
    """What a step has to know. ``tensors`` by suffix: codes, scale, and zero and x_scale if there are any."""

    format: str
    group: int
    compute: str
    x_group: int
    tensors: Mapping[str, Tensor]
    columns: int = 0
    """Of the matrix; experts' packed weights don't tell."""

    def view(self, suffix: str) -> View | None:
        """A tensor as an input of a step."""
        tensor = self.tensors.get(suffix)
        return None if tensor is None else self._views.setdefault(suffix, _view(tensor))

    @property
    def _views(self) -> dict[str, View]:
        found: dict[str, View] = self.__dict__.setdefault("_made", {})
        return found


def replace_weights(graph: LoweredGraph, quantized: Mapping[str, QuantizedWeight]) -> LoweredGraph:
    """The graph with these weights, by name, quantized."""
    steps = [_replaced(step, quantized) for step in graph.steps]
    tensors: dict[str, Tensor] = {}
    for name, weight in graph.weights.items():
        if name in quantized:
            tensors |= {tensor.name: tensor for tensor in quantized[name].tensors.values()}
        else:
            tensors[name] = weight
    return replace(graph, steps=steps, weights=tensors)


def _replaced(step: LoweredStep, quantized: Mapping[str, QuantizedWeight]) -> LoweredStep:
    if step.op == "linear":
        weight = _of(step, 1, quantized)
        return step if weight is None else _linear(step, weight)
    if step.op == "embedding":
        weight = _of(step, 1, quantized)
        return step if weight is None else _embedding(step, weight)
    if step.op == "moe":
        pair = _of(step, GATE_UP, quantized), _of(step, DOWN, quantized)
        return step if pair[0] is None or pair[1] is None else _moe(step, pair[0], pair[1])
    return step


def _linear(step: LoweredStep, weight: QuantizedWeight) -> LoweredStep:
    x, _, bias = (*step.inputs, None)[:3]
    inputs = (x, weight.view(CODES), weight.view(SCALE), weight.view(ZERO), bias, weight.view(X_SCALE))
    return LoweredStep("quantized_linear", inputs, step.outputs, _attributes(weight), step.module)


def _embedding(step: LoweredStep, weight: QuantizedWeight) -> LoweredStep:
    inputs = (step.inputs[0], weight.view(CODES), weight.view(SCALE), weight.view(ZERO))
    given = {**step.attributes, "format": weight.format, "group": weight.group}
    return LoweredStep("embedding", inputs, step.outputs, given, step.module)


def _moe(step: LoweredStep, gate_up: QuantizedWeight, down: QuantizedWeight) -> LoweredStep:
    assert _attributes(gate_up) == _attributes(down), "experts are quantized alike"
    inputs = [*step.inputs, *[None] * (7 - len(step.inputs))]
    inputs[GATE_UP], inputs[DOWN] = gate_up.view(CODES), down.view(CODES)
    scales = [weight.view(suffix) for weight in (gate_up, down) for suffix in (SCALE, ZERO)]
    given = {**step.attributes, **_attributes(gate_up), "inner": down.columns}
    return LoweredStep("moe", (*inputs, *scales), step.outputs, given, step.module)


def _attributes(weight: QuantizedWeight) -> dict[str, Attribute]:
    return {"format": weight.format, "group": weight.group, "compute": weight.compute, "x_group": weight.x_group}


def _of(step: LoweredStep, index: int, quantized: Mapping[str, QuantizedWeight]) -> QuantizedWeight | None:
    view = step.inputs[index]
    return None if view is None else quantized.get(view.buffer.name)


def _view(tensor: Any) -> View:
    return stored_view(tensor.name, tensor.dtype, tensor.shape)
