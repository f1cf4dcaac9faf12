"""How many drafts a step gets: as many as pay for themselves. What they are changes no result, only its time."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence as ListOf
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from llmc.runtime.request import FinishReason, Sequence
from llmc.runtime.speculative.step_cost import KEPT, StepCost, quartile

MEMORY, MEMORY_OF_ALL = 0.9, 0.98
"""Weight that an observation keeps at the next one: of a sequence, and of all of them."""

FIRST_GUESS, GUESS_WEIGHT = 0.7, 2.0
"""Of the share of drafts that are right, and of how many drafts that counts for: few, or one that is lucky or unlucky
decides; more, and a sequence that differs from the others is not seen."""

SECOND_GUESS = 0.5
"""Of how often, where a draft was wrong, the one beside it is right."""

LENGTH_GUESS = 64.0
"""Of how many tokens a sequence gets."""

LATE = 2
"""Power of the part of the last sequence's steps that one is expected to take: about the chance that it ends last."""

PROBE_AFTER, PROBE = 16, 2
"""Steps without drafts after which a sequence gets so many, to see whether they have become right."""

PLAIN_AFTER = 32
"""Steps with drafts after which one runs without, to see what that takes now; twice as many as such steps are known, if
these are few: all is compared with them."""

ALLOWED = 0.01
"""The share of all time that drafts may cost more than they save."""

CREDIT_FIRST, CREDIT_MOST, SAVED_MOST = 1.0, 8.0, 64.0
"""Steps without drafts: for as many drafts may go wrong before anything is known, and at any time; of what was saved
beyond that, so much may be spent on reading prompts."""

DECIDE_EVERY, SEQUENCES_PER_STEP = 4, 4
"""Steps for which sizes are kept while the same sequences run, one for so many of these: each matters less then."""


@dataclass
class _Rate:
    """Drafts that were looked at, and those that were right; older ones count less."""

    right: float = 0.0
    tried: float = 0.0

    def add(self, right: float, tried: float, memory: float) -> None:
        self.right = memory * self.right + right
        self.tried = memory * self.tried + tried

    def estimate(self, guess: float) -> float:
        return (self.right + GUESS_WEIGHT * guess) / (self.tried + GUESS_WEIGHT)


@dataclass
class _Known:
    """Of a sequence: first guesses; those beside them, where the first was wrong; and steps since there were drafts."""

    first: _Rate = field(default_factory=_Rate)
    second: _Rate = field(default_factory=_Rate)
    idle: int = 0


@dataclass
class _Step:
    """The last step that was sized: sequences, rows without drafts, drafts, and tokens that the right ones saved."""

    sequences: int
    rows: int
    drafts: int = 0
    right: float = 0.0


@dataclass(frozen=True)
class _Task:
    """What `Controller.sizes` is asked."""

    sequences: ListOf[Sequence]
    most: ListOf[int]
    rows: int
    behind: ListOf[int]
    waiting: int


@dataclass
class _Choice:
    """Nodes for each sequence, and those of them that are second guesses."""

    task: _Task
    nodes: list[int]
    pairs: list[int]
    seconds: float
    """That they take more than a plain step."""
    worth: dict[Sequence, float]
    """Of a token of each, in tokens of an average one."""
    used: int = 0
    """Steps."""


class Controller:
    """Chooses sizes of trees by the acceptance of each sequence, the cost of rows and that of making drafts.

    Drafts are added, the most valuable first, up to where tokens per second are highest. A draft at depth d of a chain
    is worth p**d tokens, where p is the share of the sequence's drafts that were right; a second guess beside it
    p**(d - 1) * (1 - p) times the share of these that were right where the first one was not; a node of a tree with
    known gains its gain, times what the sequence's trees gave as a part of what was expected of them.

    A sequence that ends before the others, and whose place nobody waits for, saves rows of steps that run anyway. So
    the sooner it would end than the last one, by its limit and its drafts, the less its tokens count, down to what a
    row is of a token.

    What a proposer has to read before its first draft of a sequence counts once: it has to pay within the tokens that
    the sequence is expected to get, and must not take more than drafts have saved before.

    What drafts have cost and what they saved is added up, so that they never cost more than a small share of the time,
    whatever the guesses are worth.

    Args:
        gains: of a proposer whose trees always have the same shape: what each node is expected to be worth.
        pairs: of a proposer that can give a second guess beside each draft of a chain.
    """

    def __init__(self, gains: ListOf[float] = (), *, pairs: bool = False) -> None:
        self.cost = StepCost()
        self.pairs: list[int] = []
        """Of the last sizes: nodes that are second guesses, beside the first ones of a chain."""
        self._gains, self._has_pairs = np.array(gains), pairs
        self._known: defaultdict[Sequence, _Known] = defaultdict(_Known)
        self._all = _Known()
        self._length = LENGTH_GUESS
        self._read = _Rate()  # seconds, and tokens that were read in them
        self._level_times: deque[float] = deque(maxlen=KEPT)
        self._level_seconds = 0.0
        self._choice: _Choice | None = None
        self._last: _Step | None = None
        self._with_drafts = 0
        self._credit: float | None = None  # seconds; None: no step has run
        self._saved = 0.0  # seconds beyond the most of these

    def sizes(
        self,
        sequences: ListOf[Sequence],
        most: ListOf[int],
        rows: int,
        behind: ListOf[int] = (),
        *,
        waiting: int = 0,
    ) -> list[int]:
        """Nodes for each sequence, at most so many, in a step that has ``rows`` rows without them.

        Args:
            sequences: those that decode.
            most: of each.
            rows: of the step.
            behind: tokens of each that the proposer reads before it drafts; empty: none.
            waiting: others, for the place of one that ends.
        """
        self._settle()
        self._last = _Step(len(sequences), rows)
        self.pairs = [0] * len(sequences)
        if not sequences or self._with_drafts >= min(PLAIN_AFTER, 2 * self.cost.times(rows)):
            self._with_drafts = 0
            return self.pairs.copy()
        choice = self._choose(_Task(sequences, most, rows, behind if any(behind) else (), waiting))
        nodes, self.pairs = choice.nodes.copy(), choice.pairs
        self._probe(nodes, choice.task)
        self._last.drafts = sum(nodes)
        self._with_drafts += any(nodes)
        return nodes

    def learn(self, sequence: Sequence, nodes: int, depth: int, accepted: int, second: bool | None = None) -> None:
        """Of a tree of that size, so many drafts were right; those behind the first wrong one say nothing.

        ``second``: whether there it was the second guess; None: there was none.
        """
        tried = float(self._gains[:nodes].sum()) if len(self._gains) else min(accepted + 1, depth)
        known = self._known[sequence]
        for of, memory in ((known, MEMORY), (self._all, MEMORY_OF_ALL)):
            of.first.add(accepted, tried, memory)
            if self._has_pairs and accepted < tried:  # what was not tried for long is forgotten, and tried again
                of.second.add(bool(second), second is not None, memory)
        if self._last is not None:
            worth = 1.0 if self._choice is None else self._choice.worth.get(sequence, 1.0)
            self._last.right += worth * (accepted + bool(second))

    def caught_up(self, tokens: int, seconds: float) -> None:
        """Reading so many tokens of sequences, before drafts were made, took so long."""
        self._read.add(seconds, tokens, MEMORY)
        paid = min(seconds, self._saved)
        self._saved -= paid
        if self._credit is not None:
            self._credit -= seconds - paid

    def proposed(self, levels: int, seconds: float) -> None:
        """Making trees so deep took so long."""
        self._level_times.append(seconds / self._levels(max(1, levels)))
        self._level_seconds = quartile(self._level_times)
        if self._credit is not None:
            self._credit -= seconds

    def ran(self, rows: int, seconds: float) -> None:
        """The step that was sized has run, with its drafts."""
        self.cost.add(rows, seconds)
        if self._last is not None:
            self._last.drafts = rows - self._last.rows

    def forget(self, sequence: Sequence) -> None:
        """It has ended, or is to begin anew."""
        self._known.pop(sequence, None)
        if sequence.finish_reason in (FinishReason.LENGTH, FinishReason.STOP):
            self._length = MEMORY * self._length + (1 - MEMORY) * sequence.num_generated

    def _choose(self, task: _Task) -> _Choice:
        """The last choice while it is a good one, or a new one."""
        plain = self.cost.at(task.rows)
        credit = CREDIT_FIRST * plain if self._credit is None else self._credit
        last = self._choice
        if (
            last is None
            or last.task != task
            or last.used >= min(DECIDE_EVERY, len(task.sequences) // SEQUENCES_PER_STEP)
            or last.seconds > credit
            or task.behind
            or not self._level_times
        ):
            self._choice = last = self._best(task, plain, credit)
        last.used += 1
        return last

    def _best(self, task: _Task, plain: float, credit: float) -> _Choice:
        """The most valuable nodes, so many that tokens per second are highest.

        A second guess may be worth less than a first one that is deeper, but costs much less: no turn of the proposer.
        So depths are tried in turn where there are such.

        Args:
            task: what is asked.
            plain: seconds of the step without drafts.
            credit: seconds that it may take more.
        """
        count, deepest = len(task.sequences), max(task.most)
        values = self._values(task, deepest)
        values *= (worth := self._worth(task, values))
        reading = self._reading(task, values, plain, credit)
        choice = _Choice(task, [0] * count, [0] * count, 0.0, dict(zip(task.sequences, worth.tolist(), strict=True)))
        best = count / plain
        for limit in range(1, deepest + 1) if self._has_pairs else [deepest] * (deepest > 0):
            found = values[:limit]
            if min(task.most) < found.shape[0] * found.shape[1]:
                found = _at_most(found, task.most)
            order = np.argsort(-found, axis=None, kind="stable")[: 1 if not self._level_times else None]
            depth, kind, number = np.unravel_index(order, found.shape)
            tokens = count + np.cumsum(found.ravel()[order])
            seconds = self.cost.over(task.rows, len(order))[1:]
            levels = 1 if len(self._gains) else 1 + np.maximum.accumulate(depth)
            seconds = seconds + self._level_seconds * levels
            allowed = seconds <= plain + credit
            if reading is not None:
                once, each = reading[:, number] * ((depth == 0) & (kind == 0))
                seconds = seconds + np.cumsum(each)
                allowed &= np.cumsum(once) <= credit + self._saved
            end = len(order) if allowed.all() else int(allowed.argmin())  # what is behind costs more
            place = int((tokens[:end] / seconds[:end]).argmax()) if end else 0
            if end and tokens[place] / seconds[place] > best:
                best = tokens[place] / seconds[place]
                choice.nodes = np.bincount(number[: place + 1], minlength=count).tolist()
                choice.pairs = np.bincount(number[: place + 1], kind[: place + 1], count).astype(int).tolist()
                choice.seconds = float(seconds[place]) - plain
            elif limit > 1 and reading is None:
                break  # the next turn of the proposer gives less than this one
        return choice

    def _values(self, task: _Task, deepest: int) -> NDArray[np.float64]:
        """Tokens that the nodes of each sequence are expected to give [depth, first or second guess, sequence]."""
        known = [self._known[sequence].first for sequence in task.sequences]
        if len(self._gains):
            share = np.array([of.estimate(self._all.first.estimate(1.0)) for of in known])
            gains: NDArray[np.float64] = np.minimum(1.0, np.multiply.outer(self._gains[:deepest], share))
            return gains[:, None]
        guess = self._all.first.estimate(FIRST_GUESS)
        right = np.array([of.estimate(guess) for of in known])
        firsts = np.cumprod(np.broadcast_to(right, (deepest, len(right))), axis=0)
        if not self._has_pairs:
            return firsts[:, None]
        guess = self._all.second.estimate(SECOND_GUESS)
        share = np.array([self._known[sequence].second.estimate(guess) for sequence in task.sequences])
        seconds = firsts * np.minimum(1.0, (1 - right) / right * share)  # none is drafted without the first one
        return np.stack([firsts, seconds], axis=1)

    def _worth(self, task: _Task, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """What a token of each sequence saves, as a part of what the average one takes."""
        count, plain = len(task.sequences), self.cost.at(task.rows)
        if task.waiting >= count or count == 1:
            return np.ones(count)
        left = [sequence.request.max_tokens - sequence.num_generated for sequence in task.sequences]
        steps = left / (1 + values.sum(axis=(0, 1)))
        fewer = count // 2
        row = min(1.0, (plain - self.cost.at(task.rows - fewer)) / fewer * count / plain)
        last = task.waiting / count + (1 - task.waiting / count) * (steps / steps.max()) ** LATE
        worth: NDArray[np.float64] = row + (1 - row) * last
        return worth

    def _reading(
        self, task: _Task, values: NDArray[np.float64], plain: float, credit: float
    ) -> NDArray[np.float64] | None:
        """Seconds of reading for each sequence, at once and for each step that it is expected to take; None: none.

        Where it does not pay, ``values`` become 0.
        """
        if not task.behind:
            return None
        once = np.array([self._read_seconds(task, number) for number in range(len(task.sequences))])
        left = [self._left(sequence) for sequence in task.sequences]
        gained = values.sum(axis=(0, 1))
        each = once * (1 + gained) / left
        values[:, :, (once > credit + self._saved) | (each >= gained * plain / len(left))] = 0
        return np.stack([once, each])

    def _read_seconds(self, task: _Task, number: int) -> float:
        """Of reading what a proposer has not; until that is measured, as if it were what runs the steps."""
        tokens = task.behind[number] if task.behind else 0
        if self._read.tried:
            return tokens * self._read.right / self._read.tried
        return self.cost.at(task.rows + tokens) - self.cost.at(task.rows) if tokens else 0.0

    def _left(self, sequence: Sequence) -> float:
        """Tokens that it is expected to get: as many as others, or as it has already, but for its limit."""
        done = sequence.num_generated
        return max(1.0, min(sequence.request.max_tokens - done, max(self._length - done, done)))

    def _levels(self, depth: int) -> int:
        """Turns that a proposer takes for a tree so deep."""
        return min(depth, 1) if len(self._gains) else depth

    def _probe(self, nodes: list[int], task: _Task) -> None:
        """Give a few to those that had none for long, as many of them as credit is there for."""
        known = [self._known[sequence] for sequence in task.sequences]
        for of, count in zip(known, nodes, strict=True):
            of.idle = 0 if count else of.idle + 1
        waiting = [number for number, of in enumerate(known) if of.idle > PROBE_AFTER]
        total, level, plain = sum(nodes), max(nodes), self.cost.at(task.rows)
        credit = CREDIT_FIRST * plain if self._credit is None else self._credit
        spent = 0.0
        for number in sorted(waiting, key=lambda number: -known[number].idle):
            probe, once = min(PROBE, task.most[number]), self._read_seconds(task, number)
            deeper = max(level, probe)
            step = self.cost.at(task.rows + total + probe) + self._level_seconds * self._levels(deeper) - plain
            if step > credit:
                return
            share = (
                1 + len(known) if self._read.tried else 1
            )  # what all have to read may pay where that of one does not
            if step + spent + share * once > credit + self._saved:
                continue  # another one may have less to read
            nodes[number], known[number].idle = probe, 0
            total, level, spent = total + probe, deeper, spent + once

    def _settle(self) -> None:
        """Count what the drafts of the last step cost and saved."""
        last, self._last = self._last, None
        if last is None or not last.sequences or not self.cost.times(last.rows):
            return
        plain = self.cost.at(last.rows)
        if self._credit is None:
            self._credit = CREDIT_FIRST * plain
        saved = plain * (last.sequences + last.right) / last.sequences - self.cost.at(last.rows + last.drafts)
        most = CREDIT_MOST * plain  # and at least: one call that hung is not to be paid for ever
        credit = self._credit + saved + ALLOWED * plain
        self._credit = max(-most, min(credit, most))
        self._saved = min(self._saved + max(0.0, credit - most), SAVED_MOST * plain)


def _at_most(values: NDArray[np.float64], most: ListOf[int]) -> NDArray[np.float64]:
    """Without all but the most valuable nodes of each sequence."""
    flat = values.reshape(-1, len(most))
    rank = np.argsort(np.argsort(-flat, axis=0, kind="stable"), axis=0)
    kept: NDArray[np.float64] = np.where(rank < np.array(most), flat, 0.0).reshape(values.shape)
    return kept
