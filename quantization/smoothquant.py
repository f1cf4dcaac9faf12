"""SmoothQuant: int8 weights and int8 inputs; part of what makes inputs hard to round is moved into the weights.

https://arxiv.org/abs/2211.10438. The factors are s = max|x|^alpha / max|w|^(1 - alpha).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from llmc.errors import UsageError
from llmc.quantization.base import (
    Activations,
    FloatArray,
    LayerInputs,
    Method,
    Notes,
    Quantized,
    Scheme,
    Statistics,
    check_finite,
)
from llmc.quantization.deterministic import single_threaded
from llmc.quantization.options import Preset, option
from llmc.quantization.rounding import round_inputs, round_scale, round_to_nearest, spread_rows

W8A8 = Preset("w8a8", "smoothquant:group=128", "int8 weights and int8 inputs, one scale for 128 of each")

_ACTIVATIONS = {"token": Activations.PER_TOKEN, "group": Activations.PER_GROUP, "static": Activations.STATIC}
_ALPHAS = np.linspace(0, 1, 21)
_LEAST_SHARE = 1e-3  # of the mean: columns whose inputs calibration hardly saw don't get factors near 0


@dataclass(frozen=True)
class SmoothQuant(Method):
    """Int8 weights and inputs, with factors between them that even out columns."""

    name: ClassVar[str] = "smoothquant"
    needs: ClassVar[Statistics] = Statistics.INPUTS
    folds: ClassVar[bool] = True

    search: bool = option(True, "the alpha of each layer is the one with the least error of its outputs")
    alpha: float = option(0.5, "how much of the inputs' range moves to the weights, with search=false", low=0, high=1)
    inputs: str = option(
        "group",
        "what shares a scale of the inputs: 128 columns of a token, a token, or all tokens (static, from calibration)",
        choices=("group", "token", "static"),
    )
    group: int = option(0, "weights that share a scale: 16 to 256 in steps of 16; 0: all of an output channel")

    def __post_init__(self) -> None:
        _ = self.weights  # refuses groups that don't exist
        if self.search and self.alpha != type(self).alpha:
            raise UsageError(f"--quant smoothquant: alpha={self.alpha}: is searched; give search=false too")

    @property
    def weights(self) -> Scheme:
        """Int8, one scale per output channel or group."""
        return Scheme("int8", self.group)

    @property
    def activations(self) -> Activations:
        """What happens to the inputs."""
        return _ACTIVATIONS[self.inputs]

    def activation_scale(self, inputs: LayerInputs) -> float | None:
        """The scale of static activations: the largest input is 127 steps."""
        return float(round_scale(inputs.max_abs.max() / np.float32(127))[0]) if self.inputs == "static" else None

    def input_scale(
        self, weight: FloatArray, inputs: LayerInputs, *, name: str = "weight", tie: npt.NDArray[np.int64] | None = None
    ) -> FloatArray | None:
        """The factors [K] of the alpha, given or searched; None if none are better."""
        check_finite(weight, name, "weight")
        check_finite(inputs.rows, name, "input")
        check_finite(inputs.max_abs, name, "input")
        if not inputs.count:
            return None
        x_max = _tied_max(inputs.max_abs, tie)
        w_max = _tied_max(np.maximum(weight.max(0), -weight.min(0)), tie)
        if not self.search:
            return _factors(x_max, w_max, self.alpha)
        best: FloatArray | None = None
        with single_threaded():
            weight = spread_rows(weight)
            wanted = inputs.rows @ weight.T
            least = self._loss(weight, None, inputs, wanted)
            for alpha in _ALPHAS:
                scale = _factors(x_max, w_max, float(alpha))
                loss = self._loss(weight, scale, inputs, wanted)
                if loss < least:
                    least, best = loss, scale
        return best

    def round_weight(self, weight: FloatArray, inputs: LayerInputs | None, name: str) -> tuple[Quantized, Notes]:
        """Codes of a weight [N, K] whose columns are scaled already."""
        return round_to_nearest(weight, self.weights), {}

    def _loss(self, weight: FloatArray, scale: FloatArray | None, inputs: LayerInputs, wanted: FloatArray) -> float:
        """The squared error of the outputs of the sampled rows with both sides rounded."""
        rows, largest = inputs.rows, inputs.max_abs
        if scale is not None:
            weight, rows, largest = weight * scale, rows / scale, largest / scale
        rounded = round_inputs(rows, self.x_group, largest.max() if self.inputs == "static" else None)
        outputs = rounded @ round_to_nearest(weight, self.weights).dequantize().T
        return float(np.sum(np.square(outputs - wanted), dtype=np.float64))


def _factors(x_max: FloatArray, w_max: FloatArray, alpha: float) -> FloatArray:
    """The factors of an alpha, their geometric mean 1 between the smallest and the largest."""
    x_max = np.maximum(x_max, _LEAST_SHARE * x_max.mean() + np.float32(1e-30))
    w_max = np.maximum(w_max, _LEAST_SHARE * w_max.mean() + np.float32(1e-30))
    logarithm = alpha * np.log(x_max) - (1 - alpha) * np.log(w_max)
    centred = logarithm - (logarithm.max() + logarithm.min()) / 2
    return np.asarray(np.exp(centred), np.float32)


def _tied_max(values: FloatArray, tie: npt.NDArray[np.int64] | None) -> FloatArray:
    """The largest over the columns that have to have the same factor."""
    if tie is None:
        return values
    _, place = np.unique(tie, return_inverse=True)
    largest = np.zeros(place.max() + 1, np.float32)
    np.maximum.at(largest, place, values)
    return np.asarray(largest[place], np.float32)
