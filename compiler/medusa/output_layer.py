"""The output layer of an engine: the step that makes the logits, and its weight as plain numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from llmc.errors import CompileError
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
    given = dict(zip(all_ops()[step.op].inputs, step.inputs, strict=False))
    hidden, vocabulary = _width(engine.plan, step.inputs[0]), _width(engine.plan, step.outputs[0])

    def array(name: str) -> NDArray[Any] | None:
        value = given.get(name)
        return None if value is None else engine.weights[str(engine.plan.value(value).base)].array

    packed, bias, zero = array("weight"), array("bias?"), array("zero?")
    assert packed is not None, "a product has a weight"
    if step.op == "linear":
        weight = packing.unpack(packed, vocabulary, hidden)
        weight = weight.view(ml_dtypes.bfloat16) if weight.dtype == np.uint16 else weight
    else:
        scale = array("scale")
        assert scale is not None, "codes have scales"
        scheme: tuple[str, int] = (str(step.attributes["format"]), int(step.attributes["group"]))
        codes = quantized.unpack(*scheme, packed, vocabulary, hidden)
        zeros = None if zero is None else quantized.unpack_scales(zero, vocabulary)
        weight = quantized.dequantize(*scheme, codes, quantized.unpack_scales(scale, vocabulary), zeros)
    numbers = np.ascontiguousarray(weight, np.float32)
    factors = input_factors(engine, step)
    return OutputLayer(numbers if factors is None else numbers / factors, bias)


def _width(plan: Plan, name: str | None) -> int:
    assert name is not None, "products have an input and an output"
    return plan.value(name).shape[-1].constant
