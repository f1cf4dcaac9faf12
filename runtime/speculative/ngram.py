"""Proposes what came after the last tokens when they occurred before, in the prompt or the output."""

from __future__ import annotations

from typing import Self

from llmc.errors import UsageError
from llmc.runtime.request import Sequence
from llmc.runtime.speculative.base import Proposer, Query, Setting, Tree

BRANCHES = 2
"""Continuations that are proposed at most, each after a shorter repetition than the one before."""

MIN_MATCH, CERTAIN_MATCH = 2, 8
"""Tokens that have to be repeated; and those after which there is only one path."""


class SuffixAutomaton:
    """The shortest automaton of all substrings of the tokens so far, extended token by token in amortised O(1).

    A state stands for substrings that end at the same places (Blumer et al., 1985); its link leads to the longest of
    their suffixes that also ends elsewhere. Hence the longest suffix of the text that occurred before is the link of
    the state of the whole text, and ``end`` remembers where it last did.
    """

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self._next: list[dict[int, int]] = [{}]
        self._link, self._length, self._end = [-1], [0], [0]
        self._last = 0
        self.matches: list[tuple[int, int]] = []
        """(tokens repeated, where the repetition ended before), longest first; with BRANCHES or fewer entries."""

    def append(self, token: int) -> None:
        """Take the next token."""
        self.tokens.append(token)
        state = self._add({}, self._length[self._last] + 1, len(self.tokens))
        before = self._last
        while before >= 0 and token not in self._next[before]:
            self._next[before][token] = state
            before = self._link[before]
        if before < 0:
            self._link[state] = 0
        else:
            self._link[state] = self._state_of_length(before, token)
        self._last = state
        self._look_back()

    def continuation(self, end: int, count: int) -> list[int]:
        """What followed after ``end`` tokens; where that runs into the end of the text, what is then repeated."""
        path: list[int] = []
        for position in range(end, end + count):
            path.append(self.tokens[position] if position < len(self.tokens) else path[position - len(self.tokens)])
        return path

    def _state_of_length(self, before: int, token: int) -> int:
        """Where ``before`` leads with the token, split off from what is longer."""
        target = self._next[before][token]
        if self._length[target] == self._length[before] + 1:
            return target
        copy = self._add(dict(self._next[target]), self._length[before] + 1, self._end[target])
        self._link[copy] = self._link[target]
        self._link[target] = copy
        while before >= 0 and self._next[before].get(token) == target:
            self._next[before][token] = copy
            before = self._link[before]
        return copy

    def _add(self, following: dict[int, int], length: int, end: int) -> int:
        self._next.append(following)
        self._link.append(0)
        self._length.append(length)
        self._end.append(end)
        return len(self._next) - 1

    def _look_back(self) -> None:
        self.matches = []
        state = self._link[self._last]
        while state > 0 and len(self.matches) < BRANCHES:
            self.matches.append((self._length[state], self._end[state]))
            self._end[state] = len(self.tokens)
            state = self._link[state]


class NgramProposer(Proposer):
    """Prompt lookup: free, and right where text is copied."""

    name = "ngram"
    default_nodes = 16

    def __init__(self) -> None:
        self._automata: dict[Sequence, SuffixAutomaton] = {}

    @classmethod
    def open(cls, argument: str, setting: Setting) -> Self:
        """There is nothing to set."""
        if argument:
            raise UsageError(f"--spec ngram: takes no argument, found {argument!r}")
        return cls()

    def propose(self, queries: list[Query]) -> list[Tree]:
        """What followed the longest repetition; a second path where a shorter one went on in another way."""
        return [self._propose(query) for query in queries]

    def forget(self, sequence: Sequence) -> None:
        """Its automaton."""
        self._automata.pop(sequence, None)

    def _propose(self, query: Query) -> Tree:
        automaton = self._automata.setdefault(query.sequence, SuffixAutomaton())
        for token in query.sequence.tokens[len(automaton.tokens) :]:
            automaton.append(token)
        matches = [match for match in automaton.matches if match[0] >= MIN_MATCH]
        tree, room = Tree(), query.nodes
        for number, (length, end) in enumerate(matches):
            doubtful = length < CERTAIN_MATCH and number + 1 < len(matches)
            path = automaton.continuation(end, min(query.depth, room - room // 4 if doubtful else room))
            if path and tree.find(-1, path[0]) is None:
                parents = (-1, *range(len(tree), len(tree) + len(path) - 1))
                tree = Tree((*tree.tokens, *path), (*tree.parents, *parents))
                room -= len(path)
        return tree
