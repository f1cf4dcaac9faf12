"""How many drafts were right, counted."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from llmc.runtime.speculative.rules import Rule


@dataclass
class Acceptance:
    """Of one proposer. ``steps``: verifications of a sequence's drafts; each gives one token more than it accepts.

    Drafts are those that could have been used: where a sequence ends, the model itself gives the token that ends it.
    ``by_depth``: for depth 1, 2, ...: [steps whose tree went so deep, steps that accepted so much]. ``read_tokens``:
    of texts, apart from what making drafts takes, in ``read_seconds``.
    """

    proposer: str
    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    by_depth: list[list[int]] = field(default_factory=list)
    rule: Rule = Rule.EXACT
    read_tokens: int = 0
    read_seconds: float = 0.0

    def add(self, drafted: int, deepest: int, accepted: int) -> None:
        """One verification of a tree with so many nodes, and how many were accepted."""
        self.steps += 1
        self.drafted += drafted
        self.accepted += accepted
        self.by_depth += [[0, 0] for _ in range(deepest - len(self.by_depth))]
        for depth in range(deepest):
            self.by_depth[depth][0] += 1
            self.by_depth[depth][1] += depth < accepted

    def read(self, tokens: int, seconds: float) -> None:
        """The proposer has caught up with sequences."""
        self.read_tokens += tokens
        self.read_seconds += seconds

    @property
    def counts(self) -> tuple[int, int]:
        """Drafted, accepted."""
        return self.drafted, self.accepted

    @property
    def tokens_per_step(self) -> float:
        """Tokens that a verification gives."""
        return 1 + self.accepted / self.steps if self.steps else 1.0

    @property
    def rates(self) -> list[float]:
        """For depth 1, 2, ...: of the verifications that went so deep, the share that accepted so much."""
        return [accepted / tried for tried, accepted in list(self.by_depth) if tried]

    def line(self) -> str:
        """In words."""
        return (
            f"{self.proposer}: {self.accepted} of {self.drafted} drafts right, {self.tokens_per_step:.2f} tokens for "
            f"each verification{'' if self.rule.is_lossless else f', sampling: {self.rule.label}'}"
        )

    def to_json(self) -> dict[str, Any]:
        """For people and programs; ``by_position``: share of the steps that went so deep and accepted so much."""
        return {
            "proposer": self.proposer,
            "sampling": self.rule.value,
            "lossless": self.rule.is_lossless,
            "steps": self.steps,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "tokens_per_step": round(self.tokens_per_step, 4),
            "read_tokens": self.read_tokens,
            "read_seconds": round(self.read_seconds, 6),
            "by_position": [round(rate, 4) for rate in self.rates],
        }
