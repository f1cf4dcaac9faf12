"""FP8: weights as E4M3 floats with scales, for the inputs as they are or as FP8 too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from llmc.quantization.base import Activations, FloatArray, LayerInputs, Method, Notes, Quantized, Scheme
from llmc.quantization.float8 import LARGEST, encode_e4m3
from llmc.quantization.options import option
from llmc.quantization.rounding import round_scale, split_groups

BLOCK = 128
"""Rows and columns of a block with a scale of its own."""


@dataclass(frozen=True)
class Fp8(Method):
    """Each weight becomes the nearest E4M3 float of its scale, which takes the largest to 448."""

    name: ClassVar[str] = "fp8"

    scale: str = option("channel", "what shares a scale; block: 128 x 128", choices=("tensor", "channel", "block"))
    inputs: str = option("float", "what the inputs are rounded to", choices=("float", "fp8"))

    @property
    def weights(self) -> Scheme:
        """How the weights are stored."""
        return Scheme("fp8", BLOCK if self.scale == "block" else 0)

    @property
    def activations(self) -> Activations:
        """What happens to the inputs."""
        return Activations.FP8 if self.inputs == "fp8" else Activations.PER_GROUP

    @property
    def row_block(self) -> int | None:
        """Rows that may share a scale."""
        return {"tensor": None, "channel": 1, "block": BLOCK}[self.scale]

    def round_weight(self, weight: FloatArray, inputs: LayerInputs | None, name: str) -> tuple[Quantized, Notes]:
        """Codes of a weight [N, K]."""
        largest = np.abs(split_groups(weight, self.weights.group)).max(-1)  # [N, G]
        if self.scale == "tensor":
            largest[:] = largest.max()
        elif self.scale == "block":
            for start in range(0, len(largest), BLOCK):
                largest[start : start + BLOCK] = largest[start : start + BLOCK].max(0)
        scale = round_scale(largest / np.float32(LARGEST))
        columns = weight.shape[1]
        codes = encode_e4m3(weight / np.repeat(scale, self.weights.group or columns, axis=1)[:, :columns])
        return Quantized("fp8", self.weights.group, columns, codes, scale), {}
