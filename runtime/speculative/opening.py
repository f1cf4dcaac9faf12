"""From what somebody asks for, such as ``ngram`` or ``draft=ENGINE``, to what drafts tokens for an engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from llmc import discover
from llmc.errors import UsageError
from llmc.runtime.batch import DraftExecutor, Executor, FeatureExecutor
from llmc.runtime.speculative.base import Proposer, Setting
from llmc.runtime.speculative.rules import Rule
from llmc.runtime.speculative.speculator import Speculator

if TYPE_CHECKING:
    from llmc.runtime.engine import Engine
    from llmc.runtime.scheduler import SchedulerConfig

OFF = "off"


@dataclass(frozen=True)
class Speculation:
    """How to draft, and when drafts are accepted.

    Attributes:
        proposer: as for ``--spec``.
        tokens: nodes of a tree at most; default: the proposer's.
        sampling: ``exact``, ``rejection`` or ``typical``: see `Rule`.
    """

    proposer: str = OFF
    tokens: int | None = None
    sampling: str = Rule.EXACT.value

    def __post_init__(self) -> None:
        if self.tokens is not None and self.tokens < 1:
            raise UsageError(f"spec-tokens: {self.tokens} is less than 1")
        if self.sampling not in list(Rule):
            raise UsageError(f"spec-sampling: {self.sampling!r} is none of {', '.join(Rule)}")

    @staticmethod
    def of(asked: Speculation | str | None) -> Speculation:
        """From a text as for ``--spec``."""
        return asked if isinstance(asked, Speculation) else Speculation(asked or OFF)


@dataclass(frozen=True)
class Drafter:
    """What was asked for, looked up and loaded. ``other``: an engine that it needs."""

    asked: Speculation
    kind: type[Proposer]
    argument: str
    engine: Engine
    other: Engine | None

    @property
    def kv_bytes_per_token(self) -> int:
        """Memory that it takes for each position of the engine's KV cache."""
        return self.kind.kv_bytes_per_token(self.engine, self.other)

    @property
    def beside(self) -> Engine | None:
        """What takes memory of the device besides the engine."""
        return self.kind.beside(self.engine, self.other)


def load_drafter(asked: Speculation, engine: Engine) -> Drafter | None:
    """None if nothing is asked for.

    Raises:
        UsageError: there is no such proposer, or no engine that is needed.
        EngineError: that engine is damaged.
    """
    name, _, argument = asked.proposer.partition("=")
    known = {kind.name: kind for kind in discover.subclasses(__package__, Proposer)}  # type: ignore[type-abstract]
    if name not in (OFF, *known):
        raise UsageError(f"--spec {name}: there is no such proposer; known: {OFF}, {', '.join(known)}")
    kind = known.get(name)
    if kind is None:
        if asked.sampling != Rule.EXACT:
            raise UsageError(f"--spec-sampling {asked.sampling}: nothing is drafted; say what drafts with --spec")
        return None
    kind.check(engine, asked.sampling)
    return Drafter(asked, kind, argument, engine, kind.load(argument))


def open_speculator(
    drafter: Drafter | None, executor: Executor, config: SchedulerConfig, *, threads: int, isa: str | None
) -> Speculator | None:
    """None if nothing is asked for.

    Raises:
        UsageError: the engine can't verify drafts.
        LlmcError: as the proposer's `open`.
    """
    if drafter is None:
        return None
    kind, engine, asked = drafter.kind, drafter.engine, drafter.asked
    if engine.plan.state_slots:
        raise UsageError(
            f"--spec {kind.name}: {engine.path} has recurrent layers, whose state can't be taken back; use off"
        )
    if not isinstance(executor, FeatureExecutor if kind.wants_features else DraftExecutor):
        raise UsageError(f"--spec {kind.name}: the reference executor verifies no drafts; leave LLMC_REFERENCE away")
    rule, nodes = Rule(asked.sampling), asked.tokens
    if rule is Rule.TYPICAL or (rule is Rule.REJECTION and kind.draws):  # trees for all fit a step, whatever runs
        rows = min(config.max_batch_tokens, config.max_logit_rows) // config.max_sequences
        nodes = max(1, min(kind.default_nodes if nodes is None else nodes, rows - 1))
    setting = Setting(
        engine, threads, isa, config.max_sequences, config.num_blocks, drafter.other, rule is Rule.REJECTION, executor
    )
    proposer = kind.open(drafter.argument, setting)
    size, context = engine.model.vocab_size, config.max_seq_len
    return Speculator(proposer, executor, vocab_size=size, nodes=nodes, rule=rule, context=context)
