"""llmc::elementwise on a CUDA device: one thread an element."""

from __future__ import annotations

from llmc.errors import KernelError
from llmc.plugins import cuda_views as views
from llmc.plugins.cuda import Call, Kernel, Launch, Tensor
from llmc.plugins.elementwise import FUNCTIONS

GENERAL = ("copy", "not", "isnan")
"""Unary functions with a form for every dtype that they take."""

INTEGER = ("copy", "neg", "abs", "sign", "relu", "not")
"""Unary functions of integers and bools."""


def launches(call: Call) -> list[Launch]:
    """One kernel for each function and combination of dtypes."""
    function, y = str(call.attributes["function"]), call.outputs[0]
    inputs = [views.required(call, i) for i in range(FUNCTIONS[function])]
    axes = views.merged(y.shape, *(views.broadcast(x, y.shape) for x in inputs), y.strides)
    letters = "abc"[: len(inputs)] + "y"
    params = views.params_type(
        f"Elementwise{len(inputs)}", tuple(letters), ("count", *views.names("n", 1), *views.names(letters))
    )
    kernel = Kernel(
        f"elementwise_{function}_{views.short(*inputs, y)}",
        "elementwise/elementwise_cuda.cuh",
        _function(function, inputs, y),
        params,
        views.THREADS,
    )
    values = views.walk_params(axes, letters)
    del values["n0"]
    total = views.count(y.shape)
    pointers = dict(zip(letters, [x.address for x in (*inputs, y)], strict=True))
    return views.launch(kernel, views.blocks(total), count=total, **pointers, **values)


def _function(function: str, inputs: list[Tensor], y: Tensor) -> str:
    if function == "where":
        return f"where<{views.types(*inputs[1:], y)}>"
    kinds = {"float" if x.dtype in views.FLOATS else "int" if x.dtype.startswith("int") else "bool" for x in inputs}
    if len(kinds) != 1:
        raise KernelError(f"elementwise {function} of {', '.join(x.dtype for x in inputs)}")
    (kind,) = kinds
    if len(inputs) == 2:
        if (function == "pow" and kind != "float") or (kind == "bool" and function in ("div", "mod", "fmod", "sub")):
            raise KernelError(f"elementwise {function} has no CUDA kernel for {inputs[0].dtype}")
        return f"elementwise2<F_{function}, {views.types(*inputs, y)}>"
    general = function in GENERAL or kind != "float"
    if (kind != "float" and function not in INTEGER) or (kind == "bool" and function not in GENERAL):
        raise KernelError(f"elementwise {function} has no CUDA kernel for {inputs[0].dtype}")
    return f"elementwise1<{'G' if general else 'F'}_{function}, {views.types(*inputs, y)}>"
