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
from llmc.quantization.descent import ALIKE, BLOCK, DAMPING, ROWS_BYTES, Curvature, descend, shrinkage
from llmc.quantization.deterministic import single_threaded
from llmc.quantization.options import option
from llmc.quantization.rounding import (
    Grid,
    IntegerMethod,
    fit,
    join_rows,
    round_to_nearest,
    search_clip,
    split_groups,
)

_MOST_DAMPING = 1e3


@dataclass(frozen=True)
class Gptq(IntegerMethod):
    """Rounds column after column, each making up for the errors of those before, by the Hessian of the inputs."""

    name: ClassVar[str] = "gptq"
    needs: ClassVar[Statistics] = Statistics.HESSIAN
    sequential: ClassVar[bool] = True

    act_order: bool = option(True, "columns with the largest inputs first; their groups stay as they are (static)")
    damping: float = option(DAMPING, "share of the mean diagonal added to that of the Hessian", low=1e-6, high=1.0)
    alike: float = option(
        ALIKE, "tokens that count as one where few are not to be trusted; 0: all are", low=0.0, high=1e3
    )
    clip: bool = option(True, "search the span of each group")
    refine: int = option(2, "rounds of coordinate descent on codes and scales after that", low=0, high=100)

    def round_weight(self, weight: FloatArray, inputs: LayerInputs | None, name: str) -> tuple[Quantized, Notes]:
        """Codes of a weight [N, K]."""
        if inputs is None:
            return round_to_nearest(weight, self.weights), {}
        assert inputs.hessian is not None, "gptq is given the Hessian"
        with single_threaded():
            diagonal = np.diagonal(inputs.hessian).astype(np.float64)
            order = np.argsort(-diagonal, kind="stable") if self.act_order else np.arange(len(diagonal))
            shrunk = shrinkage(inputs.hessian, inputs.rows, inputs.count, self.alike)
            carried, damping = factorize(inputs.hessian, order, self.damping, name, shrunk)
            curvature = Curvature(inputs.hessian, shrunk, damping)
            step = max(1, ROWS_BYTES // (4 * weight.shape[1]))
            parts = [
                self._rows(weight[start : start + step], curvature, carried, order)
                for start in range(0, len(weight), step)
            ]
        notes: Notes = {
            "damping": damping,
            "shrunk": round(shrunk, 4),
            "dead_columns": int(np.count_nonzero(diagonal == 0)),
        }
        return join_rows(parts), notes

    def _rows(
        self,
        weight: FloatArray,
        curvature: Curvature,
        carried: FloatArray,
        order: npt.NDArray[np.int64],
    ) -> Quantized:
        """Some rows: what becomes of a row does not depend on others."""
        grid = self._grids(split_groups(weight, self.weights.group), curvature.diagonal)
        codes = self._round(weight, grid, carried, order)
        return descend(weight, codes, grid, self.weights, curvature, self.refine)

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
        for start in range(0, columns, BLOCK):
            stop = min(start + BLOCK, columns)
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
    hessian: npt.NDArray[Any], order: npt.NDArray[np.int64], damping: float, name: str, shrunk: float = 0.0
) -> tuple[FloatArray, float]:
    """V_ji / V_ii, for V upper triangular with V V^T = H + damping * mean diagonal, and the damping that it took.

    ``shrunk``: the share of H that its diagonal takes the place of.

    Rows and columns of H are taken in the given order. If it is not positive definite, which sums of rounded products
    need not be, the damping is raised tenfold. Needs the memory of one matrix in float64, which holds the result too.
    """
    diagonal = np.diagonal(hessian).astype(np.float64)
    mean = float(diagonal.mean()) or 1.0
    matrix = np.empty(hessian.shape, np.float64)
    while damping <= _MOST_DAMPING:
        for i, row in enumerate(order):
            matrix[i] = hessian[row][order]
        matrix *= 1 - shrunk
        matrix[np.diag_indices_from(matrix)] = diagonal[order] + damping * mean
        try:
            _upper_factor(matrix)
        except np.linalg.LinAlgError:
            damping *= 10
            continue
        return _divided(matrix), damping
    raise CompileError(
        f"{name}: the Hessian of its inputs is not positive definite whatever the damping; the calibration is broken: "
        "use another calibration text, or another method for this layer"
    )


def _upper_factor(matrix: npt.NDArray[np.float64]) -> None:
    """A symmetric matrix becomes V in place, upper triangular, with V V^T the matrix: column by column from the last.

    Raises:
        LinAlgError: it is not positive definite.
    """
    for end in range(len(matrix), 0, -BLOCK):
        start = max(0, end - BLOCK)
        strip = matrix[:end, start:end]
        if end < len(matrix):
            strip -= matrix[:end, end:] @ matrix[start:end, end:].T
        square = np.linalg.cholesky(strip[start:][::-1, ::-1])[::-1, ::-1]  # LAPACK's is lower; read backward, upper
        strip[start:] = square
        if start:
            strip[:start] = np.linalg.solve(square, strip[:start].T).T
        matrix[end:, start:end] = 0


def _divided(factor: npt.NDArray[np.float64]) -> FloatArray:
    """V_ji / V_ii in float32, in the first half of the memory of V."""
    diagonal = np.diagonal(factor).astype(np.float32)
    found: FloatArray = factor.reshape(-1).view(np.float32)[: factor.size].reshape(factor.shape)
    for i, row in enumerate(factor):  # row i of the result ends where row i // 2 of V does, or before
        found[i] = row.astype(np.float32) / diagonal
    return found
