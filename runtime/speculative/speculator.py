"""Adds drafts to the steps of the scheduler, and keeps what of them was right."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from llmc.runtime.batch import DraftExecutor, FeatureExecutor
from llmc.runtime.constraints.base import ConstraintError
from llmc.runtime.request import Sequence
from llmc.runtime.speculative.base import Proposer, Query, Tree
from llmc.runtime.speculative.control import Controller
from llmc.runtime.speculative.metrics import Acceptance
from llmc.runtime.speculative.rules import Rule

if TYPE_CHECKING:
    from llmc.runtime.chunk import Budget, Chunk
    from llmc.runtime.constraints.base import TokenConstraint
    from llmc.runtime.kv_cache import KvCache


class Speculator:
    """Between the scheduler and a proposer.

    Drafts only take what a step has left: tokens, rows of logits, and blocks that nobody else needs. They go to
    sequences that decode, and to no other: the last token of a prompt is decoded without.

    Args:
        executor: the one that runs the steps.
        vocab_size: of its model.
        nodes: of a tree at most; default: as many as pay for themselves, at most the proposer's ``default_nodes``.
        context: tokens that a sequence may have; trees do not go beyond.
        rule: when drafts are accepted. If tokens depend on drafts, trees are as large as they can be, so that they
            depend on nothing but the sequence; only where memory or the step is too short for a tree, it is smaller.
        clock: in seconds, for what pays for itself.
    """

    def __init__(
        self,
        proposer: Proposer,
        executor: DraftExecutor,
        *,
        vocab_size: int,
        nodes: int | None = None,
        rule: Rule = Rule.EXACT,
        context: int = 1 << 30,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.acceptance, self.rule = Acceptance(proposer.name, rule=rule), rule
        self._proposer, self._executor, self._vocab_size, self._clock = proposer, executor, vocab_size, clock
        self._context = context
        self._nodes = proposer.default_nodes if nodes is None else nodes
        self._is_fixed = rule is Rule.TYPICAL or (rule is Rule.REJECTION and proposer.draws)
        adapts = nodes is None and not self._is_fixed
        self._controller = Controller(proposer.gains, pairs=proposer.pairs) if adapts else None
        self._step: tuple[list[Chunk], float] = ([], 0.0)
        self._drafts: dict[Sequence, NDArray[np.float32]] = {}
        """Features of the drafts of the last step."""

    @property
    def wants_hidden(self) -> bool:
        """Whether the rows before the head are to be computed."""
        return self._proposer.wants_hidden

    @property
    def ahead(self) -> int:
        """Tokens after a block that what it holds depends on, too."""
        return self._proposer.ahead or 0

    def reserve(self, sequences: int) -> int:
        """Rows of a step that are kept for trees, if so many sequences decode."""
        return self._nodes * sequences if self._is_fixed else 0

    def draft(self, chunks: list[Chunk], budget: Budget, cache: KvCache, *, waiting: int = 0) -> list[Chunk]:
        """The chunks of a step, some with a tree.

        Args:
            chunks: without.
            budget: of a whole step.
            cache: has the blocks.
            waiting: others, for the place of a sequence that ends.
        """
        for chunk in chunks:
            budget.take(chunk)
        queries = self._queries(chunks, budget, waiting)
        if self._proposer.ahead is not None:
            placed = {index: _with_blocks(query, budget, cache) for index, query in queries.items()}
            queries = {index: query for index, query in placed.items() if query is not None}
        begin = self._clock()
        if queries and (tokens := self._proposer.catch_up(list(queries.values()))):
            begin = self._caught_up(tokens, begin)
        trees = self._proposer.propose(list(queries.values())) if queries else []
        chunks = list(chunks)
        for (index, query), tree in zip(queries.items(), trees, strict=True):
            tree.check()
            tree = tree.cut(_room(query, budget, cache), query.depth, self._vocab_size)
            if query.sequence.constraint is not None:
                tree = _allowed(tree, query.sequence.constraint)
            if len(tree):
                chunks[index] = dataclasses.replace(chunks[index], tree=tree)
                budget.tokens -= len(tree)
                budget.rows -= len(tree)
            _resize(query.sequence, chunks[index].stop + len(tree), cache)
        self._step = chunks, self._clock()
        if self._controller is not None and trees:
            self._controller.proposed(max(max(tree.depths, default=0) for tree in trees), self._step[1] - begin)
        return chunks

    def ran(self) -> None:
        """The step with the chunks of the last `draft` has run."""
        chunks, begin = self._step
        if self._controller is not None:
            self._controller.ran(sum(chunk.num_rows for chunk in chunks), self._clock() - begin)
        if self._proposer.wants_features:
            assert isinstance(self._executor, FeatureExecutor), "checked when it was opened"
            features, row, seen = self._executor.features(), 0, []
            for chunk in chunks:
                end = row + chunk.num_rows
                seen.append((chunk.sequence, chunk.start, features[row : end - chunk.num_drafts]))
                if chunk.tree is not None:
                    self._drafts[chunk.sequence] = features[end - chunk.num_drafts : end]
                row = end
            begin = self._clock()
            if tokens := self._proposer.observe(seen):
                seconds = self._clock() - begin
                self.acceptance.read(tokens, seconds)
                if self._controller is not None:
                    self._controller.has_read(seconds)

    def settle(self, sequence: Sequence) -> int:
        """After a step of it: for how many of its tokens the blocks have all that they are to have."""
        return self._proposer.settle(sequence)

    def take(self, chunk: Chunk, path: list[int], rows: NDArray[np.float32] | None) -> None:
        """Keep these nodes of a chunk's tree: those before the token that came last. ``rows``: before the head."""
        sequence = chunk.sequence
        if chunk.tree is not None:
            depths = chunk.tree.depths
            if sequence.finish_reason is not None:  # the token that ends it, and what is behind, needed no draft
                depths = tuple(depth for depth in depths if depth <= len(path))
            deepest = max(depths, default=0)
            self.acceptance.add(len(depths), deepest, len(path))
            if self._controller is not None:
                right = _first_and_second(chunk.tree, path) if self._proposer.pairs else (len(path), None)
                self._controller.learn(sequence, len(depths), deepest, *right)
            moves = [(chunk.stop + node, chunk.stop + place) for place, node in enumerate(path) if node != place]
            if moves:
                assert sequence.table is not None, "a sequence that runs has blocks"
                sources, targets = np.array(moves, np.int32).T.copy()
                self._executor.move_positions(sequence.table.row, sources, targets)
            sequence.num_computed += len(path)
        if (drafts := self._drafts.pop(sequence, None)) is not None and path:
            self._proposer.observe([(sequence, chunk.stop, drafts[path])])
        if rows is not None and self.wants_hidden:
            last = len(rows) - 1 - chunk.num_drafts
            sequence.hidden = rows[[last, *(last + 1 + node for node in path)]]

    def forget(self, sequence: Sequence) -> None:
        """It has ended, or has been preempted."""
        sequence.hidden = None
        self._drafts.pop(sequence, None)
        self._proposer.forget(sequence)
        if self._controller is not None:
            self._controller.forget(sequence)

    def close(self) -> None:
        """Give back what a device holds for the proposer."""
        self._proposer.close()

    def _caught_up(self, tokens: int, begin: float) -> float:
        """The proposer has read so many tokens, which is no part of what making drafts takes; returns the time."""
        now = self._clock()
        self.acceptance.read(tokens, now - begin)
        if self._controller is not None:
            self._controller.caught_up(tokens, now - begin)
        return now

    def _queries(self, chunks: list[Chunk], budget: Budget, waiting: int) -> dict[int, Query]:
        """What the proposer is asked, by the number of the chunk."""
        depths = {
            index: depth
            for index, chunk in enumerate(chunks)
            if (chunk.sequence.hidden is not None or not self.wants_hidden)
            and (chunk.sequence.num_generated or not self._is_fixed)  # wherever its prompt was divided
            and (depth := _depth(chunk)) > 0
        }
        share = min(budget.tokens, budget.rows) // max(1, len(depths))
        nodes, pairs = [min(self._nodes, share)] * len(depths), [0] * len(depths)
        if self._controller is not None:
            rows = sum(chunk.num_rows for chunk in chunks)
            sequences = [chunks[index].sequence for index in depths]
            behind = [self._proposer.behind(sequence) for sequence in sequences]
            nodes = self._controller.sizes(sequences, nodes, rows, behind, waiting=waiting)
            pairs = self._controller.pairs
        nodes = [min(n, self._context - chunks[i].stop) for i, n in zip(depths, nodes, strict=True)]
        queries: dict[int, Query] = {}
        for (index, depth), count, beside in zip(depths.items(), nodes, pairs, strict=True):
            if count > 0:
                sequence = chunks[index].sequence
                queries[index] = Query(sequence, count, depth, sequence.hidden, min(beside, count // 2))
        return queries


def _depth(chunk: Chunk) -> int:
    """Drafts that the sequence can take at most, of which each and one more is a token of the model; 0: none."""
    sequence, request = chunk.sequence, chunk.sequence.request
    if request.pool is not None or not chunk.completes or chunk.stop - chunk.start > 1 or sequence.scored is not None:
        return 0
    return request.max_tokens - sequence.num_generated - 1


def _first_and_second(tree: Tree, path: list[int]) -> tuple[int, bool | None]:
    """First guesses of a chain that were right; whether the one beside the next was, or None if there was none."""
    last = -1
    for count, node in enumerate(path):
        if node != tree.children[last][0]:
            return count, True
        last = node
    return len(path), False if len(tree.children.get(last, ())) > 1 else None


def _room(query: Query, budget: Budget, cache: KvCache) -> int:
    """Nodes for which there is room."""
    sequence = query.sequence
    assert sequence.table is not None, "a sequence that runs has blocks"
    blocks = len(sequence.table.blocks) + cache.num_available
    return min(query.nodes, budget.tokens, budget.rows, blocks * cache.block_size - len(sequence.tokens))


def _with_blocks(query: Query, budget: Budget, cache: KvCache) -> Query | None:
    """With the blocks for its tree, of no more nodes than there is room for; None if there is none."""
    query = dataclasses.replace(query, nodes=_room(query, budget, cache))
    if query.nodes < 1:
        return None
    _resize(query.sequence, len(query.sequence.tokens) + query.nodes, cache)
    return query


def _resize(sequence: Sequence, positions: int, cache: KvCache) -> None:
    """As many blocks as these positions take."""
    assert sequence.table is not None, "a sequence that runs has blocks"
    wanted = cache.blocks_for(positions)
    if (missing := wanted - len(sequence.table.blocks)) > 0:
        sequence.table.extend(cache.allocate(missing))
    elif missing < 0:
        cache.release(sequence.table.cut(wanted))


def _allowed(tree: Tree, constraint: TokenConstraint) -> Tree:
    """The tree without what the constraint of its sequence rules out.

    Drafts that were drawn stay, but nothing stays below them: that they were drawn counts when others are accepted.
    """
    kept = [False] * len(tree)

    def walk(parent: int, state: TokenConstraint) -> None:
        mask = state.mask()
        for node in tree.children.get(parent, ()):
            token = tree.tokens[node]
            if mask is None or (token < 32 * len(mask) and mask[token // 32] >> (token % 32) & 1):
                kept[node] = True
                if node in tree.children:
                    below = state.clone()
                    below.accept(token)
                    if not below.is_finished:
                        walk(node, below)
            elif tree.probabilities is not None:
                kept[node] = True

    try:
        walk(-1, constraint.clone())
    except ConstraintError:
        return Tree()  # which the sampler meets, too, and reports
    return tree.keep(kept)
