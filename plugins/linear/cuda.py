"""llmc::linear on a CUDA device: csrc/cuda/gemm.cuh on tensor cores; in float32 for float32 weights, which is slow."""

from __future__ import annotations

from llmc.errors import KernelError
from llmc.plugins.cuda import Call, Launch, Tensor
from llmc.plugins.cuda_gemm import Weight, product
from llmc.plugins.linear import cuda_packing


def launches(call: Call) -> list[Launch]:
    """One kernel, or more where x has to be converted or K is split. The weight is packed unless it is float32."""
    x, weight, bias = (*call.inputs, None)[:3]
    assert x is not None and weight is not None, "linear has x and a weight"
    return product(call, x, weight_of(weight, call.outputs[0].shape[1], x.shape[1], bias), call.outputs[0])


def weight_of(weight: Tensor, rows: int, columns: int, bias: Tensor | None, *, experts: bool = False) -> Weight:
    """The weight of a plan.

    Raises:
        KernelError: it is not packed for this shape.
    """
    layout = cuda_packing.layout(rows, columns)
    shape = (rows, columns) if weight.dtype == "float32" else layout.shape
    if weight.shape[int(experts) :] != shape:
        raise KernelError(
            f"a {weight.dtype} weight of {rows} x {columns} is {list(shape)} for CUDA, not {weight.shape}"
        )
    if bias is not None and bias.dtype != "float32":
        raise KernelError(f"a bias must be float32, not {bias.dtype}")
    return Weight(layout, weight.dtype, weight.address, bias=bias.address if bias else 0)
