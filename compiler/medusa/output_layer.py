"""The output layer of an engine and its table of embeddings: the steps, and their weights as plain numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from llmc.errors import CompileError, UsageError
from llmc.plugins import all_ops
from llmc.plugins.linear import packing
from llmc.plugins.quantized_linear import packing as quantized
from llmc.runtime.engine import Engine
from llmc.runtime.lora import input_factors
from llmc.runtime.plan import Plan, Step


@dataclass(frozen=True, eq=False)
class OutputLayer:
    """Weight [V, H], bias [V] or None, float32: what multiplies the rows that `CpuExecutor.embed` gives."""

    weight: NDArray[np.float32]
    bias: NDArray[np.float32] | None


def output_step(plan: Plan) -> Step:
    """The product that makes the logits; what comes after it, such as a soft cap, changes no order among them.

    Raises:
        CompileError: there is none.
    """
    wanted: str | None = plan.logits
    for step in reversed(plan.steps):
        if wanted in step.outputs:
            if step.op in ("linear", "quantized_linear"):
                return step
            wanted = step.inputs[0]
    raise CompileError(
        "the model's logits are not made by a product with a weight, so Medusa heads have nothing to share"
    )


def output_layer(engine: Engine) -> OutputLayer:
    """Read it.

    Raises:
        CompileError: as `output_step`.
    """
    step = output_step(engine.plan)
    hidden, vocabulary = _width(engine.plan, step.inputs[0]), _width(engine.plan, step.outputs[0])
    numbers, factors = _numbers(engine, step, vocabulary, hidden), input_factors(engine, step)
    return OutputLayer(numbers if factors is None else numbers / factors, _array(engine, step, "bias"))


def embeddings(engine: Engine) -> NDArray[np.float32]:
    """The table of embeddings of the tokens, [V, E].

    Raises:
        UsageError: there is none.
    """
    for step in engine.plan.steps:
        if step.op == "embedding" and step.inputs[0] == "input_ids":
            width = _width(engine.plan, step.outputs[0])
            return _numbers(engine, step, engine.manifest.model.vocab_size, width)
    raise UsageError("the model has no table of embeddings, so that heads can't see its token; use --no-token")


def _numbers(engine: Engine, step: Step, rows: int, columns: int) -> NDArray[np.float32]:
    """The weight of a step, however it is stored."""
    packed, scale, zero = (_array(engine, step, name) for name in ("weight", "scale", "zero"))
    assert packed is not None, "it has a weight"
    if scale is not None:
        scheme: tuple[str, int] = (str(step.attributes["format"]), int(step.attributes["group"]))
        codes = quantized.unpack(*scheme, packed, rows, columns)
        zeros = None if zero is None else quantized.unpack_scales(zero, rows)
        weight = quantized.dequantize(*scheme, codes, quantized.unpack_scales(scale, rows), zeros)
    else:
        weight = packed if packed.ndim == 2 else packing.unpack(packed, rows, columns)
        weight = weight.view(ml_dtypes.bfloat16) if weight.dtype == np.uint16 else weight
    return np.ascontiguousarray(weight, np.float32)


def _array(engine: Engine, step: Step, name: str) -> NDArray[Any] | None:
    op = all_ops()[step.op]
    for given, value in zip((*op.inputs, *op.stored_inputs), step.inputs, strict=False):
        if given.strip("?") == name and value is not None:
            return engine.weights[str(engine.plan.value(value).base)].array
    return None


def _width(plan: Plan, name: str | None) -> int:
    assert name is not None, "products have an input and an output"
    return plan.value(name).shape[-1].constant
