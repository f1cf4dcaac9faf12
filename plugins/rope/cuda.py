"""llmc::rope on a CUDA device."""

from __future__ import annotations

from llmc.plugins import cuda_views as views
from llmc.plugins.cuda import Call, Kernel, Launch

PARAMS = views.params_type(
    "Rope",
    ("x", "positions", "table", "index", "sign", "y"),
    (
        "count",
        "size",
        "heads",
        "columns",
        "positions_stride",
        "x_token",
        "x_head",
        "x_dim",
        "y_token",
        "y_head",
        "y_dim",
    ),
)


def launches(call: Call) -> list[Launch]:
    """One kernel for each pair of dtypes; constants are contiguous."""
    x, positions, table, index, sign = (views.required(call, i) for i in range(5))
    (y,) = call.outputs
    kernel = Kernel(
        f"rope_{views.short(x, positions, y)}",
        "rope/rope_cuda.cuh",
        f"rope<{views.types(x, y, positions)}>",
        PARAMS,
        views.THREADS,
    )
    total = views.count(y.shape)
    return views.launch(
        kernel,
        views.blocks(total),
        x=x.address,
        positions=positions.address,
        table=table.address,
        index=index.address,
        sign=sign.address,
        y=y.address,
        count=total,
        size=y.shape[2],
        heads=y.shape[1],
        columns=table.strides[0],
        positions_stride=positions.strides[0],
        **dict(zip(("x_token", "x_head", "x_dim"), x.strides, strict=True)),
        **dict(zip(("y_token", "y_head", "y_dim"), y.strides, strict=True)),
    )
