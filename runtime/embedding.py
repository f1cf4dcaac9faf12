"""Embeddings: what goes into the head of the model for a prompt, of its last token or the mean over all."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from llmc.errors import LlmcError

if TYPE_CHECKING:
    from llmc.runtime.request import Request

POOLINGS = ("last", "mean")


class Pool:
    """Collects the rows of one prompt, in order. Sums are in float64 and row by row, so that chunks don't matter."""

    def __init__(self, pooling: str) -> None:
        self.takes_all = pooling == "mean"
        self.count = 0
        """Rows so far."""
        self._sum: NDArray[np.float64] | None = None

    def add(self, rows: NDArray[np.float32]) -> None:
        """Take the next rows [n, hidden size]; if only the last one counts, nothing but that."""
        for row in rows:
            self._sum = row.astype(np.float64) if self._sum is None else self._sum + row
        self.count += len(rows)

    @property
    def result(self) -> NDArray[np.float32] | None:
        """[hidden size]; None as long as there is no row."""
        return None if self._sum is None else (self._sum / self.count).astype(np.float32)


def embedding_of(request: Request) -> NDArray[np.float32]:
    """The embedding of a finished request.

    Raises:
        LlmcError: it has none; says why.
    """
    embedding = request.embedding
    if embedding is None:
        raise LlmcError(f"no embedding: {request.sequences[0].error}")
    return embedding
