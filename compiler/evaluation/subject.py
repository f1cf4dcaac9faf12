"""What is evaluated: something that gives logits for windows of tokens, and continues prompts. Here: an engine."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from llmc.errors import UsageError
from llmc.runtime.batch import Batch
from llmc.runtime.devices import make_executor
from llmc.runtime.engine import Engine
from llmc.runtime.llm import LLM
from llmc.runtime.request import SamplingParams
from llmc.runtime.scheduler import SchedulerConfig
from llmc.runtime.tokenizer import Tokenizer, tokenizer_of

LOGIT_BYTES = 32 << 20
"""Of the logits that a subject holds at once; a single row may be larger."""

SEQUENCES = 8
"""Prompts that an engine continues at one time at most."""


class Subject(Protocol):
    """A model in any form."""

    name: str
    vocab_size: int
    max_rows: int
    """Rows that ``logits`` may be asked for at once."""

    def begin(self, ids: Sequence[int]) -> None:
        """Start a window."""
        ...

    def logits(self, start: int, stop: int) -> NDArray[np.float32]:
        """Those after the tokens ``start`` to ``stop`` of the window, [stop - start, vocabulary].

        Called in ascending order, without gaps. The array is valid until the next call.
        """
        ...

    def generate(self, prompts: Sequence[Sequence[int]], tokens: int, ends: Collection[int]) -> list[list[int]]:
        """Continue each prompt greedily by at most so many tokens; one of ``ends`` is the last one."""
        ...


class EngineSubject:
    """An engine, run by the runtime.

    Args:
        engine: a loaded engine.
        context: tokens of a window, or of a prompt and its continuation; the KV cache is made for these.
        threads, isa: as in `llmc.LLM`.

    Raises:
        UsageError: the engine was built for shorter sequences.
    """

    def __init__(self, engine: Engine, context: int, threads: int | None = None, isa: str | None = None) -> None:
        limits, block_size = engine.limits, engine.kv_cache.block_size
        if context > limits.max_seq_len:
            raise UsageError(
                f"{engine.path}: built for sequences of {limits.max_seq_len} tokens, but {context} are needed; use a "
                "smaller --context (and fewer --tokens), or build it with a larger --max-seq-len"
            )
        self.name = str(engine.path)
        self.engine = engine
        self.vocab_size = engine.model.vocab_size
        self.max_rows = rows_at_once(self.vocab_size, limits.max_batch_tokens)
        self._context, blocks = context, -(-context // block_size)
        self._sequences = min(SEQUENCES, limits.max_sequences)
        self._num_blocks = blocks * self._sequences
        self._executor = make_executor(engine, num_blocks=self._num_blocks, threads=threads, isa=isa)
        self._blocks = np.arange(blocks, dtype=np.int32)[None]
        self._ids: NDArray[np.int32] = np.empty(0, np.int32)

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The engine's tokenizer."""
        return tokenizer_of(self.engine)

    def begin(self, ids: Sequence[int]) -> None:
        """Start a window; the cache is written anew."""
        self._ids = np.array(ids, np.int32)

    def logits(self, start: int, stop: int) -> NDArray[np.float32]:
        """See Subject: one chunk of the prefill."""
        count = stop - start
        batch = Batch(
            input_ids=self._ids[start:stop],
            position_ids=np.arange(start, stop, dtype=np.int32),
            logit_rows=np.arange(count, dtype=np.int32),
            cu_seqlens=np.array([0, count], np.int32),
            num_computed=np.array([start], np.int32),
            block_tables=self._blocks,
        )
        return self._executor.step(batch)

    def generate(self, prompts: Sequence[Sequence[int]], tokens: int, ends: Collection[int]) -> list[list[int]]:
        """See Subject: all prompts in flight."""
        config = SchedulerConfig(
            max_seq_len=self._context,
            max_batch_tokens=self.engine.limits.max_batch_tokens,
            max_sequences=self._sequences,
            max_logit_rows=self._sequences,
            num_blocks=self._num_blocks,
            block_size=self.engine.kv_cache.block_size,
        )
        llm = LLM.from_parts(self._executor, config, vocab_size=self.vocab_size, eos_token_ids=ends)
        results = llm.generate([list(p) for p in prompts], SamplingParams(max_tokens=tokens))
        return [list(result.token_ids) for result in results]


def rows_at_once(vocabulary: int, limit: int) -> int:
    """Rows of logits within LOGIT_BYTES; a multiple of 16 if possible, as matrix products like them."""
    rows = max(1, min(limit, LOGIT_BYTES // (4 * vocabulary)))
    return rows - rows % 16 if rows > 16 else rows
