"""How what sampling needs for the rows of a step lies in memory: one copy brings it to the device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from llmc.plugins import cuda_sampling
from llmc.runtime.devices.cuda.program import aligned

if TYPE_CHECKING:
    from llmc.plugins.cuda import Launch, Tensor
    from llmc.runtime.batch import Draws

MOST_CHANGES = 1 << 16
"""Changes of single logits (penalties, biases) of a step; a row for which there is no room is the host's."""

_ROW, _CHANGE = ("temperature", "top_k", "top_p", "min_p", "draws"), ("ids", "factors", "penalties", "biases")


def draws_bytes(rows: int) -> int:
    """What arrays of so many rows take at most, with the tokens that come back."""
    each = (4, 4, 4, 4, 8, 4, 4, 4 + 4)  # the last are tokens and scores
    change = (4, 4, 8, 4)
    return sum(aligned(size * (rows + 1)) for size in each) + sum(aligned(size * MOST_CHANGES) for size in change)


@dataclass(frozen=True)
class Placed:
    """Where the arrays of a step stand on the device: ``size`` bytes to be copied, then tokens and their scores."""

    rows: dict[str, int]
    changes: dict[str, int]
    size: int


def place(draws: Draws, address: int, host: NDArray[np.uint8]) -> Placed:
    """Write a step's arrays to ``host``, of which a copy is to stand at ``address``; each has `draws_bytes` bytes."""
    used = 0

    def put(array: NDArray[Any]) -> int:
        nonlocal used
        data, at = np.ascontiguousarray(array).view(np.uint8), used
        host[at : at + len(data)] = data
        used = aligned(at + len(data))
        return address + at

    rows = {name: put(getattr(draws, name)) for name in _ROW}
    changes = {name: put(getattr(draws, name)) for name in ("bounds", *_CHANGE)}
    changes |= {"mask_of": put(np.full(draws.count, -1, np.int32)), "masks": 0}
    rows |= {"tokens": address + used, "scores": address + used + 4 * draws.count}
    return Placed(rows, changes, used)


def launches(logits: Tensor, draws: Draws, placed: Placed) -> list[Launch]:
    """What chooses a token for each row; logits that are to be changed are so before."""
    made = [cuda_sampling.sample(logits, placed.rows)]
    return [cuda_sampling.adjust(logits, placed.changes, 0), *made] if len(draws.ids) else made
