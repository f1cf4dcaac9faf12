"""From what somebody asks for, such as ``ngram`` or ``draft=ENGINE``, to what drafts tokens for an engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from llmc import discover
from llmc.errors import UsageError
from llmc.runtime.batch import DraftExecutor, Executor
from llmc.runtime.speculative.base import Proposer, Setting
from llmc.runtime.speculative.speculator import Speculator

if TYPE_CHECKING:
    from llmc.runtime.engine import Engine
    from llmc.runtime.scheduler import SchedulerConfig

OFF = "off"


@dataclass(frozen=True)
class Speculation:
    """How to draft: ``proposer`` as for ``--spec``; ``tokens``: nodes of a tree at most, default: the proposer's."""

    proposer: str = OFF
    tokens: int | None = None

    def __post_init__(self) -> None:
        if self.tokens is not None and self.tokens < 1:
            raise UsageError(f"spec-tokens: {self.tokens} is less than 1")

    @staticmethod
    def of(asked: Speculation | str | None) -> Speculation:
        """From a text as for ``--spec``."""
        return asked if isinstance(asked, Speculation) else Speculation(asked or OFF)

    @property
    def kind(self) -> type[Proposer] | None:
        """What proposes; None: nothing.

        Raises:
            UsageError: there is no such proposer.
        """
        name = self.proposer.partition("=")[0]
        known = {kind.name: kind for kind in discover.subclasses(__package__, Proposer)}  # type: ignore[type-abstract]
        if name not in (OFF, *known):
            raise UsageError(f"--spec {name}: there is no such proposer; known: {OFF}, {', '.join(known)}")
        return known.get(name)

    @property
    def argument(self) -> str:
        """What follows the "=", or nothing."""
        return self.proposer.partition("=")[2]

    @property
    def kv_bytes_per_token(self) -> int:
        """Memory that it takes for each position of the engine's KV cache."""
        return 0 if self.kind is None else self.kind.kv_bytes_per_token(self.argument)


def open_speculator(
    asked: Speculation,
    engine: Engine,
    executor: Executor,
    config: SchedulerConfig,
    *,
    threads: int,
    isa: str | None,
) -> Speculator | None:
    """None if nothing is asked for.

    Raises:
        UsageError: there is no such proposer, or the engine can't verify drafts.
        LlmcError: as the proposer's `open`.
    """
    if (kind := asked.kind) is None:
        return None
    name = kind.name
    if engine.plan.state_slots:
        raise UsageError(f"--spec {name}: {engine.path} has recurrent layers, whose state can't be taken back; use off")
    if not isinstance(executor, DraftExecutor):
        raise UsageError(f"--spec {name}: the reference executor verifies no drafts; leave LLMC_REFERENCE away")
    setting = Setting(engine, threads, isa, config.max_sequences, config.num_blocks)
    proposer = kind.open(asked.argument, setting)
    return Speculator(proposer, executor, vocab_size=engine.model.vocab_size, nodes=asked.tokens)
