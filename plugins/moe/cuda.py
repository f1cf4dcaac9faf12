"""llmc::moe on a CUDA device: rows are grouped by expert, then two grouped products as in cuda_gemm.py.

Weights are packed as those of llmc::linear and quantized_linear, each expert for itself; ``inner`` has to be given
where there is no bias of gate_up. What is between the products is float32, or the dtype of x where nothing is rounded
to bytes.
"""

from __future__ import annotations

import ctypes
from typing import Any

from llmc.errors import KernelError
from llmc.plugins import cuda_gemm
from llmc.plugins.cuda import Call, Kernel, Launch, Params, Tensor, params_type
from llmc.plugins.cuda_gemm import THREADS, Experts, Weight
from llmc.plugins.linear import cuda as linear
from llmc.plugins.quantized_linear import cuda as quantized_linear

ROUTING = "token_stride choice_stride"
ROUTE = params_type("RouteParams", "ids rows tile", ROUTING, "pairs choices experts tile_rows tiles")
ADD = params_type(
    "AddExpertsParams",
    "ids weights out y",
    f"{ROUTING} weight_stride weight_step y_stride",
    "tokens width choices experts type",
)


class ActivateParams(Params):
    """Of `activate`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("ids", "gate_up", "hidden")),
        *((name, ctypes.c_int64) for name in ROUTING.split()),
        *((name, ctypes.c_int32) for name in ("pairs", "choices", "experts", "inner", "type")),
        *((name, ctypes.c_float) for name in ("alpha", "limit")),
    )


def launches(call: Call) -> list[Launch]:
    """Routing, product, activation, product, sum."""
    x, ids, weights, *_ = call.inputs
    assert x is not None and ids is not None and weights is not None, "x, ids and weights are there"
    if ids.dtype != "int64":
        raise KernelError(f"ids must be int64, not {ids.dtype}")
    gate_up, down = _weights(call, x)
    tokens, choices = ids.shape
    y, pairs = call.outputs[0], tokens * choices
    if min(pairs, y.shape[1]) == 0:
        return []
    count = call.inputs[3].shape[0] if call.inputs[3] is not None else 0
    inner, limits = down.layout.columns, cuda_gemm.shared_limits(call.capability)
    exact = cuda_gemm.math_of(gate_up, x.dtype, call.capability) == "F32"
    tile_rows = cuda_gemm.EXACT_ROWS if exact else cuda_gemm.shape_for(pairs / count, gate_up, limits, count).rows
    tiles = pairs // tile_rows + count
    rows, tile = call.scratch(4 * pairs), call.scratch(12 * tiles)
    routing: dict[str, Any] = {
        "ids": ids.address,
        "token_stride": ids.strides[0],
        "choice_stride": ids.strides[1],
        "choices": choices,
        "experts": count,
    }
    route = Kernel("moe_route", "moe/moe_cuda.cuh", "route", ROUTE, THREADS)
    params = ROUTE(rows=rows, tile=tile, pairs=pairs, tile_rows=tile_rows, tiles=tiles, **routing)
    made = [Launch(route, params, (count, 1, 1), 64)]

    def product(x: Tensor, weight: Weight, of_row: int) -> Tensor:
        shape = (pairs, weight.layout.rows)
        out = Tensor(call.scratch(4 * shape[0] * shape[1]), "float32", shape, (shape[1], 1))
        experts = Experts(tile, rows, tiles, tile_rows, of_row)
        made.extend(cuda_gemm.product(call, x, weight, out, experts=experts))
        return out

    both = product(x, gate_up, choices)
    dtype = "float32" if gate_up.compute in ("int8", "fp8") else x.dtype
    hidden = Tensor(call.scratch(4 * pairs * inner), dtype, (pairs, inner), (inner, 1))
    made.append(_activate(call, both, hidden, routing))
    out = product(hidden, down, 1)
    kernel = Kernel(
        f"moe_add_{cuda_gemm.SHORT[cuda_gemm.TYPES[weights.dtype]]}",
        "moe/moe_cuda.cuh",
        f"add_experts<{cuda_gemm.TYPES[weights.dtype]}>",
        ADD,
        THREADS,
    )
    added = ADD(
        weights=weights.address,
        weight_stride=weights.strides[0],
        weight_step=weights.strides[1],
        out=out.address,
        y=y.address,
        y_stride=y.strides[0],
        tokens=tokens,
        width=y.shape[1],
        type=cuda_gemm.Y_TYPES[y.dtype],
        **routing,
    )
    return [*made, Launch(kernel, added, (-(-tokens * y.shape[1] // THREADS), 1, 1))]


def _activate(call: Call, both: Tensor, hidden: Tensor, routing: dict[str, Any]) -> Launch:
    attributes = call.attributes
    gated, function = bool(attributes["gated"]), str(attributes["function"])
    if function == "gpt_oss" and not gated:
        raise KernelError("gpt_oss is a gated function")
    interleaved = gated and bool(attributes["interleaved"])
    kernel = Kernel(
        f"moe_{function}_{'gated' if gated else 'plain'}{'_in_turn' if interleaved else ''}",
        "moe/moe_cuda.cuh",
        f"activate<{'GptOss' if function == 'gpt_oss' else f'F_{function}'}, {str(gated).lower()}, "
        f"{str(interleaved).lower()}>",
        ActivateParams,
        THREADS,
    )
    params = ActivateParams(
        gate_up=both.address,
        hidden=hidden.address,
        pairs=hidden.shape[0],
        inner=hidden.shape[1],
        type=cuda_gemm.Y_TYPES[hidden.dtype],
        alpha=float(attributes["alpha"]),
        limit=float(attributes["limit"]),
        **routing,
    )
    return Launch(kernel, params, (-(-hidden.shape[0] * hidden.shape[1] // THREADS), 1, 1))


def _weights(call: Call, x: Tensor) -> tuple[Weight, Weight]:
    """Gate_up and down."""
    given = (*call.inputs, *(None,) * 11)[:11]
    gate_up, down, up_bias, down_bias, up_scale, up_zero, down_scale, down_zero = given[3:]
    assert gate_up is not None and down is not None, "experts have weights"
    attributes, hidden = call.attributes, x.shape[1]
    per_inner = 2 if attributes["gated"] else 1
    inner = int(attributes.get("inner", 0))
    if not inner and up_bias is not None:
        inner = up_bias.shape[1] // per_inner
    if not inner and down.dtype == "float32":
        inner = down.shape[2]
    if not inner:
        raise KernelError("packed experts need the attribute inner, or a bias of gate_up")
    made = []
    for weight, bias, scale, zero, rows, columns in (
        (gate_up, up_bias, up_scale, up_zero, per_inner * inner, hidden),
        (down, down_bias, down_scale, down_zero, hidden, inner),
    ):
        if attributes.get("format", "plain") == "plain":
            made.append(linear.weight_of(weight, rows, columns, bias, experts=True))
        else:
            assert scale is not None, "quantized experts have scales"
            made.append(
                quantized_linear.weight_of(
                    *(weight, scale, zero, bias, attributes, rows, columns, call.capability), experts=True
                )
            )
    return made[0], made[1]
