"""The tree of guesses: chosen by what it gains for what it costs, or given."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmc.compiler.medusa.tree import COSTS, RANKS, choose, given_tree, read_cost, shown, step_cost
from llmc.errors import EngineError, UsageError
from llmc.runtime.heads import HeadTree

FREE = ((1, 1.0), (64, 1.0))
DEAR = ((1, 1.0), (2, 2.0), (64, 64.0))


def ranks() -> Any:
    """1000 places: head 1 is right with rank 0, 1 or 2 in 60, 20 and 5 %, head 2 only where head 1 had rank 0."""
    first = np.repeat([0, 1, 2, RANKS], [600, 200, 50, 150])
    second = np.where(np.arange(1000) < 400, 0, np.where(np.arange(1000) < 500, 1, RANKS))
    return np.stack([first, second], axis=1)


def test_the_best_nodes_come_first_and_count_together() -> None:
    choice = choose(ranks(), FREE, 0.0)
    assert choice.tree.paths == ((0,), (0, 0), (1,), (0, 1), (2,))
    assert choice.tree.gains == (0.6, 0.4, 0.2, 0.1, 0.05) and choice.nodes == 5
    assert choice.tokens_per_step == choice.speedup == pytest.approx(1 + 0.85 + 0.5)
    assert choice.tree.accuracy[0][:4] == (0.6, 0.2, 0.05, 0)
    choice.tree.check("here")
    assert shown(choice.tree, 99) == "5 nodes, 3, 2 at depth 1 to 2; 2 heads of 99 tokens"


def test_of_rows_that_cost_much_few_are_expected_to_pay_but_a_step_can_choose_from_all() -> None:
    every = choose(ranks(), FREE, 0.0).tree
    assert choose(ranks(), DEAR, 0.0).nodes == 1
    some = choose(ranks(), ((1, 1.0), (3, 1.05), (4, 1.5), (64, 30.0)), 0.0)
    assert some.nodes == 2 and some.tree == every
    assert some.speedup == pytest.approx(2 / 1.05, abs=1e-4)
    assert choose(ranks(), FREE, 1.0).speedup == pytest.approx(2.35 / 2)


def test_heads_that_are_never_right_are_refused() -> None:
    with pytest.raises(UsageError, match="are these heads of this model"):
        choose(np.full((10, 2), RANKS), FREE, 0.0)


def test_costs_between_and_beyond_what_is_known() -> None:
    cost = ((1, 1.0), (3, 2.0), (5, 4.0))
    assert [step_cost(cost, rows) for rows in (1, 2, 3, 4, 7)] == [1, 1.5, 2, 3, 6]
    for table in COSTS.values():
        assert read_cost([list(pair) for pair in table], "here") == table
    for damaged in (None, [], [[1, 1.0]], [[1, 1.0], ["2", 1.0]], [[1, 1.0], [2, 0]]):
        with pytest.raises(UsageError, match="the table of costs is damaged"):
            read_cost(damaged, "here")


def test_trees_that_are_given(tmp_path: Path) -> None:
    assert given_tree("auto", 3) is None
    assert given_tree("chain:2", 3) == HeadTree(3, ((0,), (0, 0)))
    path = tmp_path / "tree.json"
    path.write_text(json.dumps({"paths": [[1], [1, 0], [0]]}))
    assert given_tree(str(path), 2) == HeadTree(2, ((1,), (1, 0), (0,)))
    path.write_text(json.dumps([[0]]))
    assert given_tree(str(path), 1) == HeadTree(1, ((0,),))


@pytest.mark.parametrize(
    ("text", "content", "message"),
    [
        ("chain:0", None, "from 1 to 2, the number of heads"),
        ("chain:3", None, "from 1 to 2"),
        ("chain:x", None, "from 1 to 2"),
        ("best", None, "expected auto, chain:N or a .json file"),
        ("none.json", None, "can't be read"),
        ("tree.json", "[[0], 1]", "expected a list of paths"),
        ("tree.json", "7", "expected a list of paths"),
        ("tree.json", "[]", "0 paths, expected 1 to 256"),
        ("tree.json", "[[0], [0]]", "is there twice"),
        ("tree.json", "[[0, 0], [0]]", r"\[0, 0\] comes before \[0\]"),
        ("tree.json", "[[0], [0, 0], [0, 0, 0]]", "has 3 tokens, but there are 2 heads"),
        ("tree.json", "[[-1]]", "a rank is 0 to 63"),
    ],
)
def test_trees_that_are_none(
    text: str, content: str | None, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if content is not None:
        Path(text).write_text(content)
    with pytest.raises(UsageError, match=message):
        given_tree(text, 2)


def test_a_tree_of_an_engine_is_checked_too() -> None:
    with pytest.raises(EngineError, match="is there twice"):
        HeadTree(1, ((0,), (0,))).check("engine")
    for gains in ((0.5,), (0.5, 1.5)):
        with pytest.raises(EngineError, match="expected a gain from 0 to 1 for each of 2 paths, or none"):
            HeadTree(1, ((0,), (1,)), (), gains).check("engine")
