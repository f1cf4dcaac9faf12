"""llmc::gather on a CUDA device."""

from __future__ import annotations

from llmc.plugins import cuda_views as views
from llmc.plugins.cuda import Call, Kernel, Launch

PARAMS = views.params_type(
    "Gather",
    ("x", "ids", "y"),
    (
        "count",
        "inner",
        "size",
        "x_stride",
        *views.names("n", 1),
        *views.names("iy"),
        *views.names("m", 1),
        *views.names("xz"),
    ),
)


def launches(call: Call) -> list[Launch]:
    """One thread an element."""
    data, ids, y = views.required(call, 0), views.required(call, 1), call.outputs[0]
    kernel = Kernel(
        f"gather_{views.short(data, ids, y)}",
        "gather/gather_cuda.cuh",
        f"gather<{views.types(data, ids, y)}>",
        PARAMS,
        views.THREADS,
    )
    rank = len(ids.shape)
    outer = views.walk_params(views.merged(ids.shape, ids.strides, y.strides[:rank]), "iy")
    rest = views.walk_params(views.merged(data.shape[1:], data.strides[1:], y.strides[rank:]), "xz")
    walk = {**outer, **{name.replace("n", "m"): value for name, value in rest.items()}}
    del walk["n0"], walk["m0"]
    total = views.count(y.shape)
    return views.launch(
        kernel,
        views.blocks(total),
        x=data.address,
        ids=ids.address,
        y=y.address,
        count=total,
        inner=views.count(data.shape[1:]),
        size=data.shape[0],
        x_stride=data.strides[0],
        **walk,
    )
