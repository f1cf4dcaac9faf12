"""AWQ: columns whose inputs are large are scaled up before rounding, and their inputs down, where that helps.

https://arxiv.org/abs/2306.00978. The factors are s = mean|x|^r / mean|w|^(1 - r), with the r of a grid that makes the
least error of the outputs on the sampled rows; then the span of each group is searched in the same sense, and codes and
scales go through rounds of coordinate descent, which the paper does not have.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from llmc.errors import UsageError
from llmc.quantization.base import FloatArray, LayerInputs, Notes, Quantized, Statistics, check_finite
from llmc.quantization.descent import ALIKE, DAMPING, ROWS_BYTES, Curvature, descend, shrinkage
from llmc.quantization.deterministic import single_threaded
from llmc.quantization.options import option
from llmc.quantization.rounding import (
    SEARCH_ROWS,
    IntegerMethod,
    fit,
    join_groups,
    join_rows,
    round_to_nearest,
    shares,
    split_groups,
    spread_rows,
    to_codes,
    to_values,
)

_LEAST_SHARE = 1e-3  # of the mean: columns that calibration hardly saw do not get factors near 0


@dataclass(frozen=True)
class Awq(IntegerMethod):
    """Scales the columns with large inputs up before rounding, by the error of the outputs on sampled rows."""

    name: ClassVar[str] = "awq"
    needs: ClassVar[Statistics] = Statistics.HESSIAN
    sequential: ClassVar[bool] = True
    folds: ClassVar[bool] = True

    grid: int = option(20, "exponents that are tried for the scales; 0: no scales", low=0, high=100)
    duo: bool = option(True, "scales depend on the weights too, not on the inputs only")
    clip: bool = option(True, "search the span of each group that makes the least error of its outputs")
    refine: int = option(2, "rounds of coordinate descent on codes and scales after that", low=0, high=100)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (self.grid or self.duo):
            raise UsageError("--quant awq: duo=false: there are no scales with grid=0; leave one of them away")

    def input_scale(
        self, weight: FloatArray, inputs: LayerInputs, *, name: str = "weight", tie: npt.NDArray[np.int64] | None = None
    ) -> FloatArray | None:
        """The factors [K] with the least error of the outputs, or None if no factors are better."""
        check_finite(weight, name, "weight")
        check_finite(inputs.rows, name, "input")
        check_finite(inputs.mean_abs, name, "input")
        if not (self.grid and inputs.count):
            return None
        best: FloatArray | None = None
        with single_threaded():
            x_mean, w_mean = _tied(inputs.mean_abs, tie), _tied(self._weight_means(weight), tie)
            weight = spread_rows(weight)
            square = inputs.rows.T @ inputs.rows if len(inputs.rows) > weight.shape[1] else None
            least = self._loss(weight, None, inputs.rows, square)
            for step in range(1, self.grid + 1):
                scale = _factors(x_mean, w_mean, step / self.grid, self.duo)
                loss = self._loss(weight, scale, inputs.rows, square)
                if loss < least:
                    least, best = loss, scale
        return best

    def round_weight(self, weight: FloatArray, inputs: LayerInputs | None, name: str) -> tuple[Quantized, Notes]:
        """Codes of a weight [N, K] whose columns are scaled already."""
        if inputs is None or not (self.clip or self.refine):
            return round_to_nearest(weight, self.weights), {}
        scheme, step = self.weights, max(1, ROWS_BYTES // (4 * weight.shape[1]))
        clips, parts = [], []
        with single_threaded():
            rows, curvature = split_groups(inputs.rows, scheme.group), self._curvature(inputs)
            for start in range(0, len(weight), step):
                part = weight[start : start + step]
                groups = split_groups(part, scheme.group)
                clips.append(self._search_clip(groups, rows) if self.clip else np.ones(groups.shape[:-1], np.float32))
                grid = fit(groups, scheme, clips[-1])
                codes = join_groups(to_codes(groups, grid, self.bits), weight.shape[1])
                parts.append(descend(part, codes, grid, scheme, curvature, self.refine))
        return join_rows(parts), {"mean_clip": float(np.abs(np.concatenate(clips)).mean())}

    def _curvature(self, inputs: LayerInputs) -> Curvature | None:
        """The Hessian of the inputs, if rounds of descent need it."""
        if not self.refine:
            return None
        assert inputs.hessian is not None, "awq is given the Hessian"
        return Curvature(inputs.hessian, shrinkage(inputs.hessian, inputs.rows, inputs.count, ALIKE), DAMPING)

    def _weight_means(self, weight: FloatArray) -> FloatArray:
        """The mean [K] over rows of |w| as a share of the largest of its group."""
        sums: npt.NDArray[np.float64] | float = 0.0
        for start in range(0, len(weight), SEARCH_ROWS):
            groups = np.abs(split_groups(weight[start : start + SEARCH_ROWS], self.weights.group))
            groups /= np.maximum(groups.max(-1, keepdims=True), np.float32(1e-30))
            sums = sums + groups.sum(0, dtype=np.float64)
        return join_groups(np.asarray(sums / len(weight)), weight.shape[1]).astype(np.float32)

    def _loss(self, weight: FloatArray, scale: FloatArray | None, rows: FloatArray, square: FloatArray | None) -> float:
        """The squared error of the outputs of the rows; ``square``: the sum of x x^T, where that is smaller."""
        groups = split_groups(weight if scale is None else weight * scale, self.weights.group)
        grid = fit(groups, self.weights)
        rounded = join_groups(to_values(to_codes(groups, grid, self.bits), grid), weight.shape[1])
        error = (rounded if scale is None else rounded / scale) - weight
        if square is not None:
            return float(np.sum((error @ square) * error, dtype=np.float64))
        return float(np.sum(np.square(error @ rows.T), dtype=np.float64))

    def _search_clip(self, groups: FloatArray, rows: FloatArray) -> FloatArray:
        """The shares [N, G] of the spans with the least squared error of the outputs of the rows [n, G, group].

        Group after group, given the errors of all others. Each on its own would be wrong: a smaller span makes what a
        group adds to the outputs smaller, always in the same direction, and such errors add up over the groups where
        those of rounding cancel. (SmolLM2-135M, groups of 128: perplexity 40.4, against 42.6 for each on its own.)
        """
        by_group = np.ascontiguousarray(rows.transpose(1, 0, 2))  # [G, n, group]
        grid = fit(groups, self.weights)
        errors = to_values(to_codes(groups, grid, self.bits), grid) - groups  # [N, G, group], of the weights
        clip = np.ones(groups.shape[:-1], np.float32)
        of_outputs = np.zeros((len(groups), len(rows)), np.float32)  # [N, n]
        for g, x in enumerate(by_group):
            of_outputs += errors[:, g] @ x.T
        for g, x in enumerate(by_group):
            of_outputs -= errors[:, g] @ x.T
            clip[:, g], errors[:, g] = self._search_group(groups[:, g], errors[:, g], of_outputs @ x, x.T @ x)
            of_outputs += errors[:, g] @ x.T
        return clip

    def _search_group(
        self, weights: FloatArray, error: FloatArray, others: FloatArray, square: FloatArray
    ) -> tuple[FloatArray, FloatArray]:
        """The shares [N] and errors [N, group] of one group.

        ``others`` [N, group]: the errors of the outputs by the other groups, times the rows. ``square``: the sum of
        x x^T over the rows. The squared error of the outputs is that of the others + e square e + 2 e others.
        """
        best = np.full(len(weights), np.inf, np.float32)
        clip = np.ones(len(weights), np.float32)
        chosen = error.copy()
        for share in shares(self.weights):
            grid = fit(weights, self.weights, share)
            error = to_values(to_codes(weights, grid, self.bits), grid) - weights
            loss = np.sum((error @ square + 2 * others) * error, axis=1)
            better = loss < best
            best = np.where(better, loss, best)
            clip[better] = share
            chosen[better] = error[better]
        return clip, chosen


def _factors(x_mean: FloatArray, w_mean: FloatArray, ratio: float, duo: bool) -> FloatArray:
    """The factors of an exponent, with 1 between the smallest and the largest of them."""
    logarithm = ratio * np.log(np.maximum(x_mean, _LEAST_SHARE * x_mean.mean() + np.float32(1e-30)))
    if duo:
        logarithm -= (1 - ratio) * np.log(np.maximum(w_mean, _LEAST_SHARE * w_mean.mean() + np.float32(1e-30)))
    centred = logarithm - (logarithm.max() + logarithm.min()) / 2
    return np.asarray(np.exp(centred), np.float32)


def _tied(values: FloatArray, tie: npt.NDArray[np.int64] | None) -> FloatArray:
    """The mean over the columns that have to have the same factor."""
    if tie is None:
        return values
    _, place = np.unique(tie, return_inverse=True)
    sums = np.bincount(place, weights=values)
    return np.asarray((sums / np.bincount(place))[place], np.float32)
