"""Coordinate descent on rounded weights: code after code and scale after scale, the error of the outputs gets smaller.

With H the mean of x x^T and e the error of a row of weights, that of its output is e H e^T. All else fixed, it is least
for a column i at w_i - (sum over j != i of H_ij e_j) / H_ii, so the code nearest to that is the best one (QuantEase,
https://arxiv.org/abs/2309.01885); and along the scale of a group it is a parabola, whose minimum is known. Neither
step makes the error larger, so a few rounds of them better any rounding, GPTQ's too: that looks at a column once.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from llmc.quantization.base import FloatArray
from llmc.quantization.rounding import Grid, round_scale

BLOCK = 128
"""Columns whose products with the Hessian are made at once."""


class Curvature:
    """A Hessian [K, K] that is drawn to its diagonal by a share ``shrunk``, with ``damping`` of its mean added to that.

    The Hessian is not copied.
    """

    def __init__(self, hessian: npt.NDArray[Any], shrunk: float, damping: float) -> None:
        self.diagonal = np.diagonal(hessian).astype(np.float64)
        self._hessian = hessian
        self._kept = np.float32(1 - shrunk)
        self._alone = (shrunk * self.diagonal + damping * (float(self.diagonal.mean()) or 1.0)).astype(np.float32)

    def square(self, begin: int, end: int) -> FloatArray:
        """A square block of it [n, n]."""
        block = np.asarray(self._hessian[begin:end, begin:end], np.float32) * self._kept
        block[np.diag_indices_from(block)] += self._alone[begin:end]
        return block

    def slopes(self, begin: int, end: int, errors: FloatArray) -> FloatArray:
        """Some rows [n, N] of its product with errors [K, N]."""
        return self._product(begin, end, slice(None), errors, errors[begin:end])

    def bends(self, begin: int, end: int, steps: FloatArray) -> FloatArray:
        """A square block of it times [n, N]."""
        return self._product(begin, end, slice(begin, end), steps, steps)

    def _product(self, begin: int, end: int, columns: slice, values: FloatArray, own: FloatArray) -> FloatArray:
        found: FloatArray = np.asarray(self._hessian[begin:end, columns], np.float32) @ values
        found *= self._kept
        found += self._alone[begin:end, None] * own
        return found


class Descent:
    """Codes of some rows and their scales, on the way to smaller errors.

    Works on columns as rows, which are contiguous. To be used with BLAS on one thread.

    Args:
        weight: [N, K].
        codes: [N, K] as float32.
        grid: the scales and zero points [N, G] of them.
        group: columns that share a scale; the last ones may be fewer.
        curvature: the H that errors are weighed by.
        bits: of a code.
    """

    def __init__(
        self,
        weight: FloatArray,
        codes: FloatArray,
        grid: Grid,
        *,
        group: int,
        curvature: Curvature,
        bits: int,
    ) -> None:
        columns = weight.shape[1]
        self._group = group or columns
        self._curvature = curvature
        self._highest = np.float32((1 << bits) - 1)
        self._weights = np.ascontiguousarray(weight.T)
        self._codes = np.ascontiguousarray(codes.T)
        self._scale, self._zero = (np.ascontiguousarray(values.T) for values in (grid.scale, grid.zero))
        groups = np.arange(columns) // self._group
        self._errors = (self._codes - self._zero[groups]) * self._scale[groups] - self._weights

    def round(self) -> None:
        """Every code once, and every scale after the codes of its group."""
        columns = len(self._codes)
        for number, begin in enumerate(range(0, columns, self._group)):
            end = min(begin + self._group, columns)
            for start in range(begin, end, BLOCK):
                self._choose_codes(number, start, min(start + BLOCK, end))
            self._choose_scale(number, begin, end)

    def result(self) -> tuple[FloatArray, Grid]:
        """Codes [N, K] and their grid."""
        scale, zero = (np.ascontiguousarray(values.T) for values in (self._scale, self._zero))
        return np.ascontiguousarray(self._codes.T), Grid(scale, zero)

    def _choose_codes(self, number: int, start: int, stop: int) -> None:
        scale, zero = self._scale[number], self._zero[number]
        slopes = self._curvature.slopes(start, stop, self._errors)
        square = self._curvature.square(start, stop)
        for i in range(stop - start):
            weights, errors = self._weights[start + i], self._errors[start + i]
            wanted = weights + errors - slopes[i] / square[i, i]
            codes = np.clip(np.rint(wanted / scale) + zero, 0, self._highest)
            change = (codes - zero) * scale - weights - errors
            self._codes[start + i] = codes
            errors += change
            slopes[i + 1 :] += np.outer(square[i + 1 :, i], change)

    def _choose_scale(self, number: int, begin: int, end: int) -> None:
        steps = self._codes[begin:end] - self._zero[number]
        bend = np.einsum("kn,kn->n", self._curvature.bends(begin, end, steps), steps)
        slope = np.einsum("kn,kn->n", self._curvature.slopes(begin, end, self._errors), steps)
        scale = self._scale[number]
        moved = round_scale(scale - np.where(bend > 0, slope / np.maximum(bend, np.float32(1e-38)), 0))
        moved = np.where(steps.any(0), moved, scale)  # a group of zeros keeps what it has
        self._errors[begin:end] += steps * (moved - scale)
        self._scale[number] = moved
