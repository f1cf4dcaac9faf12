"""llmc::glu on a CUDA device."""

from __future__ import annotations

from llmc.plugins import cuda_views as views
from llmc.plugins.cuda import Call, Kernel, Launch

PARAMS = views.params_type("Glu", ("gate", "up", "y"), ("count", "chunks", "gate_stride", "up_stride", "y_stride"))


def launches(call: Call) -> list[Launch]:
    """One kernel for each function and dtypes; 16 bytes a thread where every row is aligned to as much."""
    gate, up, y = views.required(call, 0), views.required(call, 1), call.outputs[0]
    function = str(call.attributes["function"])
    tensors = (gate, up, y)
    rows, columns = y.shape
    assert all(columns == 1 or t.strides[1] == 1 for t in tensors), "columns lie one behind the other"
    bytes_of_rows = [size for t in tensors for size in (t.address, 2 * t.strides[0])]
    wide = gate.dtype == up.dtype == y.dtype != "float32" and columns % 8 == 0
    width = 8 if wide and all(size % 16 == 0 for size in bytes_of_rows) else 1
    kernel = Kernel(
        f"glu{width}_{function}_{views.short(*tensors)}",
        "glu/glu_cuda.cuh",
        f"glu<F_{function}, {views.types(*tensors)}, {width}>",
        PARAMS,
        views.THREADS,
    )
    chunks = columns // width
    return views.launch(
        kernel,
        views.blocks(rows * chunks),
        count=rows * chunks,
        chunks=chunks,
        gate=gate.address,
        up=up.address,
        y=y.address,
        gate_stride=gate.strides[0],
        up_stride=up.strides[0],
        y_stride=y.strides[0],
    )
