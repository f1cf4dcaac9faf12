"""How what sampling needs for the rows of a step lies in memory: one copy brings it to the device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from llmc.plugins import cuda_sampling
from llmc.runtime.batch import Draws
from llmc.runtime.devices.cuda.program import aligned

if TYPE_CHECKING:
    from llmc.plugins.cuda import Launch, Tensor
    from llmc.runtime.manifest import Limits

MOST_CHANGES = 1 << 16
"""Changes of single logits (penalties, biases) of a step; a row for which there is no room is the host's."""

_ROW = ("temperature", "top_k", "top_p", "min_p", "draws")
_CHANGE = ("bounds", "ids", "factors", "penalties", "biases", "mask_of", "masks")


def draws_bytes(limits: Limits, vocabulary: int) -> int:
    """What the arrays of a step take at most, with the tokens that come back."""
    each = (4, 4, 4, 4, 8, 4, 4, 4 + 4)  # the last are tokens and scores
    change = (4, 4, 8, 4)
    masks = 4 * limits.max_sequences * -(-vocabulary // 32)
    rows = sum(aligned(size * (limits.max_batch_tokens + 1)) for size in each)
    return rows + sum(aligned(size * MOST_CHANGES) for size in change) + aligned(masks)


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
        data, at = np.ascontiguousarray(array).reshape(-1).view(np.uint8), used
        host[at : at + len(data)] = data
        used = aligned(at + len(data))
        return address + at

    rows = {name: put(getattr(draws, name)) for name in _ROW}
    changes = {name: put(getattr(draws, name)) for name in _CHANGE}
    rows |= {"tokens": address + used, "scores": address + used + 4 * draws.count}
    return Placed(rows, changes, used)


def launches(logits: Tensor, draws: Draws, placed: Placed) -> list[Launch]:
    """What chooses a token for each row; logits that are to be changed are so before."""
    made = [cuda_sampling.sample(logits, placed.rows)]
    if not len(draws.ids) and not len(draws.masks):
        return made
    return [cuda_sampling.adjust(logits, placed.changes, draws.masks.shape[1]), *made]


def without(draws: Draws, row: int, token: int, number: float) -> Draws:
    """One row of them, whose logits were changed already, without a token and with another random number."""
    one, nothing = slice(row, row + 1), np.zeros(1)
    return Draws(
        draws.wanted[one],
        draws.temperature[one],
        draws.top_k[one],
        draws.top_p[one],
        draws.min_p[one],
        nothing + number,
        bounds=np.array([0, 1], np.int32),
        ids=np.array([token], np.int32),
        factors=np.ones(1, np.float32),
        penalties=nothing,
        biases=np.array([-np.inf], np.float32),
        mask_of=np.array([-1], np.int32),
        masks=draws.masks[:0],
    )
