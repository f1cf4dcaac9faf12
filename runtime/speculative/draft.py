"""Proposes what a smaller engine with the same tokens would say."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from llmc.errors import UsageError
from llmc.runtime import strict
from llmc.runtime.batch import Batch, Closeable, Executor
from llmc.runtime.engine import Engine, load_engine
from llmc.runtime.kv_cache import BlockTable, KvCache
from llmc.runtime.request import Sequence
from llmc.runtime.speculative.base import Proposer, Query, Setting, Tree
from llmc.runtime.speculative.draft_path import DraftPath

AT_ONCE = 8
"""Tokens of a sequence that are computed with its first draft; more are read before."""


@dataclass(eq=False)
class _State:
    """What the draft engine's cache holds of a sequence, drafts that were wrong included."""

    table: BlockTable = field(default_factory=BlockTable)
    tokens: list[int] = field(default_factory=list)
    verified: int = 0
    """Of them: those that are the sequence's for sure."""


@dataclass(eq=False)
class _Path(DraftPath):
    """One query's, and what the draft engine has of its sequence."""

    state: _State = field(default_factory=_State)

    def rest(self) -> list[int]:
        """Tokens that are still to be computed, at least one."""
        known, done = self.query.sequence.tokens, len(self.state.tokens)
        return known[done:] + self.drafts[max(0, done - len(known)) :]


class DraftProposer(Proposer):
    """Runs a draft engine, all sequences at once, token by token; with the random numbers of the sequence itself.

    Its KV cache has room for as many positions as the target's. A sequence for which there is none gets no drafts.
    """

    name = "draft"
    default_nodes = 5
    pairs = True
    draws = True

    def __init__(
        self,
        executor: Executor,
        cache: KvCache,
        *,
        max_seq_len: int,
        max_batch_tokens: int,
        vocab_size: int,
        draws: bool = False,
    ) -> None:
        self._executor, self._cache = executor, cache
        self._vocab_size, self._draws = vocab_size, draws
        self._max_seq_len, self._max_batch_tokens = max_seq_len, max_batch_tokens
        self._states: dict[Sequence, _State] = {}

    @classmethod
    def open(cls, argument: str, setting: Setting) -> Self:
        """``argument``: directory of the draft engine."""
        from llmc.runtime.devices import make_executor

        del argument
        engine = setting.other
        assert engine is not None, "it was loaded"
        if (problem := differs(engine, setting.engine)) is not None:
            raise UsageError(
                f"--spec draft: {engine.path} and {setting.engine.path} differ in {problem}; a draft engine needs the "
                "same tokens"
            )
        block_size = engine.kv_cache.block_size
        blocks = -(-setting.num_blocks * setting.engine.kv_cache.block_size // block_size)
        executor = make_executor(engine, num_blocks=blocks, threads=setting.threads, isa=setting.isa)
        limits = engine.limits
        return cls(
            executor,
            KvCache(blocks, block_size),
            max_seq_len=limits.max_seq_len,
            max_batch_tokens=limits.max_batch_tokens,
            vocab_size=setting.engine.model.vocab_size,
            draws=setting.draws,
        )

    @classmethod
    def load(cls, argument: str) -> Engine:
        """The draft engine."""
        if not argument:
            raise UsageError("--spec draft: name the draft engine, as in draft=DIR")
        return load_engine(Path(argument))

    def behind(self, sequence: Sequence) -> int:
        """All but the last token, if they are many."""
        missing = len(sequence.tokens) - 1
        if (state := self._states.get(sequence)) is not None:
            missing -= len(state.tokens)
        return missing if missing > AT_ONCE else 0

    def catch_up(self, queries: list[Query]) -> int:
        """Compute what is behind, all sequences at once."""
        late = [query for query in queries[: self._max_batch_tokens] if self.behind(query.sequence)]
        reading = [path for query in late if (path := self._start(query)) is not None]
        tokens = sum(len(path.rest()) - 1 for path in reading)
        while reading:
            self._run(reading, spare=1)
            reading = [path for path in reading if len(path.rest()) > 1]
        return tokens

    def propose(self, queries: list[Query]) -> list[Tree]:
        """A chain for each, as far as the engine's context and the blocks allow, beside its first drafts others."""
        paths: dict[int, _Path] = {}
        for index, query in enumerate(queries[: self._max_batch_tokens]):
            if (path := self._start(query)) is not None:
                paths[index] = path
        growing = list(paths.values())
        while growing:
            self._grow(growing)
            growing = [path for path in growing if len(path.drafts) < path.limit]
        return [paths[index].tree if index in paths else Tree() for index in range(len(queries))]

    def forget(self, sequence: Sequence) -> None:
        """Its blocks are free."""
        if (state := self._states.pop(sequence, None)) is not None:
            self._cache.release(state.table.blocks)

    def close(self) -> None:
        """With the engine's memory."""
        if isinstance(self._executor, Closeable):
            self._executor.close()

    def _start(self, query: Query) -> _Path | None:
        """Take back drafts that were wrong, and get blocks for new ones; None where there are none."""
        known = query.sequence.tokens
        state = self._states.setdefault(query.sequence, _State())
        while state.verified < min(len(state.tokens), len(known) - 1) and (
            state.tokens[state.verified] == known[state.verified]
        ):
            state.verified += 1
        del state.tokens[state.verified :]
        draws = self._draws and query.sequence.request.params.temperature > 0
        siblings = query.nodes // 3 if draws else query.pairs
        limit = min(query.nodes - siblings, query.depth, self._max_seq_len - len(known) + 1)
        missing = self._cache.blocks_for(len(known) + limit - 1) - len(state.table.blocks)
        if limit < 1 or missing > self._cache.num_available:
            return None
        if missing > 0:
            state.table.extend(self._cache.allocate(missing))
        return _Path(query, limit, siblings, draws, state=state)

    def _grow(self, paths: list[_Path]) -> None:
        """One step of the engine: a draft more for each path of which nothing is left to compute then."""
        for path, row in zip(paths, self._run(paths), strict=True):
            if len(path.state.tokens) == len(path.query.sequence.tokens) + len(path.drafts):
                path.grow(row[: self._vocab_size])

    def _run(self, paths: list[_Path], spare: int = 0) -> NDArray[np.float32]:
        """Compute what is left of each, but for so many tokens, as far as there is room; logits after it."""
        room = self._max_batch_tokens - len(paths)  # a row is kept for each
        parts: list[tuple[_Path, list[int]]] = []
        for path in paths:
            rest = path.rest()
            tokens = rest[: min(1 + room, len(rest) - spare)]
            room -= len(tokens) - 1
            parts.append((path, tokens))
        logits = self._step(parts)
        for path, tokens in parts:
            path.state.tokens += tokens
        return logits

    def _step(self, parts: list[tuple[_Path, list[int]]]) -> NDArray[np.float32]:
        """Logits of the last row of each."""
        past = [len(path.state.tokens) for path, _ in parts]
        starts = np.cumsum([0, *(len(tokens) for _, tokens in parts)]).astype(np.int32)
        tables = np.zeros((len(parts), max(len(path.state.table.blocks) for path, _ in parts)), np.int32)
        for row, (path, _) in zip(tables, parts, strict=True):
            row[: len(path.state.table.blocks)] = path.state.table.row
        positions = [range(n, n + len(tokens)) for n, (_, tokens) in zip(past, parts, strict=True)]
        return self._executor.step(
            Batch(
                input_ids=np.concatenate([tokens for _, tokens in parts]).astype(np.int32),
                position_ids=np.concatenate([list(p) for p in positions]).astype(np.int32),
                logit_rows=starts[1:] - 1,
                cu_seqlens=starts,
                num_computed=np.array(past, np.int32),
                block_tables=tables,
            )
        )


def differs(draft: Engine, target: Engine) -> str | None:
    """In what their tokens do, or None."""
    texts = [engine.read("tokenizer/tokenizer.json") for engine in (draft, target)]
    if None in texts:
        sizes = draft.model.vocab_size, target.model.vocab_size
        return None if sizes[0] == sizes[1] else f"their vocabularies (of {sizes[0]} and {sizes[1]} tokens)"
    if texts[0] == texts[1]:
        return None
    ours, theirs = (_tokens(strict.parse_json(text or b"", "tokenizer.json")) for text in texts)
    wrong = [token for token, number in ours.items() if theirs.get(token) != number]
    wrong += [token for token in theirs if token not in ours]
    return f"{len(wrong)} tokens (such as {wrong[0]!r})" if wrong else None


def _tokens(spec: Any) -> dict[str, int]:
    vocabulary = spec["model"]["vocab"]
    if isinstance(vocabulary, list):  # of pieces and scores
        vocabulary = {piece[0]: number for number, piece in enumerate(vocabulary)}
    return {**vocabulary, **{entry["content"]: entry["id"] for entry in spec.get("added_tokens", ())}}
