"""Round to nearest: needs no calibration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from llmc.quantization.base import FloatArray, LayerInputs, Notes, Quantized
from llmc.quantization.options import Preset, option
from llmc.quantization.rounding import IntegerMethod, round_to_nearest, search_clip, split_groups

INT8 = Preset("int8", "rtn:bits=8,group=32", "weight-only int8, groups of 32")
INT4 = Preset("int4", "rtn:bits=4,group=128", "weight-only int4, groups of 128")


@dataclass(frozen=True)
class Rtn(IntegerMethod):
    """Each weight becomes the nearest number of its group's grid."""

    name: ClassVar[str] = "rtn"

    clip: bool = option(False, "search the span of each group that makes the least error of its weights")

    def round_weight(self, weight: FloatArray, inputs: LayerInputs | None, name: str) -> tuple[Quantized, Notes]:
        """Codes of a weight [N, K]."""
        if not self.clip:
            return round_to_nearest(weight, self.weights), {}
        groups = split_groups(weight, self.weights.group)
        clip = search_clip(groups, self.weights)
        return round_to_nearest(weight, self.weights, clip), {"mean_clip": float(np.abs(clip).mean())}
