"""llmc::softmax on a CUDA device."""

from __future__ import annotations

from llmc.plugins import cuda_views as views
from llmc.plugins.cuda import Call, Kernel, Launch

PARAMS = views.params_type(
    "Softmax", ("x", "y"), ("size", "x_stride", "y_stride", *views.names("n", 1), *views.names("xy"))
)

SHORT_ROW = 256
"""Numbers of a row that one warp takes."""


def launches(call: Call) -> list[Launch]:
    """A row a block."""
    x, y = views.required(call, 0), call.outputs[0]
    log, warps = bool(call.attributes["log"]), 1 if y.shape[-1] <= SHORT_ROW else 8
    kernel = Kernel(
        f"softmax{warps}{'_log' if log else ''}_{views.short(x, y)}",
        "softmax/softmax_cuda.cuh",
        f"softmax<{'true' if log else 'false'}, {views.types(x, y)}, {warps}>",
        PARAMS,
        32 * warps,
    )
    walk = views.walk_params(views.merged(y.shape[:-1], x.strides[:-1], y.strides[:-1]), "xy")
    del walk["n0"]
    return views.launch(
        kernel,
        (views.count(y.shape[:-1]), 1, 1),
        4 * warps,
        x=x.address,
        y=y.address,
        size=y.shape[-1],
        x_stride=x.strides[-1],
        y_stride=y.strides[-1],
        **walk,
    )
