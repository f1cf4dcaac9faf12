"""llmc::gather_elements on a CUDA device."""

from __future__ import annotations

from llmc.plugins import cuda_views as views
from llmc.plugins.cuda import Call, Kernel, Launch

PARAMS = views.params_type(
    "GatherElements",
    ("x", "ids", "y"),
    ("count", "inner", "size", "x_stride", "i_stride", "y_stride", *views.names("n", 1), *views.names("xiy")),
)


def launches(call: Call) -> list[Launch]:
    """One thread an element."""
    data, ids, y = views.required(call, 0), views.required(call, 1), call.outputs[0]
    kernel = Kernel(
        f"gather_elements_{views.short(data, ids, y)}",
        "gather_elements/gather_elements_cuda.cuh",
        f"gather_elements<{views.types(data, ids, y)}>",
        PARAMS,
        views.THREADS,
    )
    walk = views.walk_params(views.merged(ids.shape[:-1], data.strides[:-1], ids.strides[:-1], y.strides[:-1]), "xiy")
    del walk["n0"]
    total = views.count(y.shape)
    return views.launch(
        kernel,
        views.blocks(total),
        x=data.address,
        ids=ids.address,
        y=y.address,
        count=total,
        inner=ids.shape[-1],
        size=data.shape[-1],
        x_stride=data.strides[-1],
        i_stride=ids.strides[-1],
        y_stride=y.strides[-1],
        **walk,
    )
