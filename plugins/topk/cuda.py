"""llmc::topk on a CUDA device."""

from __future__ import annotations

from llmc.plugins import cuda_views as views
from llmc.plugins.cuda import Call, Kernel, Launch

PARAMS = views.params_type(
    "Topk",
    ("x", "y", "i"),
    ("size", "k", "x_stride", "y_stride", "i_stride", *views.names("n", 1), *views.names("xyi")),
)


def launches(call: Call) -> list[Launch]:
    """A row a warp."""
    x, (y, places) = views.required(call, 0), call.outputs
    largest = bool(call.attributes["largest"])
    kernel = Kernel(
        f"topk_{'largest' if largest else 'smallest'}_{views.short(x, y)}",
        "topk/topk_cuda.cuh",
        f"topk<{'true' if largest else 'false'}, {views.types(x, y)}>",
        PARAMS,
        32,
    )
    walk = views.walk_params(views.merged(x.shape[:-1], x.strides[:-1], y.strides[:-1], places.strides[:-1]), "xyi")
    del walk["n0"]
    return views.launch(
        kernel,
        (views.count(x.shape[:-1]), 1, 1),
        x=x.address,
        y=y.address,
        i=places.address,
        size=x.shape[-1],
        k=int(call.attributes["k"]),
        x_stride=x.strides[-1],
        y_stride=y.strides[-1],
        i_stride=places.strides[-1],
        **walk,
    )
