"""llmc::cumsum on a CUDA device."""

from __future__ import annotations

from llmc.plugins import cuda_views as views
from llmc.plugins.cuda import Call, Kernel, Launch

PARAMS = views.params_type(
    "Cumsum", ("x", "y"), ("count", "size", "x_stride", "y_stride", *views.names("n", 1), *views.names("xy"))
)


def launches(call: Call) -> list[Launch]:
    """A row a thread."""
    x, y = views.required(call, 0), call.outputs[0]
    exclusive = bool(call.attributes["exclusive"])
    kernel = Kernel(
        f"cumsum{'_exclusive' if exclusive else ''}_{views.short(x, y)}",
        "cumsum/cumsum_cuda.cuh",
        f"cumsum<{'true' if exclusive else 'false'}, {views.types(x, y)}>",
        PARAMS,
        views.THREADS,
    )
    walk = views.walk_params(views.merged(y.shape[:-1], x.strides[:-1], y.strides[:-1]), "xy")
    del walk["n0"]
    rows = views.count(y.shape[:-1])
    return views.launch(
        kernel,
        views.blocks(rows),
        x=x.address,
        y=y.address,
        count=rows,
        size=y.shape[-1],
        x_stride=x.strides[-1],
        y_stride=y.strides[-1],
        **walk,
    )
