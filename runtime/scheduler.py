"""In-flight batching: which rows of which sequences run in the next step, and who gets the blocks of the KV cache."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from llmc.errors import RequestError
from llmc.runtime.batch import Batch, Executor
from llmc.runtime.kv_cache import BlockTable, KvCache, StatePool
from llmc.runtime.request import FinishReason, Request, Sequence
from llmc.runtime.sampling import Sampler


@dataclass(frozen=True)
class SchedulerConfig:
    """Sizes. Rows are tokens of one step (`max_batch_tokens`) and logits of one step (`max_logit_rows`)."""

    max_seq_len: int
    max_batch_tokens: int
    max_sequences: int
    max_logit_rows: int
    num_blocks: int
    block_size: int = 16
    has_state: bool = False
    check: bool = False
    """Recount all blocks after every step instead of when idle."""

    @property
    def context(self) -> int:
        """Tokens that a sequence can have: the smaller of the engine's limit and the KV cache."""
        return min(self.max_seq_len, self.num_blocks * self.block_size)


@dataclass(frozen=True)
class Chunk:
    """The rows of one sequence in a step: tokens ``start`` to ``stop``; logits are needed from ``first_logits`` on.

    ``scores``: the logits are (also) for the log-probabilities of the prompt.
    """

    sequence: Sequence
    start: int
    stop: int
    first_logits: int
    scores: bool

    @property
    def num_logits(self) -> int:
        """Rows of logits."""
        return max(0, self.stop - max(self.start, self.first_logits))

    @property
    def completes(self) -> bool:
        """Whether the next token can be sampled after this chunk."""
        return self.stop == len(self.sequence.tokens)


@dataclass
class _Budget:
    """What is left of a step."""

    tokens: int
    rows: int

    def take(self, chunk: Chunk, sign: int = 1) -> None:
        self.tokens -= sign * (chunk.stop - chunk.start)
        self.rows -= sign * chunk.num_logits


@dataclass
class Statistics:
    """Counted since the start."""

    steps: int = 0
    tokens: int = 0
    preemptions: int = 0


class Scheduler:
    """Runs requests, many at a time, one `step` after the other.

    Oldest first (by priority, then arrival). Running decodes go first, then the chunks of prompts that fit the token
    budget, then new sequences whose blocks are free. A sequence that needs a block takes it from the youngest one,
    which is computed again later (same tokens: sampling depends on positions only); the youngest one itself waits.
    """

    def __init__(self, executor: Executor, sampler: Sampler, config: SchedulerConfig) -> None:
        self.config, self.statistics = config, Statistics()
        self.kv_cache = KvCache(config.num_blocks, config.block_size)
        self.states = StatePool(config.max_sequences) if config.has_state else None
        self.running: list[Sequence] = []
        self.waiting: list[Sequence] = []
        self._executor, self._sampler = executor, sampler

    @property
    def has_work(self) -> bool:
        """Whether another step would do something."""
        return bool(self.running or self.waiting)

    def add(self, request: Request) -> None:
        """Queue a request. Sequences that have nothing to compute end at once.

        Raises:
            RequestError: the context can never hold it.
        """
        length, context = len(request.prompt), self.config.context
        if not request.prompt:
            raise RequestError("the prompt has no tokens", "prompt")
        if length + 1 > context:
            raise RequestError(
                f"{length} tokens and one to generate do not fit the context of {context} tokens", "prompt"
            )
        if length + request.params.min_tokens > context:
            raise RequestError(
                f"{length} tokens of prompt and {request.params.min_tokens} to generate at least do not fit the "
                f"context of {context} tokens",
                "min_tokens",
            )
        request.max_tokens = min(request.max_tokens, context - length)
        for sequence in request.sequences:
            if request.max_tokens == 0 and (request.params.prompt_logprobs is None or sequence.choice > 0):
                sequence.finish(FinishReason.LENGTH)  # nothing to compute
            else:
                insort(self.waiting, sequence, key=_order)

    def abort(self, request: Request) -> None:
        """End a request at any moment; what it holds is free at once."""
        for sequence in request.sequences:
            if sequence.finish_reason is None:
                self._remove(sequence)
                sequence.finish(FinishReason.ABORT)

    def step(self) -> list[Sequence]:
        """Run one batch; returns the sequences that have got a token or have ended."""
        chunks = self._schedule()
        if not chunks:
            return []
        try:
            logits = self._executor.step(pack(chunks))
        except Exception as problem:  # a failed step fails only its own requests
            return self._fail(chunks, problem)
        touched = self._take(chunks, logits)
        self._check()
        return touched

    # -- which rows -------------------------------------------------------------------------------------------------

    def _schedule(self) -> list[Chunk]:
        """The chunks of the next step."""
        preemptions = self.statistics.preemptions
        budget = _Budget(self.config.max_batch_tokens, self.config.max_logit_rows)
        chunks: dict[Sequence, Chunk] = {}
        decodes_first = sorted(self.running, key=lambda s: (len(s.tokens) - s.num_computed > 1, s.order))
        for sequence in decodes_first:
            if sequence.table is not None:  # else preempted a moment ago
                self._add_chunk(sequence, budget, chunks)
        if self.statistics.preemptions == preemptions:
            while (candidate := self._next_to_admit()) is not None and budget.tokens > 0 and budget.rows > 0:
                self._admit(candidate)
                self._add_chunk(candidate, budget, chunks)
        return list(chunks.values())

    def _add_chunk(self, sequence: Sequence, budget: _Budget, chunks: dict[Sequence, Chunk]) -> None:
        """Give a running sequence as many rows as tokens, logit rows and blocks allow; maybe none."""
        start, scored = sequence.num_computed, len(sequence.request.prompt_logprobs)
        scores = sequence.choice == 0 and 0 < scored < sequence.num_prompt
        first_logits = scored - 1 if scores else len(sequence.tokens) - 1
        stop = min(len(sequence.tokens), start + budget.tokens, max(start, first_logits) + budget.rows)
        stop = self._reserve(sequence, stop, budget, chunks)
        if stop > start:
            chunks[sequence] = Chunk(sequence, start, stop, first_logits, scores)
            budget.take(chunks[sequence])

    def _reserve(self, sequence: Sequence, stop: int, budget: _Budget, chunks: dict[Sequence, Chunk]) -> int:
        """Get the blocks for tokens up to ``stop``, from younger sequences if need be; returns the stop they allow."""
        assert sequence.table is not None, "only running sequences grow"
        missing = self.kv_cache.blocks_for(stop) - len(sequence.table.blocks)
        while missing > self.kv_cache.num_available:
            youngest = max(self.running, key=_order)
            if youngest is sequence:  # keeps what it has, and waits for older ones to end
                missing = self.kv_cache.num_available
                break
            if (chunk := chunks.pop(youngest, None)) is not None:
                budget.take(chunk, -1)
            self._preempt(youngest)
        if missing > 0:
            sequence.table.extend(self.kv_cache.allocate(missing))
        return min(stop, len(sequence.table.blocks) * self.config.block_size)

    def _preempt(self, sequence: Sequence) -> None:
        self._free(sequence)
        self.running.remove(sequence)
        insort(self.waiting, sequence, key=_order)
        self.statistics.preemptions += 1

    # -- who comes in and goes ----------------------------------------------------------------------------------------

    def _next_to_admit(self) -> Sequence | None:
        """The oldest waiting sequence, if there is room for it and for its next token (else it would bounce)."""
        if not self.waiting or len(self.running) >= self.config.max_sequences:
            return None
        sequence = self.waiting[0]
        leader = sequence.request.sequences[0]
        if leader is not sequence and leader in self.running and leader.num_computed < sequence.num_prompt:
            return None  # its prompt is being computed: share that
        needed = self.kv_cache.blocks_for(min(len(sequence.tokens) + 1, self.config.context))
        return sequence if needed - len(self._shareable(sequence)) <= self.kv_cache.num_available else None

    def _admit(self, sequence: Sequence) -> None:
        """Move it to the running ones, with blocks for all tokens that it has."""
        shared = self._shareable(sequence)
        self.kv_cache.share(shared)
        sequence.table = BlockTable()
        sequence.table.extend(shared)
        sequence.table.extend(self.kv_cache.allocate(self.kv_cache.blocks_for(len(sequence.tokens)) - len(shared)))
        sequence.num_computed = len(shared) * self.config.block_size
        if self.states is not None:
            sequence.state_slot = self.states.acquire()
        self.waiting.remove(sequence)
        insort(self.running, sequence, key=_order)

    def _shareable(self, sequence: Sequence) -> list[int]:
        """Blocks that the first choice of a request shares with the others: full ones, before the last prompt token."""
        leader = sequence.request.sequences[0]
        if leader is sequence or leader.table is None or self.states is not None:
            return []
        length = min(leader.num_computed, sequence.num_prompt - 1)
        return leader.table.blocks[: length // self.config.block_size]

    def _remove(self, sequence: Sequence) -> None:
        """From wherever it is: an exception (Ctrl-C) may have come while it was moved."""
        if sequence.table is not None:
            self._free(sequence)
        for queue in (self.running, self.waiting):
            if sequence in queue:
                queue.remove(sequence)

    def _free(self, sequence: Sequence) -> None:
        assert sequence.table is not None, "only running sequences hold blocks"
        self.kv_cache.release(sequence.table.blocks)
        if self.states is not None and sequence.state_slot is not None:
            self.states.release(sequence.state_slot)
        sequence.table, sequence.state_slot, sequence.num_computed = None, None, 0

    # -- what comes out -----------------------------------------------------------------------------------------------

    def _take(self, chunks: list[Chunk], logits: NDArray[np.float32]) -> list[Sequence]:
        """Record what was computed, sample, and let go of the sequences that end."""
        self.statistics.steps += 1
        rows, touched, row = [], [], 0
        for chunk in chunks:
            sequence, count = chunk.sequence, chunk.num_logits
            self.statistics.tokens += chunk.stop - chunk.start
            sequence.num_computed = chunk.stop
            if chunk.scores:
                self._sampler.score_prompt(sequence, chunk.stop - count, logits[row : row + count])
            row += count
            if chunk.completes:
                rows.append(row - 1)
                touched.append(sequence)
        for sequence, sampled in zip(touched, self._sampler.sample(logits, rows, touched), strict=True):
            if sampled.error is not None:
                sequence.finish(FinishReason.ERROR, error=sampled.error)
            elif sequence.request.max_tokens == 0:
                sequence.finish(FinishReason.LENGTH)
            else:
                sequence.append(sampled.token, sampled.logprob)
            if sequence.finish_reason is not None:
                self._remove(sequence)
        return touched

    def _fail(self, chunks: list[Chunk], problem: Exception) -> list[Sequence]:
        failed = [chunk.sequence for chunk in chunks]
        for sequence in failed:
            self._remove(sequence)
            sequence.finish(FinishReason.ERROR, error=f"{type(problem).__name__}: {problem}")
        return failed

    def _check(self) -> None:
        if self.config.check or not self.running:
            self.kv_cache.check(list(self._tables()))

    def _tables(self) -> Iterator[list[int]]:
        for sequence in self.running:
            assert sequence.table is not None, "a running sequence has a block table"
            yield sequence.table.blocks


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
        cu_seqlens.append(len(input_ids))
        logit_rows += range(len(input_ids) - chunk.num_logits, len(input_ids))
    slots = [chunk.sequence.state_slot for chunk in chunks]
    return Batch(
        input_ids=np.array(input_ids, np.int32),
        position_ids=np.array(position_ids, np.int32),
        logit_rows=np.array(logit_rows, np.int32),
        cu_seqlens=np.array(cu_seqlens, np.int32),
        num_computed=np.array([chunk.start for chunk in chunks], np.int32),
        block_tables=block_tables,
        state_slots=None if slots[0] is None else np.array(slots, np.int32),
    )


def _order(sequence: Sequence) -> tuple[int, int, int]:
    return sequence.order
