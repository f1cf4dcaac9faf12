"""llmc::reduce on a CUDA device."""

from __future__ import annotations

from llmc.plugins import cuda_views as views
from llmc.plugins.cuda import Call, Kernel, Launch

PARAMS = views.params_type(
    "Reduce", ("x", "y"), ("size", *views.names("n", 1), *views.names("xy"), *views.names("m", 1), *views.names("r"))
)


def launches(call: Call) -> list[Launch]:
    """A row a warp."""
    x, y = views.required(call, 0), call.outputs[0]
    function, kept = str(call.attributes["function"]), len(x.shape) - int(call.attributes["num_axes"])
    if function in ("max", "min", "argmax", "argmin"):
        largest, place = function.endswith("max"), function.startswith("arg")
        template = f"extreme<{_bool(largest)}, {_bool(place)}, {views.types(x, y)}>"
    else:
        name, mean = ("sum", True) if function == "mean" else (function, False)
        template = f"reduce<R_{name}, {_bool(mean)}, {views.types(x, y)}>"
    kernel = Kernel(f"reduce_{function}_{views.short(x, y)}", "reduce/reduce_cuda.cuh", template, PARAMS, 32)
    outer = views.walk_params(views.merged(x.shape[:kept], x.strides[:kept], y.strides), "xy")
    inner = views.walk_params(views.merged(x.shape[kept:], x.strides[kept:]), "r")
    walk = {**outer, **{name.replace("n", "m"): value for name, value in inner.items()}}
    del walk["n0"], walk["m0"]
    rows, size = views.count(x.shape[:kept]), views.count(x.shape[kept:])
    return views.launch(kernel, (rows, 1, 1), x=x.address, y=y.address, size=size, **walk)


def _bool(value: bool) -> str:
    return "true" if value else "false"
