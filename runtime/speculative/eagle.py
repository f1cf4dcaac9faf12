"""Proposes what an EAGLE layer guesses from what the model computed so far (arXiv:2401.15077 and 2503.01840).

Row i of the layer takes the model's feature of token i and token i + 1, and stands at position i. Beyond what the model
has computed, the layer goes on with its own features.
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
from llmc.runtime.kv_cache import BlockTable, KvCache
from llmc.runtime.request import Sequence
from llmc.runtime.speculative.base import Proposer, Query, Setting, Tree, tree_masks
from llmc.runtime.speculative.growth import Growth
from llmc.runtime.speculative.rules import Rule

LEVELS = 6
"""Of a tree at most."""

MOST_PENDING = 32
"""Rows of a sequence that wait for its next drafts; more are computed at once."""

Rows = NDArray[np.float32]


@dataclass(eq=False)
class _State:
    """Of one sequence: its cache has rows for the positions ``first`` to ``first + done``; ``pending`` come next.

    What another request had computed of a prompt has no features here: then ``first`` is not 0.
    """

    first: int
    table: BlockTable = field(default_factory=BlockTable)
    done: int = 0
    pending: list[Rows] = field(default_factory=list)

    @property
    def known(self) -> int:
        """The position after the last one whose feature is known."""
        return self.first + self.done + sum(map(len, self.pending))


@dataclass(frozen=True, eq=False)
class _Part:
    """Rows of one sequence in a run of the layer: tokens, where they stand, what they go on with, and a tree's parents.

    ``wanted``: rows whose logits are asked for.
    """

    state: _State
    tokens: list[int]
    positions: list[int]
    features: Rows
    wanted: list[int]
    parents: list[int] | None = None


@dataclass(eq=False)
class _Draft:
    """A tree that grows. ``features``: of the layer, at the last token and at each node that is followed, [.., H]."""

    state: _State
    growth: Growth
    features: Rows


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
        self.cache = KvCache(num_blocks, engine.kv_cache.block_size)
        if cpu.POISON and isinstance(self._executor, cpu.CpuExecutor):
            self.cache.on_free = self._executor.poison_blocks
        self.most_rows, self.context = engine.limits.max_batch_tokens, engine.limits.max_seq_len

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
        tables = np.zeros((len(parts), max(len(part.state.table.blocks) for part in parts)), np.int32)
        for row, part in zip(tables, parts, strict=True):
            row[: len(part.state.table.blocks)] = part.state.table.row
        wanted = [start + row for start, part in zip(starts, parts, strict=False) for row in part.wanted]
        known = [0 if part.parents is not None else len(part.tokens) for part in parts]
        batch = Batch(
            input_ids=np.concatenate([part.tokens for part in parts]).astype(np.int32),
            position_ids=np.concatenate([part.positions for part in parts]).astype(np.int32),
            logit_rows=np.array(wanted, np.int32),
            cu_seqlens=starts,
            num_computed=np.array([part.state.done for part in parts], np.int32),
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
    """See the module. Its KV cache has room for as many positions as the engine's; who finds none gets no drafts."""

    name: ClassVar[str] = "eagle"
    wants_features: ClassVar[bool] = True
    default_nodes: ClassVar[int] = 24

    def __init__(self, runner: EagleRunner) -> None:
        self._runner = runner
        self._states: dict[Sequence, _State | None] = {}
        """None: for want of memory it is not followed any more."""

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
            )
        )

    @classmethod
    def beside(cls, engine: Engine, other: Engine | None) -> Engine:
        """The layer."""
        return _alone(engine)

    @classmethod
    def check(cls, engine: Engine, sampling: str) -> None:
        """The engine needs a layer; and drafts depend on what was found in the prefix cache, so answers may not."""
        _layer(engine)
        if sampling == Rule.TYPICAL:
            raise UsageError("--spec-sampling typical: what eagle drafts depends on what runs beside; use exact")

    @classmethod
    def kv_bytes_per_token(cls, engine: Engine, other: Engine | None) -> int:
        """Of the layer's own cache."""
        eagle = _layer(engine)
        return kv_bytes_per_token(eagle.plan, cache_spec(eagle, engine.kv_cache.block_size))

    def observe(self, seen: list[tuple[Sequence, int, Rows]]) -> None:
        """Keep the features; long prompts are taken in at once."""
        ready: list[Sequence] = []
        for sequence, start, features in seen:
            state = self._states.setdefault(sequence, _State(start))
            if state is None or not len(features):
                continue
            assert state.known == start, "features come without a gap"
            state.pending.append(features)
            if self._ready(sequence, state) > MOST_PENDING:
                ready.append(sequence)
        self._take_in(ready, last=False)

    def propose(self, queries: list[Query]) -> list[Tree]:
        """Take in what the model has computed since, and let trees grow from there, all at once."""
        drafts: dict[int, _Draft] = {}
        followed = [n for n, query in enumerate(queries) if self._states.get(query.sequence) is not None]
        ends = self._take_in([queries[n].sequence for n in followed], last=True)
        ids = self._runner.eagle.token_ids
        for number, end in zip(followed, ends, strict=True):
            query, state = queries[number], self._states[queries[number].sequence]
            if end is not None and state is not None and state.known == len(query.sequence.tokens) - 1:
                growth = Growth(query, min(query.nodes, self._runner.most_rows), min(query.depth, LEVELS))
                growth.add(-1, end[1], ids)
                drafts[number] = _Draft(state, growth, end[0][None])
        growing = list(drafts.values())
        while growing:
            growing = self._grow(growing)
        return [drafts[n].growth.tree if n in drafts else Tree() for n in range(len(queries))]

    def forget(self, sequence: Sequence) -> None:
        """Its blocks are free."""
        self._drop(self._states.pop(sequence, None))

    def _ready(self, sequence: Sequence, state: _State) -> int:
        """Pending rows whose next token is known."""
        return min(state.known, len(sequence.tokens) - 1) - state.first - state.done

    def _take_in(self, sequences: list[Sequence], *, last: bool) -> list[tuple[Rows, Rows] | None]:
        """Run the layer on pending rows; of each sequence the feature and logits of the ``last`` one if asked for."""
        ends: dict[Sequence, tuple[Rows, Rows] | None] = dict.fromkeys(sequences)
        waiting = [s for s in sequences if (state := self._states[s]) is not None and self._ready(s, state) > 0]
        while waiting:
            parts: dict[Sequence, _Part] = {}
            for sequence in waiting:
                if (part := self._next_part(sequence, last)) is not None:
                    parts[sequence] = part
            found = self._runner.run(list(parts.values()), of_model=True)
            for (sequence, part), (features, logits) in zip(parts.items(), found, strict=True):
                part.state.done += len(part.tokens)
                if len(logits):
                    ends[sequence] = features[-1], logits[-1]
            waiting = [s for s, part in parts.items() if self._ready(s, part.state) > 0]
        return list(ends.values())

    def _next_part(self, sequence: Sequence, last: bool) -> _Part | None:
        """Rows that fit one run; None where there is no memory, and then never again."""
        state = self._states[sequence]
        assert state is not None, "it was looked for"
        ready = self._ready(sequence, state)
        count = min(ready, self._runner.most_rows)
        if not self._reserve(state, count):
            self._drop(state)
            self._states[sequence] = None
            return None
        rows = np.concatenate(state.pending)
        state.pending = [rows[count:].copy()] if count < len(rows) else []
        start = state.first + state.done
        tokens = sequence.tokens[start + 1 : start + 1 + count]
        wanted = [count - 1] if last and count == ready else []
        return _Part(state, tokens, list(range(start, start + count)), rows[:count], wanted)

    def _grow(self, drafts: list[_Draft]) -> list[_Draft]:
        """One level more for each; returns those that have grown.

        Rows see what is in the cache and, by a mask, their ancestors among the new ones: so all levels run again.
        """
        growing: list[tuple[_Draft, list[int]]] = []
        parts: list[_Part] = []
        for draft in drafts:
            state, growth = draft.state, draft.growth
            level = growth.follow()
            rows = len(growth.followed)
            if not level or rows > self._runner.most_rows or state.done + rows > self._runner.context:
                continue
            if not self._reserve(state, len(growth.followed)):
                continue
            start = state.first + state.done - 1
            positions = [start + depth for depth in growth.depths]
            parents = growth.parents
            above = draft.features[[1 + parent for parent in parents]]
            parts.append(_Part(state, growth.tokens, positions, above, level, parents))
            growing.append((draft, level))
        ids = self._runner.eagle.token_ids
        found = self._runner.run(parts, of_model=False)
        for (draft, level), (features, logits) in zip(growing, found, strict=True):
            draft.features = np.concatenate([draft.features[:1], features])
            for place, row in zip(level, logits, strict=True):
                draft.growth.add(place, row, ids)
        return [draft for draft, _ in growing]

    def _reserve(self, state: _State, rows: int) -> bool:
        """Whether there are blocks for so many more rows."""
        cache = self._runner.cache
        missing = cache.blocks_for(state.done + rows) - len(state.table.blocks)
        if missing > cache.num_available:
            return False
        if missing > 0:
            state.table.extend(cache.allocate(missing))
        return True

    def _drop(self, state: _State | None) -> None:
        if state is not None:
            self._runner.cache.release(state.table.blocks)


def _alone(engine: Engine) -> Engine:
    """With the plan and the cache of the layer."""
    eagle = _layer(engine)
    manifest = dataclasses.replace(engine.manifest, kv_cache=cache_spec(eagle, engine.kv_cache.block_size))
    return dataclasses.replace(engine, manifest=manifest, plan=eagle.plan, weights=eagle.weights)


def _layer(engine: Engine) -> EngineEagle:
    if engine.eagle is None:
        raise UsageError(f"{engine.path}: has no EAGLE layer; build it with: llmc build MODEL --eagle DIR")
    return engine.eagle
