"""Proposes what a smaller engine with the same tokens would say."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from llmc.errors import UsageError
from llmc.runtime import strict
from llmc.runtime.batch import Batch, Executor
from llmc.runtime.engine import Engine, load_engine
from llmc.runtime.kv_cache import BlockTable, KvCache
from llmc.runtime.request import Sequence
from llmc.runtime.sampling import draw_token
from llmc.runtime.speculative.base import Proposer, Query, Setting, Tree


@dataclass(eq=False)
class _State:
    """What the draft engine's cache holds of a sequence, drafts that were wrong included."""

    table: BlockTable = field(default_factory=BlockTable)
    tokens: list[int] = field(default_factory=list)
    verified: int = 0
    """Of them: those that are the sequence's for sure."""


@dataclass(eq=False)
class _Path:
    """The drafts of one query, as they grow."""

    query: Query
    state: _State
    limit: int
    drafts: list[int] = field(default_factory=list)

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

    def __init__(self, executor: Executor, cache: KvCache, *, max_seq_len: int, max_batch_tokens: int) -> None:
        self._executor, self._cache = executor, cache
        self._max_seq_len, self._max_batch_tokens = max_seq_len, max_batch_tokens
        self._states: dict[Sequence, _State] = {}

    @classmethod
    def open(cls, argument: str, setting: Setting) -> Self:
        """``argument``: directory of the draft engine."""
        from llmc.runtime.devices import make_executor

        engine = load_draft(argument)
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
        )

    @classmethod
    def kv_bytes_per_token(cls, argument: str) -> int:
        """Of the draft engine."""
        return load_draft(argument).kv_bytes_per_token

    def propose(self, queries: list[Query]) -> list[Tree]:
        """A chain for each, as far as the engine's context and the blocks allow."""
        paths: dict[int, _Path] = {}
        for index, query in enumerate(queries[: self._max_batch_tokens]):
            if (path := self._start(query)) is not None:
                paths[index] = path
        growing = list(paths.values())
        while growing:
            self._grow(growing)
            growing = [path for path in growing if len(path.drafts) < path.limit]
        return [Tree.chain(paths[index].drafts if index in paths else ()) for index in range(len(queries))]

    def forget(self, sequence: Sequence) -> None:
        """Its blocks are free."""
        if (state := self._states.pop(sequence, None)) is not None:
            self._cache.release(state.table.blocks)

    def _start(self, query: Query) -> _Path | None:
        """Take back drafts that were wrong, and get blocks for new ones; None where there are none."""
        known = query.sequence.tokens
        state = self._states.setdefault(query.sequence, _State())
        while state.verified < min(len(state.tokens), len(known) - 1) and (
            state.tokens[state.verified] == known[state.verified]
        ):
            state.verified += 1
        del state.tokens[state.verified :]
        limit = min(query.nodes, query.depth, self._max_seq_len - len(known) + 1)
        missing = self._cache.blocks_for(len(known) + limit - 1) - len(state.table.blocks)
        if limit < 1 or missing > self._cache.num_available:
            return None
        if missing > 0:
            state.table.extend(self._cache.allocate(missing))
        return _Path(query, state, limit)

    def _grow(self, paths: list[_Path]) -> None:
        """One step of the engine: a draft more for each path of which nothing is left to compute then."""
        room = self._max_batch_tokens - len(paths)  # a row is kept for each
        parts: list[tuple[_Path, list[int]]] = []
        complete: list[bool] = []
        for path in paths:
            rest = path.rest()
            tokens = rest[: 1 + room]
            room -= len(tokens) - 1
            parts.append((path, tokens))
            complete.append(len(tokens) == len(rest))
        logits = self._step(parts)
        for (path, tokens), row, done in zip(parts, logits, complete, strict=True):
            path.state.tokens += tokens
            if done:
                sequence = path.query.sequence
                position = len(sequence.tokens) + len(path.drafts)
                path.drafts.append(draw_token(row, sequence, position=position))

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


def load_draft(directory: str) -> Engine:
    """The draft engine.

    Raises:
        UsageError: none is named.
        EngineError: it is missing or damaged.
    """
    if not directory:
        raise UsageError("--spec draft: name the draft engine, as in draft=DIR")
    return load_engine(Path(directory))


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
