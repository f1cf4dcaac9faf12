"""Products by the warpgroup instructions of sm_90a (csrc/cuda/gemm_wgmma.cuh): which weights, which tiles, the launch.

The weights are packed as for other targets. How K is summed depends on the weight alone, and so do the bits of a row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmc.plugins.cuda import Kernel, Launch, Tensor, params_type
from llmc.plugins.cuda_packing import STEPS, Layout

if TYPE_CHECKING:
    from llmc.plugins.cuda_gemm import Weight

PANELS = 4
"""Of a block."""
THREADS = 384
MOST_WAYS = 8
FEW_BLOCKS = 96
"""With fewer blocks the ways of K become blocks of their own, so that all multiprocessors have work."""
ENOUGH_BLOCKS = 264
"""Two for each multiprocessor."""
TILES = (8, 32, 128)
"""Rows of x that a block may have."""
MOST_STAGES = 8

WGMMA = params_type(
    "WgmmaParams",
    "x w scale zero factor bias y",
    "y_stride y_split group_inverse",
    "M N atoms chunks panels way_chunks ways groups y_type",
)


def multiplies(weight: Weight) -> bool:
    """Whether there is a kernel: not where sums of x are needed, nor where parts of a row of x have scales."""
    sums = weight.zeros == "float32" or (weight.zeros == "uint8" and weight.layout.step == 32)
    return not sums and not 0 < weight.x_group < weight.layout.columns


def tile_rows(rows: int) -> int:
    """Rows of a tile where x has so many."""
    return next((tile for tile in TILES if rows <= tile), TILES[-1])


def ways(layout: Layout) -> tuple[int, int]:
    """(parts of K that are summed for themselves, chunks of each)."""
    count = max(1, min(MOST_WAYS, -(-ENOUGH_BLOCKS * PANELS // layout.panels), layout.chunks // 2))
    chunks = max(-(-layout.chunks // count), 1)
    return max(-(-layout.chunks // chunks), 1), chunks


def splits(rows: int, layout: Layout) -> int:
    """Blocks that K is split over: all ways, or one for all of them, which gives the same bits."""
    tile = tile_rows(rows)
    few = tile < TILES[-1] or -(-layout.panels // PANELS) * -(-rows // tile) < FEW_BLOCKS
    return ways(layout)[0] if few else 1


def instance(decode: str, kind: str, weight: Weight, tile: int) -> tuple[Kernel, int]:
    """The kernel for a tile, and the bytes of its shared memory."""
    where = weight.layout
    fold = STEPS if where.blocks == 1 or where.width // where.step % STEPS == 0 else 1
    slot = tile * 128 + PANELS * STEPS * where.step_bytes
    stages = min(MOST_STAGES, ((200 if tile == TILES[-1] else 104) << 10) // slot)
    math_class = {"BF16": "Wide16<BF16>", "F16": "Wide16<F16>"}.get(kind, f"Wide{kind}")
    scales = f"{weight.scale[0]}{weight.scale[-2:]}{weight.zeros[:1]}_" if weight.quantized else ""
    kernel = Kernel(
        f"wgmma_{kind.lower()}_{where.format}{where.step}_{scales}{tile}_s{stages}_f{fold}",
        "csrc/cuda/gemm_wgmma.cuh",
        f"gemm_wgmma<Wide<{math_class}, {decode}, {tile}, {stages}, {fold}>>",
        WGMMA,
        THREADS,
    )
    return kernel, 2048 + stages * slot


def gemm(
    decode: str,
    kind: str,
    x: tuple[int, int, int],
    weight: Weight,
    y: Tensor,
    *,
    bias: int,
    splits: int,
    y_split: int,
    group_inverse: int,
    y_type: int,
) -> Launch:
    """The product of prepared rows.

    Args:
        decode: the template of gemm.cuh that makes numbers of the weight.
        kind: what is multiplied: BF16, F16, Signed8 or Float8.
        x: where the rows stand, in tiles; where what they were divided by stands, or 0; how many there are.
        weight: one that this module `multiplies`.
        y: where the result goes, contiguous in the columns.
        bias: its address, or 0.
        splits: blocks that K is split over.
        y_split: elements between their results.
        group_inverse: see `GemmBlock` of gemm.cuh.
        y_type: 0 float32, 1 bfloat16, 2 float16.
    """
    where, (address, factor, rows) = weight.layout, x
    kernel, shared = instance(decode, kind, weight, tile_rows(rows))
    tile, (count, way_chunks) = tile_rows(rows), ways(where)
    tiles = -(-rows // tile)
    params = WGMMA(
        x=address,
        w=weight.address,
        scale=weight.scale_address,
        zero=weight.zero_address,
        factor=factor,
        bias=bias,
        y=y.address,
        y_stride=y.strides[0],
        y_split=y_split,
        group_inverse=group_inverse,
        M=rows,
        N=where.rows,
        atoms=tiles * tile // 8,
        chunks=where.chunks,
        panels=where.panels,
        way_chunks=way_chunks,
        ways=1 if splits > 1 else count,
        groups=weight.groups,
        y_type=y_type,
    )
    return Launch(kernel, params, (-(-where.panels // PANELS), tiles, splits), shared)
