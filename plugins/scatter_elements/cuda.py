"""llmc::scatter_elements on a CUDA device."""

from __future__ import annotations

from llmc.plugins import cuda_views as views
from llmc.plugins.cuda import Call, Kernel, Launch

PARAMS = views.params_type(
    "ScatterElements",
    ("x", "ids", "src", "y"),
    ("size", "inner", "x_stride", "i_stride", "s_stride", "y_stride", *views.names("n", 1), *views.names("xisy")),
)


def launches(call: Call) -> list[Launch]:
    """A row a warp."""
    data, ids, source = (views.required(call, i) for i in range(3))
    (y,) = call.outputs
    add = call.attributes["reduction"] == "add"
    kernel = Kernel(
        f"scatter_elements{'_add' if add else ''}_{views.short(data, ids, source, y)}",
        "scatter_elements/scatter_elements_cuda.cuh",
        f"scatter_elements<{'true' if add else 'false'}, {views.types(data, ids, source, y)}>",
        PARAMS,
        32,
    )
    lead = [t.strides[:-1] for t in (data, ids, source, y)]
    walk = views.walk_params(views.merged(y.shape[:-1], *lead), "xisy")
    del walk["n0"]
    return views.launch(
        kernel,
        (views.count(y.shape[:-1]), 1, 1),
        x=data.address,
        ids=ids.address,
        src=source.address,
        y=y.address,
        size=y.shape[-1],
        inner=ids.shape[-1],
        x_stride=data.strides[-1],
        i_stride=ids.strides[-1],
        s_stride=source.strides[-1],
        y_stride=y.strides[-1],
        **walk,
    )
