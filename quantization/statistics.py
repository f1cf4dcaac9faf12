"""Collects what methods need to know about the inputs of a product, from rows that arrive in pieces of any size."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt

from llmc.quantization.base import FloatArray, LayerInputs, Statistics, check_finite
from llmc.quantization.deterministic import single_threaded

SAMPLE = 2048
"""Rows of the sample. (SmolLM2-135M, awq in groups of 128: perplexity 45.4, against 51.5 with 512 rows.)"""

_CHUNK = 512  # rows that are summed up at once, however they arrive
_TILE = 384  # columns of a tile of the Hessian


class InputCollector:
    """Sums over input rows [n, columns]. The result has the same bits however the rows are cut, on any thread count.

    Sums go over chunks of 512 rows in the order of arrival: float32 within a chunk, and float32 (the Hessian) or
    float64 (the rest) over chunks. The sample is the rows whose number has the smallest hash. It holds one chunk, the
    sample and the Hessian (4 bytes each), and is to be used by one thread at a time.
    """

    def __init__(self, columns: int, needs: Statistics, *, name: str = "layer", threads: int = 1) -> None:
        self.name = name
        self.count = 0
        self._needs = needs
        self._threads = threads
        self._pending: list[FloatArray] = []
        self._pending_rows = 0
        self._sum_abs = np.zeros(columns, np.float64)
        self._max_abs = np.zeros(columns, np.float32)
        self._rows = np.zeros((0, columns), np.float32)
        self._row_numbers = np.zeros(0, np.uint64)
        self._hessian = np.zeros((columns, columns), np.float32) if needs is Statistics.HESSIAN else None

    def add(self, rows: FloatArray) -> None:
        """Takes rows [n, columns]; copies what it keeps. Raises CompileError for numbers that are not finite."""
        check_finite(rows, self.name, "input")
        self._pending.append(np.array(rows, np.float32))
        self._pending_rows += len(rows)
        if self._pending_rows >= _CHUNK:
            waiting = np.concatenate(self._pending)
            whole = len(waiting) // _CHUNK * _CHUNK
            for start in range(0, whole, _CHUNK):
                self._add_chunk(waiting[start : start + _CHUNK])
            self._pending = [waiting[whole:].copy()]
            self._pending_rows = len(waiting) - whole

    def finish(self) -> LayerInputs:
        """The statistics of all rows."""
        if self._pending_rows:
            self._add_chunk(np.concatenate(self._pending))
        self._pending, self._pending_rows = [], 0
        count = max(self.count, 1)
        mean_abs = (self._sum_abs / count).astype(np.float32)
        hessian = self._hessian
        if hessian is not None:
            for start in range(0, len(hessian), _TILE):  # in place: a copy would double the memory of a layer
                rows = slice(start, start + _TILE)
                hessian[rows, :start] = hessian[:start, rows].T
                square = hessian[rows, rows]
                square[...] = np.triu(square) + np.triu(square, 1).T
            hessian /= np.float32(count)
        return LayerInputs(self.count, mean_abs, self._max_abs, self._rows, hessian)

    def _add_chunk(self, chunk: FloatArray) -> None:
        magnitude = np.abs(chunk)
        self._sum_abs += magnitude.sum(0, dtype=np.float64)
        np.maximum(self._max_abs, magnitude.max(0), out=self._max_abs)
        self._sample(chunk)
        if self._hessian is not None:
            self._add_products(chunk, self._hessian)
        self.count += len(chunk)

    def _sample(self, chunk: FloatArray) -> None:
        numbers = np.concatenate([self._row_numbers, np.arange(self.count, self.count + len(chunk), dtype=np.uint64)])
        rows = np.concatenate([self._rows, chunk])
        kept = np.sort(np.argsort(spread(numbers), kind="stable")[:SAMPLE])
        self._rows, self._row_numbers = rows[kept], numbers[kept]

    def _add_products(self, chunk: FloatArray, hessian: FloatArray) -> None:
        """Adds x x^T, the tiles on and above the diagonal only."""
        starts = range(0, chunk.shape[1], _TILE)
        tiles = [(i, j) for i in starts for j in starts if i <= j]

        def add(tile: tuple[int, int]) -> None:
            i, j = (slice(start, start + _TILE) for start in tile)
            hessian[i, j] += chunk[:, i].T @ chunk[:, j]

        with single_threaded():
            if self._threads > 1 and len(tiles) > 1:
                with ThreadPoolExecutor(self._threads) as pool:
                    list(pool.map(add, tiles))
            else:
                for tile in tiles:
                    add(tile)


def spread(numbers: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Consecutive numbers -> numbers all over 64 bits (splitmix64), to sample by without a state."""
    mixed = (numbers + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(mixed ^ (mixed >> np.uint64(31)), np.uint64)
