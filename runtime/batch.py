"""What the scheduler hands to an executor for one step."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as ListOf
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

Int32 = NDArray[np.int32]


@dataclass(frozen=True)
class Batch:
    """The rows of one step, packed: those of sequence s are ``cu_seqlens[s]:cu_seqlens[s + 1]``.

    Row r of a sequence is written to cache position ``num_computed[s] + r``: to slot ``position % block_size`` of
    block ``block_tables[s, position // block_size]``. All arrays are C-contiguous.
    """

    input_ids: Int32
    """[T] token ids."""
    position_ids: Int32
    """[T] positions for rope, windows and ALiBi; they differ from cache positions only under a tree mask."""
    logit_rows: Int32
    """[N] rows whose logits are computed."""
    cu_seqlens: Int32
    """[S + 1] cumulative row counts."""
    num_computed: Int32
    """[S] tokens of each sequence that are in the cache already."""
    block_tables: Int32
    """[S, max_blocks] block ids; unused entries are 0."""
    tree_mask: NDArray[np.uint64] | None = None
    """[T, words] bit j of row r: new row j of the same sequence is an ancestor of r, or r itself. None: causal."""
    state_slots: Int32 | None = None
    """[S] where each sequence keeps the state of recurrent ops. None: the plan has no state."""
    adapters: Int32 | None = None
    """[S] the LoRA adapter of each sequence, by number; -1 is none. None: no sequence has one."""


class Executor(Protocol):
    """Runs the plan of an engine. The scheduler is tested with a fake one."""

    def step(self, batch: Batch) -> NDArray[np.float32]:
        """Logits [N, vocabulary]; the array is the executor's own and valid until the next step."""
        ...


@runtime_checkable
class EmbeddingExecutor(Executor, Protocol):
    """One that also gives what goes into the head of the model."""

    def embed(self, batch: Batch, *, logits: bool) -> tuple[NDArray[np.float32], NDArray[np.float32] | None]:
        """Rows [N, hidden size] before the head, the caller's own; and logits as of `step` if they are asked for."""
        ...


@runtime_checkable
class DraftExecutor(EmbeddingExecutor, Protocol):
    """One that can take over the accepted ones of draft tokens, which stand behind each other in a tree."""

    def move_positions(self, blocks: Int32, sources: Int32, targets: Int32) -> None:
        """Copy what the cache holds of positions of a sequence with these blocks, one after the other."""
        ...


@dataclass(frozen=True)
class Draws:
    """How tokens are to be chosen for the rows of logits of a step, [N] each; see `Sampler`.

    Of rows that are not ``wanted`` the logits are asked for instead. Changes of single logits of row r are those from
    ``bounds[r]`` to ``bounds[r + 1]``, of different tokens ``ids``: divided or multiplied by ``factors`` (repetition),
    less ``penalties``, plus ``biases``. Then all is ruled out for which row ``mask_of[r]`` of ``masks`` has no bit; -1:
    there is no mask.
    """

    wanted: NDArray[np.bool_]
    temperature: NDArray[np.float32]
    top_k: Int32
    top_p: NDArray[np.float32]
    min_p: NDArray[np.float32]
    draws: NDArray[np.float64]
    """Random numbers in [0, 1)."""
    bounds: Int32
    """[N + 1]."""
    ids: Int32
    factors: NDArray[np.float32]
    penalties: NDArray[np.float64]
    biases: NDArray[np.float32]
    mask_of: Int32
    masks: NDArray[np.uint32]
    """[M, words] as of `TokenConstraint.mask`."""

    @property
    def count(self) -> int:
        """Rows."""
        return len(self.wanted)


@dataclass(frozen=True)
class Chosen:
    """What the executor has chosen for rows that were ``wanted``. A score that is not finite: there is no token.

    ``again``: chooses anew for a row, with another random number and without the token that was chosen for it last;
    until the next step. None: no row has bad words.
    """

    wanted: ListOf[bool] | NDArray[np.bool_]
    tokens: ListOf[int] | Int32
    scores: ListOf[float] | NDArray[np.float32]
    again: Callable[[int, int, float], tuple[int, float]] | None = None


@runtime_checkable
class SamplingExecutor(Executor, Protocol):
    """One that chooses tokens itself, so that logits need not come back from its device."""

    vocab_size: int
    """Columns of logits."""

    most_changes: int
    """Of logits in all rows of a step."""

    most_masks: int
    """In a step."""

    def choose(
        self, batch: Batch, draws: Callable[[], Draws | None], *, hidden: bool
    ) -> tuple[NDArray[np.float32] | None, NDArray[np.float32], Chosen | None]:
        """Logits as of `step`, of which only rows are valid that are not wanted; and what was chosen for the others.

        First of all, if ``hidden``, rows as of `embed`. ``draws`` is called while the device computes the logits; None:
        they are all wanted.
        """
        ...


@runtime_checkable
class GreedyExecutor(Executor, Protocol):
    """One that finds the largest logits while it has them at hand."""

    def step_greedily(self, batch: Batch) -> tuple[NDArray[np.float32], list[int], list[float]]:
        """Logits as of `step`, and of each row the first of its largest logits, and this; NaN is the largest."""
        ...


@runtime_checkable
class Closeable(Protocol):
    """What holds memory of a device."""

    def close(self) -> None:
        """Give it back. Nothing can be run afterwards."""
        ...


class PartExecutor(Protocol):
    """One for a part of an engine that drafts: its plan goes on with what the model has computed."""

    def run_on(self, batch: Batch, name: str, rows: NDArray[np.float32], begin: int = 0) -> NDArray[np.float32]:
        """Logits; steps from ``begin`` on, and no others, run on these rows as that value. Valid until the next run."""
        ...

    def features(self) -> NDArray[np.float32]:
        """Features [T, width] of the last run, the caller's own."""
        ...


@runtime_checkable
class FeatureExecutor(DraftExecutor, Protocol):
    """One that also gives what a draft layer goes on with."""

    def features(self) -> NDArray[np.float32]:
        """Features [T, width] of all rows of the last step, the caller's own."""
        ...
