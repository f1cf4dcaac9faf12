"""How many drafts a step gets: as many as pay for themselves. What they are changes no result, only its time."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence as ListOf
from dataclasses import dataclass
from typing import NamedTuple

from llmc.runtime.request import FinishReason, Sequence
from llmc.runtime.speculative.outlook import MEMORY, MEMORY_OF_ALL, NOTHING, Known, Node, Outlook, Rate, Shape
from llmc.runtime.speculative.step_cost import KEPT, StepCost, quartile

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

DECIDE_EVERY, SEQUENCES_PER_STEP, QUIET = 4, 4, 16
"""Steps for which sizes are kept while the same sequences run, one for so many of these: each matters less then; and
steps for which they are kept while nothing is learnt of drafts."""


@dataclass
class _Step:
    """The last step that was sized: sequences, rows without drafts, drafts, and tokens that the right ones saved."""

    sequences: int
    rows: int
    drafts: int = 0
    right: float = 0.0


class _Task(NamedTuple):
    """What `Controller.sizes` is asked."""

    sequences: ListOf[Sequence]
    most: ListOf[int]
    rows: int
    behind: ListOf[int]
    waiting: int

    def is_like(self, other: _Task) -> bool:
        """Whether it is asked of the same sequences again."""
        return (
            self.sequences == other.sequences
            and self.most == other.most
            and self.rows == other.rows
            and self.waiting == other.waiting
        )


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
    is_quiet: bool = True
    """Nothing was learnt of drafts since."""

    def take(self, chosen: list[Node], seconds: float) -> None:
        """These instead."""
        self.nodes, self.pairs = [0] * len(self.nodes), [0] * len(self.nodes)
        for _, _, is_second, number in chosen:
            self.nodes[number] += 1
            self.pairs[number] += is_second
        self.seconds = seconds


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
    whatever the guesses are worth. What a proposer reads whatever sizes are is owed to that account: later savings pay
    it, and half of that share; drafts that pay for themselves go on.

    Args:
        gains: of a proposer whose trees always have the same shape: what each node is expected to be worth.
        pairs: of a proposer that can give a second guess beside each draft of a chain.
    """

    def __init__(self, gains: ListOf[float] = (), *, pairs: bool = False) -> None:
        self.cost = StepCost()
        self.pairs: list[int] = []
        """Of the last sizes: nodes that are second guesses, beside the first ones of a chain."""
        self._shape = Shape(gains, pairs)
        self._known: defaultdict[Sequence, Known] = defaultdict(Known)
        self._all = Known()
        self._length = LENGTH_GUESS
        self._read = Rate()  # seconds, and tokens that were read in them
        self._level_times: deque[float] = deque(maxlen=KEPT)
        self._level_seconds = 0.0
        self._choice: _Choice | None = None
        self._last: _Step | None = None
        self._with_drafts = 0
        self._credit: float | None = None  # seconds; None: no step has run
        self._saved = 0.0  # seconds beyond the most of these; below 0: they are owed

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
        task = _Task(sequences, most, rows, behind if any(behind) else (), waiting)
        choice = self._choose(task)
        nodes, self.pairs = choice.nodes.copy(), choice.pairs
        self._probe(nodes, task)
        self._last.drafts = sum(nodes)
        self._with_drafts += any(nodes)
        return nodes

    def learn(self, sequence: Sequence, nodes: int, depth: int, accepted: int, second: bool | None = None) -> None:
        """Of a tree of that size, so many drafts were right; those behind the first wrong one say nothing.

        ``second``: whether there it was the second guess; None: there was none.
        """
        tried = self._shape.sums[min(nodes, len(self._shape.gains))] if self._shape.gains else min(accepted + 1, depth)
        known = self._known[sequence]
        for of, memory in ((known, self._shape.memory), (self._all, MEMORY_OF_ALL)):
            of.first.add(accepted, tried, memory)
            if self._shape.pairs and accepted < tried:  # what was not tried for long is forgotten, and tried again
                of.second.add(bool(second), second is not None, memory)
        worth = 1.0
        if self._choice is not None:
            self._choice.is_quiet = False
            worth = self._choice.worth.get(sequence, 1.0)
        if self._last is not None:
            self._last.right += worth * (accepted + bool(second))

    def caught_up(self, tokens: int, seconds: float) -> None:
        """Reading so many tokens of sequences, before drafts were made, took so long."""
        self._read.add(seconds, tokens, MEMORY)
        paid = min(seconds, self._saved)
        self._saved -= paid
        if self._credit is not None:
            self._credit -= seconds - paid

    def has_read(self, seconds: float) -> None:
        """The proposer has read what steps have computed, which took so long and had not been chosen."""
        if self._credit is not None:
            self._saved -= seconds

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
            or last.used >= (QUIET if last.is_quiet else min(DECIDE_EVERY, len(task.sequences) // SEQUENCES_PER_STEP))
            or last.seconds > credit
            or not last.task.is_like(task)
        ):
            self._choice = last = self._best(task, plain, credit)
        last.used += 1
        return last

    def _best(self, task: _Task, plain: float, credit: float) -> _Choice:
        """The most valuable nodes, so many that tokens per second are highest.

        A second guess may be worth less than a first one that is deeper, but costs much less: no turn of the proposer.
        So depths are tried in turn where there are such. No arrays: in the cache that a step leaves behind, NumPy takes
        ten times as long for so few numbers.

        Args:
            task: what is asked.
            plain: seconds of the step without drafts.
            credit: seconds that it may take more.
        """
        count = len(task.sequences)
        outlook = [
            self._shape.outlook(self._known[s], self._all, most)
            for s, most in zip(task.sequences, task.most, strict=True)
        ]
        worth = self._worth(task, outlook, plain)
        reading = self._reading(task, outlook, plain, credit) if any(task.behind) else {}
        choice = _Choice(task, [0] * count, [0] * count, 0.0, dict(zip(task.sequences, worth, strict=True)))
        best, most = count / plain, count + sum(of.gained * factor for of, factor in zip(outlook, worth, strict=True))
        deepest = max(task.most)
        for limit in range(1, deepest + 1) if self._shape.pairs else [deepest]:
            chosen: list[Node] = []
            tokens, levels, once, each, found = float(count), 0, 0.0, 0.0, best
            for nodes, node in enumerate(self._shape.nodes(outlook, worth, task.most, limit), start=1):
                value, depth, is_second, number = node
                levels = max(levels, self._levels(depth))
                if depth == 1 and not is_second and number in reading:
                    once, each = once + reading[number][0], each + reading[number][1]
                seconds = self._seconds(task.rows + nodes, levels)
                if seconds - plain > credit or once > credit + self._saved or most <= best * seconds:
                    break  # it might cost too much, or even all that is to come gains nothing
                tokens -= value
                chosen.append(node)
                if tokens > best * (seconds + each):
                    best = tokens / (seconds + each)
                    choice.take(chosen, seconds - plain)
                if not self._level_times:
                    break  # what making drafts takes is not known
            if limit > 1 and best == found and not reading:
                break  # the next turn of the proposer gives less than this one
        return choice

    def _worth(self, task: _Task, outlook: list[Outlook], plain: float) -> list[float]:
        """What a token of each sequence saves, as a part of what the average one takes."""
        count = len(task.sequences)
        if task.waiting >= count or count == 1:
            return [1.0] * count
        steps = [
            (sequence.request.max_tokens - sequence.num_generated) / (1 + of.gained)
            for sequence, of in zip(task.sequences, outlook, strict=True)
        ]
        fewer, longest, refilled = count // 2, max(steps), task.waiting / count
        row = min(1.0, (plain - self.cost.at(task.rows - fewer)) / fewer * count / plain)
        return [row + (1 - row) * (refilled + (1 - refilled) * (some / longest) ** LATE) for some in steps]

    def _reading(
        self, task: _Task, outlook: list[Outlook], plain: float, credit: float
    ) -> dict[int, tuple[float, float]]:
        """Seconds of reading for sequences that need it, at once and for each step that they are expected to take.

        Where it does not pay, nothing is to be gained.
        """
        found: dict[int, tuple[float, float]] = {}
        for number, (sequence, of) in enumerate(zip(task.sequences, outlook, strict=True)):
            if task.behind[number]:
                once = self._read_seconds(task, number)
                each = once * (1 + of.gained) / self._left(sequence)
                found[number] = once, each
                if once > credit + self._saved or each >= of.gained * plain / len(outlook):
                    outlook[number] = NOTHING
        return found

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
        return min(depth, 1) if self._shape.gains else depth

    def _seconds(self, rows: int, levels: int) -> float:
        """Of a step with so many rows, for whose drafts a proposer takes so many turns."""
        return self.cost.at(rows) + self._level_seconds * levels

    def _probe(self, nodes: list[int], task: _Task) -> None:
        """Give a few to those that had none for long, as many of them as credit is there for."""
        known = [self._known[sequence] for sequence in task.sequences]
        for of, count in zip(known, nodes, strict=True):
            of.idle = 0 if count else of.idle + 1
        waiting = [number for number, of in enumerate(known) if of.idle > PROBE_AFTER]
        if not waiting:
            return
        total, level, plain = sum(nodes), max(nodes), self.cost.at(task.rows)
        credit = CREDIT_FIRST * plain if self._credit is None else self._credit
        spent = 0.0
        for number in sorted(waiting, key=lambda number: -known[number].idle):
            probe, once = min(PROBE, task.most[number]), self._read_seconds(task, number)
            deeper = max(level, probe)
            step = self._seconds(task.rows + total + probe, self._levels(deeper)) - plain
            if step > credit:
                return
            kept = len(known) * once if self._read.tried else 0.0  # what all have to read may pay, of one it may not
            if step + spent + once + kept > credit + self._saved:
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
        saved = 0.0
        if last.drafts:
            saved = plain * (last.sequences + last.right) / last.sequences - self.cost.at(last.rows + last.drafts)
        most = CREDIT_MOST * plain  # and at least: one call that hung is not to be paid for ever
        paid = max(0.0, min(-self._saved, ALLOWED / 2 * plain))
        credit = self._credit + saved + ALLOWED * plain - paid
        self._credit = max(-most, min(credit, most))
        self._saved = max(-most, min(self._saved + paid + max(0.0, credit - most), SAVED_MOST * plain))
