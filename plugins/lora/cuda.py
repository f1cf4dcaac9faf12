"""llmc::lora on a CUDA device: one kernel for each dtype of activations and of adapters."""

from __future__ import annotations

from llmc.errors import KernelError
from llmc.plugins.cuda import Call, Kernel, Launch, params_type
from llmc.plugins.cuda_gemm import SHORT, THREADS, TYPES, Y_TYPES

COLUMNS = 1024
PARAMS = params_type("LoraParams", "x base a b ranks adapters y", "x_stride base_stride y_stride", "K N rank y_type")


def kernel(x: str, weights: str) -> Kernel:
    """That of a dtype of activations and one of adapters."""
    return Kernel(
        f"lora_{SHORT[TYPES[x]]}_{SHORT[TYPES[weights]]}",
        "lora/lora_cuda.cuh",
        f"lora<{TYPES[x]}, {TYPES[weights]}>",
        PARAMS,
        THREADS,
    )


def launches(call: Call) -> list[Launch]:
    """A and b are contiguous and of one dtype; base has the dtype of x."""
    x, base, a, b, ranks, adapters = call.inputs
    y = call.outputs[0]
    assert x and base and a and b and ranks and adapters, "no input of lora is optional"
    if x.dtype != base.dtype or a.dtype != b.dtype:
        raise KernelError(
            f"there is no kernel for an adapter whose input is {x.dtype} and whose result is {base.dtype}; merge it "
            "into the model: llmc build --lora DIR"
        )
    params = PARAMS(
        x=x.address,
        base=base.address,
        a=a.address,
        b=b.address,
        ranks=ranks.address,
        adapters=adapters.address,
        y=y.address,
        x_stride=x.strides[0],
        base_stride=base.strides[0],
        y_stride=y.strides[0],
        K=x.shape[1],
        N=y.shape[1],
        rank=a.shape[1],
        y_type=Y_TYPES[y.dtype],
    )
    grid = (y.shape[0], -(-y.shape[1] // COLUMNS), 1)
    return [Launch(kernel(x.dtype, a.dtype), params, grid, max(4 * a.shape[1], 16))] if min(grid) else []
