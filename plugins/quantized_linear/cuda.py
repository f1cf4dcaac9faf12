"""llmc::quantized_linear on a CUDA device: codes become 16-bit numbers, exactly, or are multiplied as bytes.

``compute`` int8 takes mma of bytes, fp8 that of E4M3 where the chip has it (89, 120, 121, sm_90a) and else bfloat16,
with x rounded to E4M3 all the same; an engine for several chips multiplies E4M3 as bfloat16 on each if one has to. With
bfloat16 and float32 an x of 16 bits is multiplied as it is, without rounding; a float32 x of ``compute`` float32 takes
a slow kernel without tensor cores.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmc.errors import KernelError
from llmc.plugins.cuda import Call, Launch, Tensor
from llmc.plugins.cuda_gemm import Weight, product
from llmc.plugins.cuda_packing import CONVERTED
from llmc.plugins.quantized_linear import cuda_packing


def natural_compute(format: str, capability: int) -> str:
    """What to choose for ``compute`` where nothing says otherwise: 16-bit numbers, which lose nothing of a code."""
    return "bfloat16"


def launches(call: Call) -> list[Launch]:
    """A kernel for each of: rounding x, the product, and adding up or gating it."""
    x, weight, scale, zero, bias, x_scale = (*call.inputs, *(None,) * 6)[:6]
    assert x is not None and weight is not None and scale is not None, "x, weight and scale are there"
    y, function = call.outputs[0], str(call.attributes.get("function", ""))
    rows = y.shape[1] * (2 if function else 1)
    given = weight_of(weight, scale, zero, bias, call.attributes, rows, x.shape[1], call.capability)
    return product(call, x, given, y, function=function, x_scale=x_scale)


def weight_of(
    weight: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    bias: Tensor | None,
    attributes: Mapping[str, Any],
    rows: int,
    columns: int,
    capability: int,
    *,
    experts: bool = False,
) -> Weight:
    """The weight of a plan.

    Raises:
        KernelError: it is not packed for this shape and capability.
    """
    format, compute = str(attributes["format"]), str(attributes["compute"])
    group, x_group = int(attributes["group"]), int(attributes["x_group"])
    own, converted = (
        cuda_packing.layout(format, group, compute, x_group, rows, columns, number)
        for number in (capability, CONVERTED)
    )
    lead = int(experts)
    layout = converted if weight.shape[lead:] == converted.shape else own
    if weight.shape[lead:] != layout.shape:
        raise KernelError(
            f"{format} weights of {rows} x {columns} computed as {compute} are {list(layout.shape)} for CUDA, not "
            f"{list(weight.shape[lead:])}"
        )
    scales = cuda_packing.scale_shape(rows, columns, group)
    if any(part is not None and part.shape[lead:] != scales for part in (scale, zero)):
        raise KernelError(f"scales and zeros of {rows} x {columns} in groups of {group} are {list(scales)} for CUDA")
    if scale.dtype not in ("float16", "float32") or (zero and zero.dtype not in ("uint8", "float32")):
        raise KernelError("scales are float16 or float32, zeros uint8 or float32")
    if bias is not None and bias.dtype != "float32":
        raise KernelError(f"a bias must be float32, not {bias.dtype}")
    return Weight(
        layout,
        weight.dtype,
        weight.address,
        compute,
        group,
        x_group,
        scale.dtype,
        scale.address,
        zero.dtype if zero else "",
        zero.address if zero else 0,
        bias.address if bias else 0,
    )
