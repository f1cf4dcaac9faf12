"""llmc::add_norm on a CUDA device: see plugins/norm/norm_cuda.cuh."""

from __future__ import annotations

from llmc.plugins import cuda_views as views
from llmc.plugins.cuda import Call, Launch
from llmc.plugins.norm.cuda import row_launch


def launches(call: Call) -> list[Launch]:
    """The sum in the dtype that it is stored in, and its norm."""
    total, y = call.outputs
    tensors = {"a": views.required(call, 0), "b": views.required(call, 1), "s": total, "y": y}
    return row_launch(call, "add_norm", tensors, 2)
