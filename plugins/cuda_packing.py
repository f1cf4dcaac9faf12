"""How CUDA kernels have weights: in the order in which the lanes of a warp hold the fragments of mma.

A panel is 32 rows of the weight (columns of the result), a step 16 columns, or 32 where bytes are multiplied, a chunk
four steps. Of each step of a panel lane 4 g + t of a warp holds, for the four tiles j of eight rows, row 8 j + g:

    steps of 16   columns 2 t, 2 t + 1, 2 t + 8, 2 t + 9
    steps of 32   columns 4 t to 4 t + 3, and 16 + 4 t to 16 + 4 t + 3

so a packed weight is [panels, chunks, 4, bytes of a step]. Groups of quantized weights begin a new step; what is
missing is zero. csrc/cuda/gemm.cuh multiplies it, gemm_rows.cuh reads single numbers.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmc.plugins.cuda import SM_90A

PANEL = 32
STEPS = 4
BITS = {"plain": 16, "int4": 4, "int8": 8, "fp8": 8}

FP8_CAPABILITIES = (89, SM_90A, 120, 121)
"""What multiplies E4M3 as it is; others convert to bfloat16."""
CONVERTED = 80
"""A capability that E4M3 is converted for. All others take weights that are packed for it, too."""

Array = NDArray[Any]


def step_of(format: str, compute: str, capability: int) -> int:
    """The columns of a step: bytes are multiplied as int8, and as fp8 where the chip can."""
    bytes_wide = compute == "int8" or (compute == "fp8" and capability in FP8_CAPABILITIES)
    return 32 if bytes_wide and format != "plain" else 16


def common(capabilities: Iterable[int]) -> int:
    """What weights for several chips are packed for: E4M3 in steps of 32 only if each of them multiplies it."""
    return min(capabilities, key=lambda one: (one in FP8_CAPABILITIES, one))


@dataclass(frozen=True)
class Layout:
    """Of a weight [rows, columns]. ``block``: columns that share every scale, 0: all of them."""

    rows: int
    columns: int
    format: str
    step: int
    block: int = 0

    @property
    def width(self) -> int:
        """Columns of a block as it stands in memory: whole steps, unless there is one block."""
        block = self.block if 0 < self.block < self.columns else self.columns
        return -(-max(block, 1) // self.step) * self.step

    @property
    def blocks(self) -> int:
        """Blocks of a row."""
        return -(-self.columns // self.block) if 0 < self.block < self.columns else 1

    @property
    def padded(self) -> int:
        """Columns in memory, without those that fill the last chunk."""
        return self.blocks * self.width

    @property
    def chunks(self) -> int:
        """Chunks of a row."""
        return -(-self.padded // (STEPS * self.step))

    @property
    def panels(self) -> int:
        """Panels."""
        return -(-self.rows // PANEL)

    @property
    def step_bytes(self) -> int:
        """Of a panel."""
        return PANEL * self.step * BITS[self.format] // 8

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Of the packed weight: elements of 16-bit numbers, or bytes."""
        size = self.step_bytes // 2 if self.format == "plain" else self.step_bytes
        return self.panels, self.chunks, STEPS, size

    def spread(self, weight: Array) -> Array:
        """[rows, columns] with rows and columns where they stand in memory."""
        wide = np.zeros((self.panels * PANEL, self.chunks * STEPS * self.step), weight.dtype)
        for number in range(self.blocks):
            part = weight[:, number * self.block : (number + 1) * self.block] if self.blocks > 1 else weight
            wide[: self.rows, number * self.width : number * self.width + part.shape[1]] = part
        return wide

    def gathered(self, wide: Array) -> Array:
        """The inverse of ``spread``."""
        wide = wide[: self.rows]
        if self.blocks == 1:
            return wide[:, : self.columns]
        blocks = wide[:, : self.padded].reshape(self.rows, self.blocks, self.width)[:, :, : self.block]
        return blocks.reshape(self.rows, -1)[:, : self.columns]


def fragments(layout: Layout, weight: Array) -> Array:
    """The numbers of a weight by [panel, chunk, step, half of the tiles, g, t, tile, half of the columns, column]."""
    pairs = layout.step // 8
    wide = layout.spread(weight).reshape(layout.panels, 2, 2, 8, layout.chunks, STEPS, 2, 4, pairs)
    return wide.transpose(0, 4, 5, 1, 3, 7, 2, 6, 8)


def from_fragments(layout: Layout, numbers: Array) -> Array:
    """The inverse of ``fragments``: [rows, columns]."""
    wide = numbers.transpose(0, 3, 6, 4, 1, 2, 7, 5, 8)
    return layout.gathered(np.ascontiguousarray(wide).reshape(layout.panels * PANEL, -1))


def fragment_shape(layout: Layout) -> tuple[int, ...]:
    """The shape of ``fragments``."""
    return layout.panels, layout.chunks, STEPS, 2, 8, 4, 2, 2, layout.step // 8
