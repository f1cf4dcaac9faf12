"""Proposes what an EAGLE layer guesses from what the model computed so far (arXiv:2401.15077 and 2503.01840).

Row i of the layer takes the model's feature of token i and token i + 1, and stands at position i. Beyond what the model
has computed, the layer goes on with its own features.

What it keeps of a position is in the block of the sequence that holds that position. So there are as many blocks as the
engine's, and who finds a beginning in the prefix cache finds what the layer has of it, too. As its last row there has
taken the token that comes next, blocks are found by that as well (`Proposer.ahead`).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from llmc.errors import UsageError
from llmc.runtime.batch import Batch, Executor
from llmc.runtime.devices import cpu, make_part
from llmc.runtime.eagle import FEATURES, HIDDEN, EngineEagle, cache_spec
from llmc.runtime.engine import Engine, kv_bytes_per_token
from llmc.runtime.kv_cache import BlockTable
from llmc.runtime.request import Sequence
from llmc.runtime.speculative.base import Proposer, Query, Setting, Tree, tree_masks
from llmc.runtime.speculative.growth import DrawnGrowth, Growth

LEVELS = 6
"""Of a tree at most."""

MOST_PENDING = 32
"""Rows of a sequence that wait for its next drafts; more are computed at once, and those that complete a block."""

Rows = NDArray[np.float32]


@dataclass(eq=False)
class _State:
    """Of one sequence: its blocks have rows for ``done`` positions, be they from others; ``pending`` come next."""

    done: int
    pending: list[Rows] = field(default_factory=list)

    @property
    def known(self) -> int:
        """The position after the last one whose feature is known."""
        return self.done + sum(map(len, self.pending))


@dataclass(frozen=True, eq=False)
class _Part:
    """Rows of one sequence in a run of the layer: tokens, where they stand, what they go on with, and a tree's parents.

    ``table``, ``done``: the blocks, and positions of which they have rows. ``wanted``: rows whose logits are asked for.
    """

    table: BlockTable
    done: int
    tokens: list[int]
    positions: list[int]
    features: Rows
    wanted: list[int]
    parents: list[int] | None = None


@dataclass(eq=False)
class _Draft:
    """A tree that grows. ``features`` [H]: of the layer, at the last token (-1) and at candidates once followed."""

    sequence: Sequence
    growth: Growth
    features: dict[int, Rows]


class EagleRunner:
    """Runs the layer of an engine, on the device of its ``model`` if it has one.

    Raises:
        UsageError: the engine has none.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        num_blocks: int,
        model: Executor | None = None,
        threads: int | None = None,
        isa: str | None = None,
    ) -> None:
        self.eagle = _layer(engine)
        self._executor = make_part(_alone(engine), model, num_blocks=num_blocks, threads=threads, isa=isa)
        if cpu.POISON and isinstance(model, cpu.CpuExecutor) and isinstance(self._executor, cpu.CpuExecutor):
            model.beside.append(self._executor)
        self.most_rows, self.block_size = engine.limits.max_batch_tokens, engine.kv_cache.block_size

    def run(self, parts: list[_Part], *, of_model: bool) -> list[tuple[Rows, Rows]]:
        """Of each part its own features [rows, H], and logits of the rows that are wanted.

        Args:
            parts: of them, none longer than ``most_rows``.
            of_model: whether they go on with features of the model, or of the layer itself.
        """
        results: list[tuple[Rows, Rows]] = []
        group: list[_Part] = []
        rows = 0
        for part in parts:
            if rows + len(part.tokens) > self.most_rows:
                results += self._run(group, of_model)
                group, rows = [], 0
            group.append(part)
            rows += len(part.tokens)
        return results + (self._run(group, of_model) if group else [])

    def _run(self, parts: list[_Part], of_model: bool) -> list[tuple[Rows, Rows]]:
        starts = np.cumsum([0, *(len(part.tokens) for part in parts)]).astype(np.int32)
        tables = np.zeros((len(parts), max(len(part.table.blocks) for part in parts)), np.int32)
        for row, part in zip(tables, parts, strict=True):
            row[: len(part.table.blocks)] = part.table.row
        wanted = [start + row for start, part in zip(starts, parts, strict=False) for row in part.wanted]
        known = [0 if part.parents is not None else len(part.tokens) for part in parts]
        batch = Batch(
            input_ids=np.concatenate([part.tokens for part in parts]).astype(np.int32),
            position_ids=np.concatenate([part.positions for part in parts]).astype(np.int32),
            logit_rows=np.array(wanted, np.int32),
            cu_seqlens=starts,
            num_computed=np.array([part.done for part in parts], np.int32),
            block_tables=tables,
            tree_mask=tree_masks([(n, part.parents or ()) for n, part in zip(known, parts, strict=True)]),
        )
        eagle, given = self.eagle, np.concatenate([part.features for part in parts])
        if of_model and FEATURES in eagle.plan.names:
            logits = self._executor.run_on(batch, FEATURES, given)
        else:
            logits = self._executor.run_on(batch, HIDDEN, given, eagle.begin)
        ends = np.cumsum([len(part.wanted) for part in parts])[:-1]
        features = np.split(self._executor.features(), starts[1:-1])
        return list(zip(features, np.split(logits.copy(), ends), strict=True))


class EagleProposer(Proposer):
    """See the module."""

    name: ClassVar[str] = "eagle"
    wants_features: ClassVar[bool] = True
    ahead: ClassVar[int] = 1
    default_nodes: ClassVar[int] = 24
    draws: ClassVar[bool] = True

    def __init__(self, runner: EagleRunner, *, draws: bool = False) -> None:
        self._runner, self._draws = runner, draws
        self._states: dict[Sequence, _State] = {}

    @classmethod
    def open(cls, argument: str, setting: Setting) -> Self:
        """With the layer of the engine itself."""
        if argument:
            raise UsageError(f"--spec eagle={argument}: the layer is that of the engine; leave ={argument} away")
        return cls(
            EagleRunner(
                setting.engine,
                num_blocks=setting.num_blocks,
                model=setting.executor,
                threads=setting.threads,
                isa=setting.isa,
            ),
            draws=setting.draws,
        )

    @classmethod
    def beside(cls, engine: Engine, other: Engine | None) -> Engine:
        """The layer."""
        return _alone(engine)

    @classmethod
    def check(cls, engine: Engine, sampling: str) -> None:
        """The engine needs a layer."""
        _layer(engine)

    @classmethod
    def kv_bytes_per_token(cls, engine: Engine, other: Engine | None) -> int:
        """What the layer keeps."""
        eagle = _layer(engine)
        return kv_bytes_per_token(eagle.plan, cache_spec(eagle, engine.kv_cache.block_size))

    def observe(self, seen: list[tuple[Sequence, int, Rows]]) -> int:
        """Keep the features; long prompts, and what completes a block, are taken in at once."""
        ready: dict[Sequence, int] = {}
        for sequence, start, features in seen:
            state = self._states.setdefault(sequence, _State(start))
            assert state.known == start, "features come without a gap"
            state.pending.append(features)
            if state.known == len(sequence.tokens) - 1:
                continue  # the next drafts begin with the last of these rows
            if (rows := self._ready(sequence)) > MOST_PENDING or self._completes(sequence):
                ready[sequence] = rows
        self._take_in(list(ready), last=False)
        return sum(ready.values())

    def settle(self, sequence: Sequence) -> int:
        """Those whose rows are there; of a sequence that has ended, what completes a block is taken in now."""
        if sequence.finish_reason is not None and self._completes(sequence):
            self._take_in([sequence], last=False)
        return self._states[sequence].done

    def propose(self, queries: list[Query]) -> list[Tree]:
        """Take in what the model has computed since, and let trees grow from there, all at once."""
        drafts: dict[int, _Draft] = {}
        followed = [n for n, query in enumerate(queries) if query.sequence in self._states]
        ends = self._take_in([queries[n].sequence for n in followed], last=True)
        ids = self._runner.eagle.token_ids
        for number, end in zip(followed, ends, strict=True):
            query = queries[number]
            if end is not None and self._states[query.sequence].known == len(query.sequence.tokens) - 1:
                kind = DrawnGrowth if self._draws and query.sequence.request.params.temperature > 0 else Growth
                growth = kind(query, min(query.nodes, self._runner.most_rows), min(query.depth, LEVELS))
                growth.add(-1, end[1], ids)
                drafts[number] = _Draft(query.sequence, growth, {-1: end[0]})
        growing = list(drafts.values())
        while growing:
            growing = self._grow(growing)
        return [drafts[n].growth.tree if n in drafts else Tree() for n in range(len(queries))]

    def forget(self, sequence: Sequence) -> None:
        """Its blocks are the scheduler's."""
        self._states.pop(sequence, None)

    def _ready(self, sequence: Sequence) -> int:
        """Pending rows whose next token is known."""
        state = self._states[sequence]
        return min(state.known, len(sequence.tokens) - 1) - state.done

    def _completes(self, sequence: Sequence) -> bool:
        """Whether they complete a block."""
        done, size = self._states[sequence].done, self._runner.block_size
        return (done + self._ready(sequence)) // size > done // size

    def _take_in(self, sequences: list[Sequence], *, last: bool) -> list[tuple[Rows, Rows] | None]:
        """Run the layer on pending rows; of each sequence the feature and logits of the ``last`` one if asked for."""
        ends: dict[Sequence, tuple[Rows, Rows] | None] = dict.fromkeys(sequences)
        waiting = [sequence for sequence in sequences if self._ready(sequence) > 0]
        while waiting:
            parts = [self._next_part(sequence, last) for sequence in waiting]
            found = self._runner.run(parts, of_model=True)
            for sequence, part, (features, logits) in zip(waiting, parts, found, strict=True):
                self._states[sequence].done += len(part.tokens)
                if len(logits):
                    ends[sequence] = features[-1], logits[-1]
            waiting = [sequence for sequence in waiting if self._ready(sequence) > 0]
        return list(ends.values())

    def _next_part(self, sequence: Sequence, last: bool) -> _Part:
        """Rows that fit one run."""
        state, ready = self._states[sequence], self._ready(sequence)
        count, start = min(ready, self._runner.most_rows), state.done
        rows = np.concatenate(state.pending)
        state.pending = [rows[count:].copy()] if count < len(rows) else []
        tokens = sequence.tokens[start + 1 : start + 1 + count]
        wanted = [count - 1] if last and count == ready else []
        return _Part(_table(sequence), start, tokens, list(range(start, start + count)), rows[:count], wanted)

    def _grow(self, drafts: list[_Draft]) -> list[_Draft]:
        """One level more for each; returns those that have grown.

        Rows see what is in the cache and, by a mask, their ancestors among the new ones: so all levels run again.
        """
        growing: list[tuple[_Draft, list[int]]] = []
        parts: list[_Part] = []
        for draft in drafts:
            level, growth = draft.growth.follow(), draft.growth
            if not level or len(growth.followed) > self._runner.most_rows:
                continue
            done = self._states[draft.sequence].done
            positions = [done - 1 + depth for depth in growth.depths]
            above = np.stack([draft.features[candidate] for candidate in growth.above])
            parts.append(_Part(_table(draft.sequence), done, growth.tokens, positions, above, level, growth.parents))
            growing.append((draft, level))
        ids = self._runner.eagle.token_ids
        found = self._runner.run(parts, of_model=False)
        for (draft, level), (features, logits) in zip(growing, found, strict=True):
            draft.features |= zip(draft.growth.followed, features, strict=True)
            for place, row in zip(level, logits, strict=True):
                draft.growth.add(place, row, ids)
        return [draft for draft, _ in growing]


def _table(sequence: Sequence) -> BlockTable:
    assert sequence.table is not None, "a sequence that runs has blocks"
    return sequence.table


def _alone(engine: Engine) -> Engine:
    """With the plan and the cache of the layer."""
    eagle = _layer(engine)
    manifest = dataclasses.replace(engine.manifest, kv_cache=cache_spec(eagle, engine.kv_cache.block_size))
    return dataclasses.replace(engine, manifest=manifest, plan=eagle.plan, weights=eagle.weights)


def _layer(engine: Engine) -> EngineEagle:
    if engine.eagle is None:
        raise UsageError(f"{engine.path}: has no EAGLE layer; build it with: llmc build MODEL --eagle DIR")
    return engine.eagle
