"""In-flight batching: which rows of which sequences run in the next step, and who gets the blocks of the KV cache."""

from __future__ import annotations

import math
import time
from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from llmc.errors import RequestError
from llmc.runtime.batch import Chosen, EmbeddingExecutor, Executor, GreedyExecutor, SamplingExecutor
from llmc.runtime.chunk import Budget, Chunk, pack
from llmc.runtime.device_draws import draws_of, greedy_rows
from llmc.runtime.kv_cache import BlockTable, KvCache, StatePool
from llmc.runtime.outcome import Outcome
from llmc.runtime.prefix_cache import PrefixCache
from llmc.runtime.request import FinishReason, Request, Sequence
from llmc.runtime.sampling import Sampler
from llmc.runtime.speculative.rules import Rule
from llmc.runtime.speculative.speculator import Speculator

Rows = NDArray[np.float32] | None
TIMEOUT = "timeout"

LONG_SHARE = 0.75
"""Of the tokens that decodes leave: what a prompt takes at most that does not fit the step, if others want the rest."""


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
    prefix_cache: bool = True
    """Blocks that were computed are found again by what they hold; not with recurrent state."""
    check: bool = False
    """Recount all blocks after every step instead of when idle."""

    @property
    def context(self) -> int:
        """Tokens that a sequence can have: the smaller of the engine's limit and the KV cache."""
        return min(self.max_seq_len, self.num_blocks * self.block_size)


@dataclass
class Statistics:
    """Counted so far. Prompts that began had ``prefix_queries`` tokens, of which ``prefix_hits`` were found.

    ``tokens`` were computed; ``accepted`` more were drafts, of ``drafted`` ones of use, that the model wanted, too.
    """

    steps: int = 0
    tokens: int = 0
    preemptions: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    failed_steps: int = 0
    drafted: int = 0
    accepted: int = 0


class Scheduler:
    """Runs requests, many at a time, one `step` after the other.

    Oldest first (a better priority goes before so many older requests, `request.OVERTAKEN`). Running decodes go first,
    then the chunks of prompts that fit the token budget, then new sequences whose blocks are free. A sequence that
    needs a block takes it from the youngest one, which is computed again later (same tokens: sampling depends on
    positions only); the youngest one itself waits. Hence, counted in steps:

    - a sequence whose prompt is done gets a token in every step, but for those after it was preempted;
    - the oldest prompt gets LONG_SHARE of the tokens that decodes leave, or all if nobody wants the rest;
    - a prompt that fits the rest of the step is done in it: a long one ahead of it never takes more than its share;
    - a request waits for no more than OVERTAKEN later ones for each level of priority.

    Args:
        executor, sampler: what computes and what chooses.
        config: sizes.
        model: a digest of the engine, for the names of blocks.
        clock: for deadlines.
        speculator: drafts tokens, for what steps have room left; changes no result.
    """

    def __init__(
        self,
        executor: Executor,
        sampler: Sampler,
        config: SchedulerConfig,
        *,
        model: str = "",
        clock: Callable[[], float] = time.monotonic,
        speculator: Speculator | None = None,
    ) -> None:
        self.config, self.statistics = config, Statistics()
        self.kv_cache = KvCache(config.num_blocks, config.block_size)
        self.states = StatePool(config.max_sequences) if config.has_state else None
        ahead = 0 if speculator is None else speculator.ahead
        finds = config.prefix_cache and not config.has_state
        self.prefixes = PrefixCache(self.kv_cache, model, ahead=ahead) if finds else None
        self.running: list[Sequence] = []
        self.waiting: list[Sequence] = []
        self.speculator = speculator
        self._executor, self._clock = executor, clock
        self._device = executor if isinstance(executor, SamplingExecutor) else None
        self._greedy = executor if isinstance(executor, GreedyExecutor) else None
        self._sampler, self._outcome = sampler, Outcome(sampler, speculator)
        self._has_deadlines = False

    @property
    def has_work(self) -> bool:
        """Whether another step would do something."""
        return bool(self.running or self.waiting)

    def add(self, request: Request) -> None:
        """Queue a request. Sequences that have nothing to compute, or no time for it, end at once.

        Raises:
            RequestError: the context can never hold it.
        """
        self._check_fits(request)
        request.max_tokens = min(request.max_tokens, self.config.context - len(request.prompt))
        nothing = request.max_tokens == 0 and request.pool is None
        late = request.deadline is not None and request.deadline <= self._clock()
        for sequence in request.sequences:
            if late:
                sequence.finish(FinishReason.TIMEOUT, error=TIMEOUT)
            elif nothing and (request.params.prompt_logprobs is None or sequence.choice > 0):
                sequence.finish(FinishReason.LENGTH)  # nothing to compute
            else:
                insort(self.waiting, sequence, key=_order)
        self._has_deadlines |= request.deadline is not None

    def abort(self, request: Request) -> None:
        """End a request at any moment; what it holds is free at once."""
        for sequence in request.sequences:
            if sequence.finish_reason is None:
                self._remove(sequence)
                sequence.finish(FinishReason.ABORT)

    def step(self) -> list[Sequence]:
        """Run one batch; returns the sequences that have got a token or have ended."""
        expired = self._expire()
        chunks = self._schedule()
        if not chunks:
            return expired
        try:
            if self.speculator is not None:
                budget = Budget(self.config.max_batch_tokens, self.config.max_logit_rows)
                chunks = self.speculator.draft(chunks, budget, self.kv_cache, waiting=len(self.waiting))
            rows, logits, chosen = self._compute(chunks)
            if self.speculator is not None:
                self.speculator.ran()
        except Exception as problem:  # a failed step fails only its own requests
            return expired + self._fail(chunks, problem)
        touched = self._take(chunks, rows, logits, chosen)
        self._check()
        return expired + touched

    # -- which rows -------------------------------------------------------------------------------------------------

    def _schedule(self) -> list[Chunk]:
        """The chunks of the next step."""
        preemptions = self.statistics.preemptions
        kept = 0 if self.speculator is None else self.speculator.reserve(len(self.running))
        budget = Budget(max(1, self.config.max_batch_tokens - kept), max(1, self.config.max_logit_rows - kept))
        chunks: dict[Sequence, Chunk] = {}
        for sequence in sorted(self.running, key=lambda s: len(s.tokens) - s.num_computed > 1):  # which are in order
            if sequence.table is not None:  # else preempted a moment ago
                self._add_chunk(sequence, budget, chunks, share=LONG_SHARE)
        if self.statistics.preemptions == preemptions:
            self._admit_waiting(budget, chunks)
        for sequence, chunk in list(chunks.items()):  # what nobody else wanted
            if not chunk.completes and budget.tokens > 0:
                del chunks[sequence]
                budget.take(chunk, -1)
                self._add_chunk(sequence, budget, chunks)
        return list(chunks.values())

    def _add_chunk(self, sequence: Sequence, budget: Budget, chunks: dict[Sequence, Chunk], share: float = 1.0) -> None:
        """Give a running sequence as many rows as tokens, logit rows and blocks allow; maybe none."""
        start, first_row = sequence.num_computed, sequence.first_row
        tokens = budget.tokens
        if len(sequence.tokens) - start > tokens:
            tokens = math.ceil(tokens * share)
        stop = min(len(sequence.tokens), start + tokens, max(start, first_row) + budget.rows)
        stop = self._reserve(sequence, stop, budget, chunks)
        if stop > start:
            chunks[sequence] = Chunk(sequence, start, stop, first_row)
            budget.take(chunks[sequence])

    def _reserve(self, sequence: Sequence, stop: int, budget: Budget, chunks: dict[Sequence, Chunk]) -> int:
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

    def _admit_waiting(self, budget: Budget, chunks: dict[Sequence, Chunk]) -> None:
        """Let the oldest waiting sequences in, as long as there is room for each and its next token (or it bounces)."""
        pending: set[bytes] = set()
        if self.prefixes is not None and self.waiting:
            for chunk in chunks.values():
                pending |= self.prefixes.keys(chunk.sequence, chunk.start, chunk.stop)
        for sequence in self.waiting[: self.config.max_sequences]:
            if budget.tokens <= 0 or budget.rows <= 0 or len(self.running) >= self.config.max_sequences:
                break
            shared = self._shareable(sequence)
            if self._waits(sequence, len(shared), pending):
                continue  # a step later it can share what is computed now
            needed = self.kv_cache.blocks_for(min(len(sequence.tokens) + 1, self.config.context))
            if not self.kv_cache.can_share(shared, needed):
                break  # nobody overtakes for want of memory
            self._admit(sequence, shared)
            self._add_chunk(sequence, budget, chunks, share=LONG_SHARE)
            if self.prefixes is not None and (added := chunks.get(sequence)) is not None:
                pending |= self.prefixes.keys(sequence, added.start, added.stop)

    def _waits(self, sequence: Sequence, shared: int, pending: set[bytes]) -> bool:
        leader = sequence.request.sequences[0]
        if leader is not sequence and leader in self.running and leader.num_computed < sequence.num_prompt:
            return True  # its prompt is being computed: share that
        return self.prefixes is not None and self.prefixes.waits(sequence, shared, sequence.first_row, pending)

    def _admit(self, sequence: Sequence, shared: list[int]) -> None:
        """Move it to the running ones, with blocks for all tokens that it has."""
        self.kv_cache.share(shared)
        sequence.table = BlockTable()
        sequence.table.extend(shared)
        sequence.table.extend(self.kv_cache.allocate(self.kv_cache.blocks_for(len(sequence.tokens)) - len(shared)))
        sequence.num_named, sequence.num_computed = len(shared), len(shared) * self.config.block_size
        if sequence.request.num_cached_tokens is None:
            sequence.request.num_cached_tokens = sequence.num_computed
            self.statistics.prefix_hits += sequence.num_computed
            self.statistics.prefix_queries += sequence.num_prompt
        if self.states is not None:
            sequence.state_slot = self.states.acquire()
        self.waiting.remove(sequence)
        insort(self.running, sequence, key=_order)

    def _shareable(self, sequence: Sequence) -> list[int]:
        """Full blocks, before the first row that is needed, that hold the beginning of a sequence.

        Without a prefix cache: those that the first choice of a request shares with the others.
        """
        if self.prefixes is not None:
            return self.prefixes.find(sequence, sequence.first_row)
        leader = sequence.request.sequences[0]
        if leader is sequence or leader.table is None or self.states is not None:
            return []
        length = min(leader.num_computed, sequence.num_prompt - 1)
        return leader.table.blocks[: length // self.config.block_size]

    def _check_fits(self, request: Request) -> None:
        length, context = len(request.prompt), self.config.context
        if not request.prompt:
            raise RequestError("the prompt has no tokens", "prompt")
        if request.pool is not None:
            if length > context:
                raise RequestError(f"{length} tokens do not fit the context of {context} tokens", "prompt")
        elif length + 1 > context:
            raise RequestError(
                f"{length} tokens and one to generate do not fit the context of {context} tokens", "prompt"
            )
        if length + request.params.min_tokens > context:
            raise RequestError(
                f"{length} tokens of prompt and {request.params.min_tokens} to generate at least do not fit the "
                f"context of {context} tokens",
                "min_tokens",
            )

    def _expire(self) -> list[Sequence]:
        """End what has passed its deadline."""
        if not self._has_deadlines:
            return []
        now = self._clock()
        deadlines = [(s.request.deadline, s) for s in (*self.running, *self.waiting) if s.request.deadline is not None]
        self._has_deadlines = bool(deadlines)
        expired = [sequence for deadline, sequence in deadlines if deadline <= now]
        for sequence in expired:
            self._remove(sequence)
            sequence.finish(FinishReason.TIMEOUT, error=TIMEOUT)
        return expired

    def _remove(self, sequence: Sequence) -> None:
        """From wherever it is: an exception (Ctrl-C) may have come while it was moved."""
        if sequence.table is not None:
            self._free(sequence)
        for queue in (self.running, self.waiting):
            if sequence in queue:
                queue.remove(sequence)

    def _free(self, sequence: Sequence) -> None:
        assert sequence.table is not None, "only running sequences hold blocks"
        if self.speculator is not None:
            self.speculator.forget(sequence)
        self.kv_cache.release(sequence.table.blocks)
        if self.states is not None and sequence.state_slot is not None:
            self.states.release(sequence.state_slot)
        sequence.table, sequence.state_slot, sequence.num_computed = None, None, 0

    # -- what comes out -----------------------------------------------------------------------------------------------

    def _compute(self, chunks: list[Chunk]) -> tuple[Rows, Rows, Chosen | None]:
        """Rows before the head, logits [N, vocabulary], as far as somebody needs them, and tokens instead of these."""
        batch = pack(chunks)
        pooled = [chunk.sequence.request.pool is not None for chunk in chunks if chunk.num_logits]
        hidden = bool(pooled) and self.speculator is not None and self.speculator.wants_hidden
        exact = self.speculator is None or self.speculator.rule is Rule.EXACT
        if (device := self._device) is not None and not any(pooled):
            most, sampler = (device.most_changes, device.most_masks), self._sampler
            make = partial(draws_of, chunks, device.vocab_size, most, sampler, exact=exact)
            return device.choose(batch, make, hidden=hidden)
        if not (any(pooled) or hidden):
            if self._greedy is not None and any(wanted := greedy_rows(chunks, exact=exact)):
                logits, tokens, scores = self._greedy.step_greedily(batch)
                return None, logits, Chosen(wanted, tokens, scores)
            return None, self._executor.step(batch), None
        assert isinstance(self._executor, EmbeddingExecutor), "checked when the request came"
        return *self._executor.embed(batch, logits=not all(pooled)), None

    def _take(self, chunks: list[Chunk], rows: Rows, logits: Rows, chosen: Chosen | None) -> list[Sequence]:
        """Record what was computed, sample, and let go of the sequences that end."""
        self.statistics.steps += 1
        touched, row = [], 0
        for chunk in chunks:
            sequence, first = chunk.sequence, row
            row += chunk.num_logits
            self.statistics.tokens += chunk.stop - chunk.start
            sequence.num_computed = chunk.stop
            if chunk.completes:
                touched.append(sequence)
            try:
                self._outcome.take(chunk, rows, logits, first, chosen)
                kept = sequence.num_computed if self.speculator is None else self.speculator.settle(sequence)
            except Exception as problem:  # of this sequence, not of its neighbours
                sequence.finish(FinishReason.ERROR, error=f"{type(problem).__name__}: {problem}")
            if sequence.finish_reason is FinishReason.ERROR:
                self._forget(sequence)  # whatever is wrong with it
                if sequence not in touched:
                    touched.append(sequence)
            elif self.prefixes is not None:
                self.prefixes.store(sequence, kept)
            if chunk.tree is not None and sequence.table is not None:
                self.kv_cache.release(sequence.table.cut(self.kv_cache.blocks_for(sequence.num_computed)))
            if sequence.finish_reason is not None:
                self._remove(sequence)
        if self.speculator is not None:
            self.statistics.drafted, self.statistics.accepted = self.speculator.acceptance.counts
        return touched

    def _fail(self, chunks: list[Chunk], problem: Exception) -> list[Sequence]:
        """What the step has written is not known, so nothing of it can be found again."""
        self.statistics.failed_steps += 1
        failed = [chunk.sequence for chunk in chunks]
        for sequence in failed:
            self._forget(sequence)
            self._remove(sequence)
            sequence.finish(FinishReason.ERROR, error=f"{type(problem).__name__}: {problem}")
        return failed

    def _forget(self, sequence: Sequence) -> None:
        if sequence.table is not None:
            self.kv_cache.forget(sequence.table.blocks)

    def _check(self) -> None:
        if self.config.check or not self.running:
            self.kv_cache.check([sequence.table.blocks for sequence in self.running if sequence.table is not None])


def _order(sequence: Sequence) -> tuple[int, int, int]:
    return sequence.order
