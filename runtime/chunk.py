"""What a step is made of: rows of sequences, and the batch that the executor gets."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from llmc.runtime.batch import Batch
from llmc.runtime.request import Sequence
from llmc.runtime.speculative.base import Tree, tree_masks


@dataclass(slots=True)
class Chunk:
    """The rows of one sequence in a step: tokens ``start`` to ``stop``; logits are needed from ``first_row`` on.

    ``tree``: draft tokens behind the last of them, a row with logits each.
    """

    sequence: Sequence
    start: int
    stop: int
    first_row: int
    tree: Tree | None = None

    num_drafts: int = field(init=False)
    """Rows of draft tokens."""
    num_rows: int = field(init=False)
    """All rows."""
    num_logits: int = field(init=False)
    """Rows of logits."""

    def __post_init__(self) -> None:
        start, stop, first = self.start, self.stop, self.first_row
        self.num_drafts = drafts = 0 if self.tree is None else len(self.tree)
        self.num_rows = stop - start + drafts
        first = first if first > start else start
        self.num_logits = (stop - first if stop > first else 0) + drafts

    @property
    def completes(self) -> bool:
        """Whether the next token can be sampled after this chunk."""
        return self.stop == len(self.sequence.tokens)


@dataclass
class Budget:
    """What is left of a step."""

    tokens: int
    rows: int

    def take(self, chunk: Chunk, sign: int = 1) -> None:
        """Spend what a chunk takes, or with -1 get it back."""
        self.tokens -= sign * chunk.num_rows
        self.rows -= sign * chunk.num_logits


def pack(chunks: list[Chunk]) -> Batch:
    """The batch of a step."""
    tables = [chunk.sequence.table for chunk in chunks]
    block_tables = np.zeros((len(chunks), max(len(t.blocks) for t in tables if t)), np.int32)
    input_ids: list[int] = []
    position_ids: list[int] = []
    logit_rows: list[int] = []
    cu_seqlens = [0]
    for i, (chunk, table) in enumerate(zip(chunks, tables, strict=True)):
        assert table is not None, "a sequence that runs has a block table"
        block_tables[i, : len(table.blocks)] = table.row
        input_ids += chunk.sequence.tokens[chunk.start : chunk.stop]
        position_ids += range(chunk.start, chunk.stop)
        if chunk.tree is not None:
            input_ids += chunk.tree.tokens
            position_ids += (chunk.stop - 1 + depth for depth in chunk.tree.depths)
        cu_seqlens.append(len(input_ids))
        logit_rows += range(len(input_ids) - chunk.num_logits, len(input_ids))
    slots = [chunk.sequence.state_slot for chunk in chunks]
    adapters = [chunk.sequence.request.adapter_number for chunk in chunks]
    return Batch(
        input_ids=np.array(input_ids, np.int32),
        position_ids=np.array(position_ids, np.int32),
        logit_rows=np.array(logit_rows, np.int32),
        cu_seqlens=np.array(cu_seqlens, np.int32),
        num_computed=np.array([chunk.start for chunk in chunks], np.int32),
        block_tables=block_tables,
        tree_mask=tree_mask(chunks),
        state_slots=None if slots[0] is None else np.array(slots, np.int32),
        adapters=np.array(adapters, np.int32) if max(adapters) >= 0 else None,
    )


def tree_mask(chunks: list[Chunk]) -> NDArray[np.uint64] | None:
    """`Batch.tree_mask`; None if all trees are chains."""
    return tree_masks(
        [(chunk.stop - chunk.start, () if chunk.tree is None else chunk.tree.parents) for chunk in chunks]
    )
