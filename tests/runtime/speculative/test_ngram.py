"""What is proposed is what followed the longest repetition."""

import random

import pytest

from llmc.errors import UsageError
from llmc.runtime.request import Request, SamplingParams
from llmc.runtime.speculative.base import Query
from llmc.runtime.speculative.ngram import NgramProposer, SuffixAutomaton


def longest_repetition(tokens: list[int]) -> int:
    """By trying: the longest suffix that occurred before its last place."""
    for length in range(len(tokens) - 1, 0, -1):
        suffix = tokens[-length:]
        if any(tokens[i : i + length] == suffix for i in range(len(tokens) - length)):
            return length
    return 0


@pytest.mark.parametrize("seed", range(20))
def test_the_automaton_finds_the_longest_repetition(seed: int) -> None:
    rng = random.Random(seed)
    automaton, tokens = SuffixAutomaton(), []
    for _ in range(120):
        token = rng.randrange(1 + seed % 5)
        if tokens and rng.random() < 0.3:  # copy from somewhere
            token = tokens[rng.randrange(len(tokens))]
        tokens.append(token)
        automaton.append(token)
        length, end = automaton.matches[0] if automaton.matches else (0, 0)
        assert length == longest_repetition(tokens)
        if length:
            assert tokens[end - length : end] == tokens[-length:]
            assert end < len(tokens)


def test_periodic_text_goes_on() -> None:
    automaton = SuffixAutomaton()
    for token in (1, 2, 3, 1, 2, 3, 1):
        automaton.append(token)
    _, end = automaton.matches[0]
    assert automaton.continuation(end, 7) == [2, 3, 1, 2, 3, 1, 2]


def test_paths_fit_and_differ() -> None:
    proposer = NgramProposer()
    prompt = [9, 1, 2, 5, 5, 1, 2, 7, 7, 9, 1, 2]  # "9 1 2" was followed by 5, "1 2" later by 7
    (sequence,) = Request(0, prompt, SamplingParams(), 50).sequences
    (tree,) = proposer.propose([Query(sequence, nodes=8, depth=3)])
    assert tree.tokens == (5, 5, 1, 7, 7, 9)
    assert tree.parents == (-1, 0, 1, -1, 3, 4)
    sequence.tokens += [7, 7, 9]
    (tree,) = proposer.propose([Query(sequence, nodes=2, depth=9)])
    assert tree.tokens == (1, 2)
    proposer.forget(sequence)
    (tree,) = proposer.propose([Query(sequence, nodes=2, depth=9)])
    assert tree.tokens == (1, 2)


def test_without_repetition_nothing_is_proposed() -> None:
    (sequence,) = Request(0, list(range(3, 40)), SamplingParams(), 50).sequences
    assert len(NgramProposer().propose([Query(sequence, nodes=8, depth=8)])[0]) == 0
    with pytest.raises(UsageError, match="takes no argument"):
        NgramProposer.open("x", None)  # type: ignore[arg-type]
