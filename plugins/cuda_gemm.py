"""Products with weights on a CUDA device: which kernels a product is, for llmc::linear, quantized_linear and moe.

See csrc/cuda/gemm.cuh for how results have the same bits for any number of rows; here is what depends on it: tiles,
warps and stages. What the sums depend on, `ways`, is decided by K and N alone. Numbers of 16 bits are multiplied as
bfloat16 or float16 whatever ``compute`` of bfloat16 or float32 says, as they need no rounding.
"""

# long: one product in order, from the shape of its weight to its launches

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

from llmc.errors import KernelError
from llmc.plugins import cuda_wgmma
from llmc.plugins.cuda import SM_90A, Call, Kernel, Launch, Tensor, params_type
from llmc.plugins.cuda_packing import STEPS, Layout

WAYS = 8
MOST_SPLITS = 8
FEW_PANELS = 128
"""With fewer panels K is split over blocks, so that all multiprocessors have work."""

THREADS = 256
TYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
SHORT = {"F32": "f32", "BF16": "bf16", "F16": "f16"}
Y_TYPES = {"float32": 0, "bfloat16": 1, "float16": 2}
ZEROS = {"": 0, "uint8": 1, "float32": 2}


GEMM = params_type(
    "GemmParams",
    "a w scale zero factor bias y tiles rows",
    "a_stride y_stride y_split w_expert scale_expert zero_expert group_inverse block_inverse",
    "M N a_bytes chunks panels way_chunks groups units y_type pairs choices",
)
PREPARE = params_type(
    "PrepareParams",
    "x x_scale out factor",
    "x_stride",
    "M K columns group group_columns unit unit_columns units x_scales",
)
COMBINE = params_type("CombineParams", "part bias y", "split y_stride", "M N columns splits y_type")
EXACT = params_type(
    "ExactParams",
    "x w scale zero bias y tiles rows",
    "x_stride y_stride w_expert scale_expert zero_expert",
    "M N K chunks groups group group_columns y_type choices",
)


@dataclass(frozen=True)
class Weight:
    """A weight [N, K], or one for each expert. ``zeros``: their dtype, or "". ``scale``: its dtype."""

    layout: Layout
    dtype: str
    address: int
    compute: str = "plain"
    group: int = 0
    x_group: int = 0
    scale: str = "float32"
    scale_address: int = 0
    zeros: str = ""
    zero_address: int = 0
    bias: int = 0

    @property
    def groups(self) -> int:
        """Scales of a row."""
        return -(-self.layout.columns // self.group) if self.group else 1

    @property
    def quantized(self) -> bool:
        """Whether there are scales."""
        return self.layout.format != "plain"

    @property
    def expert_bytes(self) -> tuple[int, int, int]:
        """Bytes of the weight, the scales and the zeros of an expert."""
        where, of_group = self.layout, self.layout.panels * 32 * self.groups
        size = where.panels * where.chunks * STEPS * where.step_bytes
        return size, of_group * (2 if self.scale == "float16" else 4), of_group * (1 if self.zeros == "uint8" else 4)


@dataclass(frozen=True)
class Experts:
    """Rows grouped by expert: where `tiles` (expert, begin, count) and `rows` stand; a row of x has `choices` rows."""

    tiles: int
    rows: int
    count: int
    """Of tiles, at most."""
    tile_rows: int
    choices: int


@dataclass(frozen=True)
class Shape:
    """Rows of a tile, and how eight warps share it: a way for each, or ``m_warps`` x ``n_warps`` for all."""

    m_tiles: int
    m_warps: int = 1
    n_warps: int = 1

    @property
    def rows(self) -> int:
        """Of a tile."""
        return 16 * self.m_tiles * self.m_warps


ONE, TWO, MANY, MOST = Shape(1), Shape(2), Shape(2, 2, 4), Shape(4, 2, 4)


def ways(layout: Layout) -> tuple[int, int]:
    """(blocks that K is split over, chunks of a way), by the shape of the weight alone."""
    splits = min(MOST_SPLITS, FEW_PANELS // max(layout.panels, 1), layout.chunks // (2 * WAYS))
    splits = max(splits, 1)
    return splits, max(-(-layout.chunks // (splits * WAYS)), 1)


LEAST_SHARED = 99 << 10
"""Bytes of shared memory that a block may have on any chip."""


FEW_BLOCKS = 96
"""With fewer blocks of many rows smaller tiles are better, which give more multiprocessors work."""


def shared_limits(capability: int) -> tuple[int, int]:
    """Bytes with which two blocks fit, and that one may have on every chip that runs a cubin for this one."""
    return (112 << 10, 200 << 10) if 90 <= capability < 120 else (80 << 10, LEAST_SHARED)


def inverse(steps: int, layout: Layout) -> int:
    """What multiplies a number of steps so that the upper half of the product is the quotient; 0: it is always 0."""
    total = layout.chunks * STEPS
    if total >= 1 << 16:
        raise KernelError(f"a weight of {layout.columns} columns; CUDA kernels take up to {(1 << 16) * layout.step}")
    return 0 if steps > total else -(-(1 << 32) // steps)


def group_inverse(weight: Weight) -> int:
    """For the number of steps that share a scale."""
    where = weight.layout
    block = where.width // where.step
    of_scale = block * (weight.group // where.block if weight.group and where.blocks > 1 else 1)
    return inverse(of_scale, where) if weight.groups > 1 else 0


@dataclass(frozen=True)
class Instance:
    """An instance of ``gemm`` and the bytes of its shared memory."""

    kernel: Kernel
    shared: int
    shape: Shape


@dataclass(frozen=True)
class Ring:
    """Shared memory of a kernel: ``head`` bytes, then a ring of slots for each team of warps."""

    head: int
    slot: int
    teams: int
    fold: int
    """Steps after which scales may change."""

    @staticmethod
    def of(layout: Layout, scale: str, zeros: str, shape: Shape) -> Ring:
        """As `Gemm` of gemm.cuh has it."""
        team = shape.m_warps * shape.n_warps
        fold = STEPS if layout.blocks == 1 or layout.width // layout.step % STEPS == 0 else 1
        of_group = {"": 0, "uint8": 32, "float32": 128}[zeros]
        if layout.format != "plain":
            of_group += 64 if scale == "float16" else 128
        groups = 1 if fold == STEPS else STEPS
        slot = shape.rows * 128 + shape.n_warps * (STEPS * layout.step_bytes + groups * of_group)
        return Ring(-(-shape.rows // 16) * 128, -(-slot // 128) * 128, WAYS if team == 1 else 1, fold)

    def stages(self, limits: tuple[int, int]) -> int:
        """Slots of a ring: two at least, or 0 where these don't fit."""
        most = 6 if self.teams > 1 else 4
        for limit in limits if self.teams > 1 else (LEAST_SHARED,):
            stages = (limit - self.head) // (self.slot * self.teams)
            if stages >= 2:
                return min(most, stages)
        return 0


@cache
def instance(
    weight: str, math_type: str, layout: Layout, scale: str, zeros: str, shape: Shape, limits: tuple[int, int]
) -> Instance:
    """The kernel for a kind of weight (a template of gemm.cuh) and a shape of tiles; see `_weight_type`."""
    ring = Ring.of(layout, scale, zeros, shape)
    stages = ring.stages(limits)
    assert stages, f"{shape} does not fit"
    scales = f"{scale[0]}{scale[-2:]}{zeros[:1]}_" if layout.format != "plain" else ""
    size = f"{shape.m_tiles}x{shape.m_warps}x{shape.n_warps}"
    math_class = f"Half16<{math_type}>" if math_type in SHORT else math_type
    parts = f"{shape.m_tiles}, {shape.m_warps}, {shape.n_warps}, {stages}, {ring.fold}"
    kernel = Kernel(
        f"gemm_{SHORT.get(math_type, math_type)}_{layout.format}{layout.step}_{scales}{size}_s{stages}_f{ring.fold}",
        "csrc/cuda/gemm.cuh",
        f"gemm<Gemm<{math_class}, {weight}, {parts}>>",
        GEMM,
        THREADS,
        2 if shape == ONE else 1,
    )
    return Instance(kernel, ring.head + ring.slot * ring.teams * stages, shape)


def shape_for(rows: float, weight: Weight, limits: tuple[int, int], experts: int = 1) -> Shape:
    """The tiles for so many rows of x, of an expert on the average."""
    blocks = -(-weight.layout.panels // MANY.n_warps) * math.ceil(rows / MANY.rows) * experts
    for shape in (ONE, TWO):
        few = rows <= shape.rows or (shape == TWO and blocks < FEW_BLOCKS)
        if few and Ring.of(weight.layout, weight.scale, weight.zeros, shape).stages(limits):
            return shape
    return MANY if weight.quantized or rows <= MANY.rows else MOST


def math_of(weight: Weight, x: str, capability: int) -> str:
    """What is multiplied: BF16, F16, Signed8, Float8, or F32: float32, without tensor cores."""
    if not weight.quantized:
        return TYPES[weight.dtype]
    if weight.layout.step == 32:
        return "Signed8" if weight.compute == "int8" else "Float8"
    if weight.compute == "fp8":
        return "BF16"
    if x == "float32":
        return "F32" if weight.compute == "float32" else "BF16"
    return TYPES[x]


def _weight_type(weight: Weight, kind: str) -> str:
    zero, scale, format = ZEROS[weight.zeros], TYPES[weight.scale], weight.layout.format
    if format == "plain":
        return f"Plain16<{kind}>"
    if weight.layout.step == 32:
        if format == "int4":
            return f"Int4Bytes<{zero}, {scale}>"
        return f"Bytes<{zero}, {scale}, {128 if format == 'int8' else 0}>"
    return f"Fp8<{kind}, {scale}>" if format == "fp8" else f"Int{format[-1]}<{kind}, {zero}, {scale}>"


def product(
    call: Call,
    x: Tensor,
    weight: Weight,
    y: Tensor,
    *,
    experts: Experts | None = None,
    function: str = "",
    x_scale: Tensor | None = None,
) -> list[Launch]:
    """The launches of y = function(x w^T + bias); with ``experts`` y has a row for each of their rows."""
    rows, where = x.shape[0], weight.layout
    if min(y.shape) == 0:
        return []
    if (where.columns > 1 and x.strides[1] != 1) or (y.shape[1] > 1 and y.strides[1] != 1):
        raise KernelError("the columns of x and y must be contiguous")
    kind = math_of(weight, x.dtype, call.capability)
    wide = call.capability == SM_90A and experts is None and kind != "F32" and cuda_wgmma.multiplies(weight)
    if wide:
        tile = cuda_wgmma.tile_rows(rows)
        splits = cuda_wgmma.splits(rows, where)
    else:
        splits, way_chunks = ways(where) if experts is None else (1, max(-(-where.chunks // WAYS), 1))
    if kind == "F32":
        splits = 1
    target, y_split = y, 0
    if splits > 1 or function:
        y_split = y.shape[0] * where.rows
        part = call.scratch(splits * y_split * 4)
        target = Tensor(part, "float32", (y.shape[0], where.rows), (where.rows, 1))
    direct = target is y
    bias = weight.bias if direct else 0
    if kind == "F32":
        made = [_exact(x, weight, target, bias, experts)]
    elif wide:
        a, made = _ready(call, x, weight, kind, x_scale, tile)
        sums = {"bias": bias, "splits": splits, "y_split": y_split, "y_type": Y_TYPES[target.dtype]}
        sums["group_inverse"] = group_inverse(weight)
        rows_of_x = a.address, a.factor, x.shape[0]
        made.append(cuda_wgmma.gemm(_weight_type(weight, kind), kind, rows_of_x, weight, target, **sums))
    else:
        a, made = _ready(call, x, weight, kind, x_scale)
        limits = shared_limits(call.capability)
        shape = shape_for(rows, weight, limits) if experts is None else _shape_of(experts.tile_rows)
        of = instance(_weight_type(weight, kind), kind, where, weight.scale, weight.zeros, shape, limits)
        made.append(_gemm(of, a, weight, target, bias, experts, (splits, y_split, way_chunks)))
    return made if direct else [*made, combine(target, weight, y, splits, function)]


def _shape_of(tile_rows: int) -> Shape:
    return next(shape for shape in (ONE, TWO, MANY, MOST) if shape.rows == tile_rows)


@dataclass(frozen=True)
class Ready:
    """Rows of x as the kernel loads them: 16 bytes at a time, of `size` bytes in all; and their factors."""

    address: int
    stride: int
    size: int
    rows: int
    factor: int = 0
    units: int = 0


def _ready(
    call: Call, x: Tensor, weight: Weight, kind: str, x_scale: Tensor | None, tile: int = 0
) -> tuple[Ready, list[Launch]]:
    """``tile``: rows of a tile of wgmma; 0: rows stay rows."""
    where, rows = weight.layout, x.shape[0]
    padded = -(-rows // tile) * tile if tile else rows
    rounds = weight.quantized and weight.compute in ("int8", "fp8")
    row_bytes = 2 * x.strides[0]
    aligned = x.address % 16 == 0 and (row_bytes % 16 == 0 or rows == 1) and where.columns % 8 == 0
    if not tile and not rounds and TYPES[x.dtype] == kind and aligned and where.padded - where.columns < where.step:
        return Ready(x.address, row_bytes, 2 * where.columns, rows), []
    columns = where.chunks * STEPS * where.step
    wide = where.step == 16
    out = call.scratch(max(padded * columns * (2 if wide else 1), 1))
    x_group = weight.x_group if 0 < weight.x_group < where.columns else 0
    units = -(-where.columns // x_group) if x_group and rounds else 1
    factor = call.scratch(rows * units * 4) if rounds else 0
    if kind == "Signed8":
        how = "RoundInt8"
    elif rounds:
        how = "RoundFp8As<BF16>" if wide else "RoundFp8"
    else:
        how = f"Round16<{kind}>"
    short = how.lower().replace("<", "_").replace(">", "")
    kernel = Kernel(
        f"prepare_{SHORT[TYPES[x.dtype]]}_{short}{'_tiles' if tile else ''}",
        "csrc/cuda/gemm_rows.cuh",
        f"prepare_rows<{TYPES[x.dtype]}, {how}{', InTiles' if tile else ''}>",
        PREPARE,
        THREADS,
    )
    params = PREPARE(
        x=x.address,
        x_scale=0 if x_scale is None else x_scale.address,
        x_scales=0 if x_scale is None else x_scale.shape[0],
        out=out,
        factor=factor,
        x_stride=x.strides[0],
        M=rows,
        K=where.columns,
        columns=columns,
        group=where.block if where.blocks > 1 else max(where.columns, 1),
        group_columns=where.width,
        unit=x_group if units > 1 else where.columns,
        unit_columns=where.width if units > 1 else columns,
        units=units,
    )
    size = columns * (2 if wide else 1)
    ready = Ready(out, size, size, rows, factor, units if rounds else 0)
    return ready, [Launch(kernel, params, (padded, units, 1), 128)]


def _gemm(
    of: Instance, a: Ready, weight: Weight, y: Tensor, bias: int, experts: Experts | None, sums: tuple[int, int, int]
) -> Launch:
    where = weight.layout
    splits, y_split, way_chunks = sums
    width = 4 if y.dtype == "float32" else 2
    even = where.rows % 2 == 0 and (y.strides[0] % 2 == 0 or y.shape[0] == 1) and y.address % (2 * width) == 0
    block = where.width // where.step
    weight_bytes, scale_bytes, zero_bytes = weight.expert_bytes
    params = GEMM(
        a=a.address,
        w=weight.address,
        scale=weight.scale_address,
        zero=weight.zero_address,
        factor=a.factor,
        bias=bias,
        y=y.address,
        tiles=experts.tiles if experts else 0,
        rows=experts.rows if experts else 0,
        a_stride=a.stride,
        y_stride=y.strides[0],
        y_split=y_split,
        w_expert=weight_bytes,
        scale_expert=scale_bytes,
        zero_expert=zero_bytes,
        group_inverse=group_inverse(weight),
        block_inverse=inverse(block, where) if where.blocks > 1 else 0,
        M=a.rows,
        N=where.rows,
        a_bytes=a.size,
        chunks=where.chunks,
        panels=where.panels,
        way_chunks=way_chunks,
        groups=weight.groups,
        units=a.units,
        y_type=Y_TYPES[y.dtype],
        pairs=int(even),
        choices=experts.choices if experts else 1,
    )
    tiles = experts.count if experts else -(-a.rows // of.shape.rows)
    return Launch(of.kernel, params, (-(-where.panels // of.shape.n_warps), tiles, splits), of.shared)


def combine(part: Tensor, weight: Weight, y: Tensor, splits: int, function: str) -> Launch:
    """Y = function of the sum of partial sums and the bias."""
    kernel = Kernel(
        f"combine_{function or 'plain'}",
        "csrc/cuda/gemm_rows.cuh",
        f"combine<{f'F_{function}' if function else 'Ungated'}>",
        COMBINE,
        THREADS,
    )
    params = COMBINE(
        part=part.address,
        bias=weight.bias,
        y=y.address,
        split=part.shape[0] * part.shape[1],
        y_stride=y.strides[0],
        M=y.shape[0],
        N=part.shape[1],
        columns=y.shape[1],
        splits=splits,
        y_type=Y_TYPES[y.dtype],
    )
    return Launch(kernel, params, (-(-math.prod(y.shape) // THREADS), 1, 1))


EXACT_ROWS = 8


def numbers_type(weight: Weight) -> str:
    """The template of gemm_rows.cuh that reads single numbers of a weight, which is packed unless it is float32."""
    where = weight.layout
    if where.format == "plain":
        return "RowsPlain<F32>" if weight.dtype == "float32" else f"RowsPacked<{TYPES[weight.dtype]}>"
    bits, fp8 = (4 if where.format == "int4" else 8), str(where.format == "fp8").lower()
    return f"RowsQuantized<{bits}, {where.step}, {fp8}, {ZEROS[weight.zeros]}, {TYPES[weight.scale]}>"


def numbers_params(weight: Weight) -> dict[str, int]:
    """What it reads of the params."""
    where = weight.layout
    size, scale_bytes, zero_bytes = weight.expert_bytes
    return {
        "w": weight.address,
        "scale": weight.scale_address,
        "zero": weight.zero_address,
        "w_expert": size,
        "scale_expert": scale_bytes,
        "zero_expert": zero_bytes,
        "N": where.rows,
        "K": where.columns,
        "chunks": where.chunks,
        "groups": weight.groups,
        "group": weight.group if 0 < weight.group < where.columns else max(where.columns, 1),
        "group_columns": where.width,
    }


def _exact(x: Tensor, weight: Weight, y: Tensor, bias: int, experts: Experts | None) -> Launch:
    numbers = numbers_type(weight)
    short = "".join(c if c.isalnum() else "_" for c in numbers.lower())
    kernel = Kernel(
        f"exact_{SHORT[TYPES[x.dtype]]}_{short}",
        "csrc/cuda/gemm_rows.cuh",
        f"exact<{TYPES[x.dtype]}, {numbers}>",
        EXACT,
        THREADS,
    )
    params = EXACT(
        x=x.address,
        bias=bias,
        y=y.address,
        tiles=experts.tiles if experts else 0,
        rows=experts.rows if experts else 0,
        x_stride=x.strides[0],
        y_stride=y.strides[0],
        M=x.shape[0],
        y_type=Y_TYPES[y.dtype],
        choices=experts.choices if experts else 1,
        **numbers_params(weight),
    )
    tiles = experts.count if experts else -(-x.shape[0] // EXACT_ROWS)
    return Launch(kernel, params, (-(-weight.layout.rows // (THREADS // 32)), tiles, 1))
