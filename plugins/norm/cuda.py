"""llmc::norm and llmc::add_norm on a CUDA device: a row a block, of one warp where rows are short."""

from __future__ import annotations

from typing import Any

from llmc.plugins import cuda_views as views
from llmc.plugins.cuda import Call, Kernel, Launch, Tensor

SHORT_ROW = 256
"""Numbers of a row that one warp takes."""

WARPS = 8
"""For longer rows."""


def launches(call: Call) -> list[Launch]:
    """One kernel for each kind and dtypes."""
    return row_launch(call, "norm", {"x": views.required(call, 0), "y": call.outputs[0]}, 1)


def row_launch(call: Call, name: str, tensors: dict[str, Tensor], first_weight: int) -> list[Launch]:
    """A launch over rows of the tensors; y is the last one. The weight is input ``first_weight``, the bias follows."""
    given: dict[str, Any] = dict(call.attributes)
    weight, bias, y = views.given(call, first_weight), views.given(call, first_weight + 1), tensors["y"]
    size, views_of_rows = y.shape[-1], list(tensors.values())
    assert all(size == 1 or t.strides[-1] == 1 for t in views_of_rows), "rows of a norm have a unit stride"
    axes = views.merged(y.shape[:-1], *(t.strides[:-1] for t in views_of_rows))
    warps = 1 if size <= SHORT_ROW else WARPS
    letters = "".join(tensors)
    kernel = Kernel(
        f"{name}{warps}_{given['kind']}_{views.short(*views_of_rows)}",
        "norm/norm_cuda.cuh",
        f"{name}<{given['kind'].upper()}, {views.types(*views_of_rows)}, {warps}>",
        views.params_type(
            f"{name.title().replace('_', '')}Params",
            ("weight", "bias", *letters),
            ("size", "weight_rows", *views.names("n", 1), *views.names(letters)),
            ("epsilon", "shift"),
        ),
        32 * warps,
    )
    walk = views.walk_params(axes, letters)
    del walk["n0"]
    per_head = next((t.shape[0] for t in (weight, bias) if t is not None and len(t.shape) == 2), 1)
    values = {letter: tensor.address for letter, tensor in tensors.items()}
    return views.launch(
        kernel,
        (views.count(y.shape[:-1]), 1, 1),
        4 * warps,
        weight=weight.address if weight is not None else 0,
        bias=bias.address if bias is not None else 0,
        size=size,
        weight_rows=per_head,
        epsilon=given["epsilon"],
        shift=given["offset"],
        **values,
        **walk,
    )
