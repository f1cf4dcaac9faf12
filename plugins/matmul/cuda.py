"""llmc::matmul on a CUDA device: one kernel for each pair of dtypes."""

from __future__ import annotations

from llmc.errors import KernelError
from llmc.plugins.cuda import Call, Kernel, Launch, Tensor, params_type
from llmc.plugins.cuda_gemm import SHORT, THREADS, TYPES, Y_TYPES

TILE = 16
PARAMS = params_type("MatmulParams", "a b y", "n1 a0 a1 am ak b0 b1 bk bn y0 y1 ym yn", "M N K y_type")


def launches(call: Call) -> list[Launch]:
    """Views of up to four axes."""
    a, b, y = call.inputs[0], call.inputs[1], call.outputs[0]
    assert a is not None and b is not None, "matmul has two inputs"
    *lead, rows, columns = y.shape
    if len(lead) > 2:
        raise KernelError(f"a matmul of {len(y.shape)} axes; CUDA kernels take four")
    n0, n1 = (*(1,) * (2 - len(lead)), *lead)
    values: dict[str, int] = {}
    for tensor, names in ((a, ("a0", "a1", "am", "ak")), (b, ("b0", "b1", "bk", "bn")), (y, ("y0", "y1", "ym", "yn"))):
        values |= dict(zip(names, _strides(tensor, tuple(lead)), strict=True))
    kernel = Kernel(
        f"matmul_{SHORT[TYPES[a.dtype]]}_{SHORT[TYPES[b.dtype]]}",
        "matmul/matmul_cuda.cuh",
        f"matmul<{TYPES[a.dtype]}, {TYPES[b.dtype]}>",
        PARAMS,
        THREADS,
    )
    sizes = {"M": rows, "N": columns, "K": a.shape[-1], "n1": n1, "y_type": Y_TYPES[y.dtype]}
    params = PARAMS(a=a.address, b=b.address, y=y.address, **sizes, **values)
    grid = (-(-columns // TILE), -(-rows // TILE), n0 * n1)
    return [Launch(kernel, params, grid, 8 * TILE * (TILE + 1))] if min(grid) else []


def _strides(tensor: Tensor, lead: tuple[int, ...]) -> tuple[int, ...]:
    """Four strides; axes of size 1 broadcast."""
    own = tensor.shape[:-2]
    steps = [0 if size == 1 else stride for size, stride in zip(own, tensor.strides, strict=False)]
    return (*(0,) * (2 - len(own)), *steps, *tensor.strides[-2:])
