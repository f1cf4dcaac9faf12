"""GPTQ: columns are rounded one after the other, and what is left to round makes up for the error so far.

https://arxiv.org/abs/2210.17323. With the mean H = V V^T of x x^T, V upper triangular, the squared error of the outputs
is the sum over columns i of (V_ii e_i + sum over j < i of V_ji e_j)^2, where e is the error of the weights. So column i
is best rounded from w_i + (sum over j < i of V_ji e_j) / V_ii. This is the paper's rule without the inverse of H.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from llmc.errors import CompileError
from llmc.quantization.base import FloatArray, LayerInputs, Notes, Quantized, Statistics
from llmc.quantization.deterministic import single_threaded
from llmc.quantization.options import option
from llmc.quantization.rounding import (
    Grid,
    IntegerMethod,
    fit,
    round_to_nearest,
    search_clip,
    split_groups,
    to_quantized,
)

_BLOCK = 128  # columns whose errors are carried on to the rest at once
_MOST_DAMPING = 1e3


@dataclass(frozen=True)
class Gptq(IntegerMethod):
    """Rounds column after column, each making up for the errors of those before, by the Hessian of the inputs."""

    name: ClassVar[str] = "gptq"
    needs: ClassVar[Statistics] = Statistics.HESSIAN
    sequential: ClassVar[bool] = True

    act_order: bool = option(True, "columns with the largest inputs first; their groups stay as they are (static)")
    damping: float = option(0.01, "share of the mean diagonal added to that of the Hessian", low=1e-6, high=1.0)
    clip: bool = option(True, "search the span of each group")

    def round_weight(self, weight: FloatArray, inputs: LayerInputs | None, name: str) -> tuple[Quantized, Notes]:
        """Codes of a weight [N, K]."""
        if inputs is None:
            return round_to_nearest(weight, self.weights), {}
        assert inputs.hessian is not None, "gptq is given the Hessian"
        with single_threaded():
            diagonal = np.diagonal(inputs.hessian).astype(np.float64)
            order = np.argsort(-diagonal, kind="stable") if self.act_order else np.arange(len(diagonal))
            carried, damping = factorize(inputs.hessian, order, self.damping, name)
            grid = self._grids(split_groups(weight, self.weights.group), diagonal)
            codes = self._round(weight, grid, carried, order)
        notes: Notes = {"damping": damping, "dead_columns": int(np.count_nonzero(diagonal == 0))}
        return to_quantized(split_groups(codes, self.weights.group), grid, self.weights, weight.shape[1]), notes

    def _grids(self, groups: FloatArray, diagonal: npt.NDArray[np.float64]) -> Grid:
        """The grids of all groups [N, G], chosen before any column is rounded."""
        if not self.clip:
            return fit(groups, self.weights)
        importance = split_groups((diagonal / max(diagonal.max(), 1e-300)).astype(np.float32), self.weights.group)
        return fit(groups, self.weights, search_clip(groups, self.weights, importance))

    def _round(self, weight: FloatArray, grid: Grid, carried: FloatArray, order: npt.NDArray[np.int64]) -> FloatArray:
        """Codes [N, K] as float32. ``carried`` [j, i]: V_ji / V_ii. Works on columns as rows, which are contiguous."""
        columns = weight.shape[1]
        group_of = order // (self.weights.group or columns)
        scales, zeros = (np.ascontiguousarray(values.T) for values in (grid.scale, grid.zero))
        weights = np.ascontiguousarray(weight.T)[order]
        errors = np.zeros_like(weights)
        codes = np.empty_like(weights)
        highest = np.float32((1 << self.bits) - 1)
        for start in range(0, columns, _BLOCK):
            stop = min(start + _BLOCK, columns)
            wanted = weights[start:stop] + carried[:start, start:stop].T @ errors[:start]
            for i in range(start, stop):
                scale, zero = scales[group_of[i]], zeros[group_of[i]]
                codes[i] = np.clip(np.rint(wanted[i - start] / scale) + zero, 0, highest)
                errors[i] = weights[i] - (codes[i] - zero) * scale
                wanted[i + 1 - start :] += np.outer(carried[i, i + 1 : stop], errors[i])
        whole = np.empty_like(weight)
        whole[:, order] = codes.T
        return whole


def factorize(
    hessian: npt.NDArray[Any], order: npt.NDArray[np.int64], damping: float, name: str
) -> tuple[FloatArray, float]:
    """V_ji / V_ii, for V upper triangular with V V^T = H + damping * mean diagonal, and the damping that it took.

    Rows and columns of H are taken in the given order. If it is not positive definite, which sums of rounded products
    need not be, the damping is raised tenfold. Needs the memory of three matrices in float64.
    """
    mean = float(np.diagonal(hessian).mean()) or 1.0
    backward = order[::-1]  # LAPACK's factor is lower triangular; that of the matrix read backward is upper
    while damping <= _MOST_DAMPING:
        damped = hessian[np.ix_(backward, backward)].astype(np.float64)
        damped[np.diag_indices_from(damped)] += damping * mean
        try:
            factor = np.linalg.cholesky(damped)[::-1, ::-1]
        except np.linalg.LinAlgError:
            damping *= 10
            continue
        del damped
        carried = np.ascontiguousarray(factor, np.float32)
        carried /= np.diagonal(factor).astype(np.float32)
        return carried, damping
    raise CompileError(
        f"{name}: the Hessian of its inputs is not positive definite whatever the damping; the calibration is broken: "
        "use another calibration text, or another method for this layer"
    )
