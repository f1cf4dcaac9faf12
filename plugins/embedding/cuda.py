"""llmc::embedding on a CUDA device: one kernel for each kind of table."""

from __future__ import annotations

from llmc.errors import KernelError
from llmc.plugins.cuda import Call, Kernel, Launch, Tensor, params_type
from llmc.plugins.cuda_gemm import THREADS, TYPES, Y_TYPES, Weight, numbers_params, numbers_type
from llmc.plugins.cuda_packing import PANEL, Layout

PARAMS = params_type(
    "EmbeddingParams",
    "ids w scale zero y",
    "id_stride y_stride w_expert scale_expert zero_expert",
    "N K chunks groups group group_columns y_type",
)


def launches(call: Call) -> list[Launch]:
    """The table is [V, H], or packed as linear or quantized_linear have it, in steps of 16 or 32."""
    ids, table, scale, zero = (*call.inputs, None, None)[:4]
    assert ids is not None and table is not None, "embedding has ids and a table"
    y, width = call.outputs[0], call.outputs[0].shape[-1]
    y_stride = _flat(y.shape[:-1], y.strides[:-1])
    id_stride = _flat(ids.shape, ids.strides)
    count = 1
    for size in ids.shape:
        count *= size
    weight, numbers = _table(call, table, scale, zero, width)
    kernel = Kernel(
        f"embedding_{ids.dtype}_" + "".join(c if c.isalnum() else "_" for c in numbers.lower()),
        "embedding/embedding_cuda.cuh",
        f"embedding<{ids.dtype}_t, {numbers}>",
        PARAMS,
        THREADS,
    )
    params = PARAMS(
        ids=ids.address,
        y=y.address,
        id_stride=id_stride,
        y_stride=y_stride,
        y_type=Y_TYPES[y.dtype],
        **numbers_params(weight),
    )
    return [Launch(kernel, params, (count, -(-width // THREADS), 1))] if min(count, width) else []


def _flat(shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """The stride of axes that follow on one another."""
    for axis in range(len(shape) - 1):
        if shape[axis] > 1 and strides[axis] != shape[axis + 1] * strides[axis + 1]:
            raise KernelError("ids and y of several axes must be contiguous")
    return strides[-1] if strides else 1


def _table(call: Call, table: Tensor, scale: Tensor | None, zero: Tensor | None, width: int) -> tuple[Weight, str]:
    format, group = str(call.attributes.get("format", "plain")), int(call.attributes.get("group", 0))
    if len(table.shape) == 2:
        if table.strides != (width, 1) and table.shape[0] > 1:
            raise KernelError("a plain table must be contiguous")
        return Weight(Layout(table.shape[0], width, "plain", 16), table.dtype, table.address), (
            f"RowsPlain<{TYPES[table.dtype]}>"
        )
    rows = table.shape[0] * PANEL
    for step in (16, 32) if format != "plain" else (16,):
        layout = Layout(rows, width, format, step, group)
        if layout.shape == table.shape:
            break
    else:
        raise KernelError(f"a {format} table of width {width} in groups of {group} is not packed as {table.shape}")
    if format == "plain":
        weight = Weight(layout, table.dtype, table.address)
    else:
        assert scale is not None, "a quantized table has scales"
        zeros = (zero.dtype, zero.address) if zero else ("", 0)
        weight = Weight(layout, "uint8", table.address, "", group, 0, scale.dtype, scale.address, *zeros)
    return weight, numbers_type(weight)
