"""What the reference of paged attention needs besides its inputs: whose rows are packed, and what is in the cache."""

from __future__ import annotations

from collections.abc import Hashable, MutableMapping
from contextvars import ContextVar, Token
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

Cache = MutableMapping[tuple[int, Hashable], tuple[Any, Any]]
"""(slot, request): keys [n, Hkv, Dk] and values [n, Hkv, Dv], arrays or tensors, in the order of the positions."""

_current: ContextVar[Step | None] = ContextVar("paged attention step", default=None)


@dataclass
class Step:
    """The sequences of one step, in packed order; a context manager, in which references read and extend ``cache``.

    Keep one cache for the steps of a run. A kernel's test lays the cache of a sample out in blocks, and enters a copy
    (``dataclasses.replace(step, cache=dict(step.cache))``) before it asks the reference.
    """

    rows: tuple[tuple[Hashable, int], ...]
    """Request and number of new rows of each sequence; they add up to T."""
    cache: Cache = field(default_factory=dict)
    tree_mask: NDArray[np.uint64] | None = None
    """[T, words] bit j of row r: new row j of the same sequence is an ancestor of r, or r itself. None: causal."""
    _token: Token[Step | None] | None = field(default=None, repr=False, compare=False)

    def __enter__(self) -> Step:
        self._token = _current.set(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._token is not None, "a step is left that was not entered"
        _current.reset(self._token)

    def visible(self, first: int, rows: int) -> NDArray[np.bool_]:
        """[rows, rows]: whether new row i of the sequence whose rows start at ``first`` sees new row j."""
        if self.tree_mask is None:
            return np.tri(rows, dtype=np.bool_)
        words = np.ascontiguousarray(self.tree_mask[first : first + rows])
        bits = np.unpackbits(words.view(np.uint8), axis=1, count=None, bitorder="little")
        return bits[:, :rows].astype(np.bool_)


def current_step() -> Step | None:
    """The step that was entered last, or None: the rows are then one sequence from position 0 on."""
    return _current.get()
