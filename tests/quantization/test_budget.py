import itertools

import numpy as np
import pytest

from llmc.errors import UsageError
from llmc.quantization import budget
from llmc.quantization.budget import Candidate, pareto_front, parse_budget


def layers(count: int, choices: int, seed: int = 0, sizes: int = 1000) -> dict[str, list[Candidate]]:
    """Whole numbers as damage, so that sums are exact in any order."""
    rng = np.random.default_rng(seed)
    return {
        f"layer{i}": [
            Candidate(f"c{j}", int(rng.integers(1, sizes)), float(rng.integers(0, 1000))) for j in range(choices)
        ]
        for i in range(count)
    }


def all_assignments(given: dict[str, list[Candidate]]) -> np.ndarray:
    """[assignments, 2]: sizes and damages."""
    return np.array(
        [(sum(c.bits for c in chosen), sum(c.damage for c in chosen)) for chosen in itertools.product(*given.values())]
    )


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("sizes", [5, 1000])
def test_the_best_of_all_assignments_is_found(seed: int, sizes: int) -> None:
    given = layers(6, 4, seed, sizes)
    front, everything = pareto_front(given), all_assignments(given)
    for bits in np.linspace(everything[:, 0].min(), everything[:, 0].max(), 13):
        found = front.within_size(bits)
        assert found.bits <= bits
        assert found.damage == everything[everything[:, 0] <= bits, 1].min()
    for damage in np.linspace(everything[:, 1].min(), everything[:, 1].max(), 13):
        found = front.within_damage(damage)
        assert found.damage <= damage
        assert found.bits == everything[everything[:, 1] <= damage, 0].min()


def test_assignments_add_up() -> None:
    given = layers(7, 3)
    front = pareto_front(given)
    assert len(front) > 5
    for i in range(len(front)):
        assignment = front.at(i)
        assert list(assignment.labels) == list(given)
        chosen = [next(c for c in given[name] if c.label == label) for name, label in assignment.labels.items()]
        assert assignment.bits == sum(c.bits for c in chosen) == front.bits[i]
        assert assignment.damage == sum(c.damage for c in chosen) == front.damage[i]
    assert (np.diff(front.bits) > 0).all()
    assert (np.diff(front.damage) < 0).all()


def test_long_fronts_are_cut_close_to_the_best(monkeypatch: pytest.MonkeyPatch) -> None:
    given = layers(8, 4)
    exact = pareto_front(given)
    monkeypatch.setattr(budget, "_MOST_POINTS", 60)
    short = pareto_front(given)
    assert len(short) <= 61
    assert short.bits[0] == exact.bits[0]
    assert short.damage[-1] == exact.damage[-1]
    for bits in np.linspace(exact.bits[0] * 1.3, exact.bits[-1], 9):
        assert short.within_size(bits).damage <= exact.within_size(bits * 0.95).damage


def test_a_large_model_takes_no_longer_than_a_cup_of_coffee() -> None:
    front = pareto_front(layers(200, 4, sizes=10_000_000))
    assert 1000 < len(front) <= 20_001
    assert front.within_size(float(front.bits[-1])).damage == front.damage[-1]


def test_damage_that_measures_as_negative_is_taken_as_it_is() -> None:
    front = pareto_front({"a": [Candidate("int4", 4, -0.5), Candidate("int8", 8, 0.1)], "b": [Candidate("int4", 4, 1)]})
    assert len(front) == 1
    assert front.at(0).labels == {"a": "int4", "b": "int4"}


def test_of_equal_candidates_the_first_counts() -> None:
    front = pareto_front({"a": [Candidate("x", 4, 1.0), Candidate("y", 4, 1.0)]})
    assert front.within_damage(1).labels == {"a": "x"}


def test_the_table_goes_from_the_smallest_to_the_best() -> None:
    front = pareto_front(layers(8, 4))
    table = front.table(10)
    assert 3 < len(table) <= 10
    assert table[0].bits == front.bits[0]
    assert table[-1].damage == front.damage[-1]
    assert sorted(row.bits for row in table) == [row.bits for row in table]


def test_what_can_not_be_kept_is_an_error_with_what_can() -> None:
    front = pareto_front({"a": [Candidate("int4", 400, 2.0), Candidate("int8", 800, 0.5)]})
    with pytest.raises(UsageError, match="399 bits are too few; the smallest assignment takes 400"):
        front.within_size(399)
    with pytest.raises(UsageError, match=r"0\.4 at most: the best assignment does 0\.5"):
        front.within_damage(0.4)


def test_budgets_are_bits_per_weight() -> None:
    assert parse_budget("4.3bpw") == 4.3
    assert parse_budget(" 5 bpw ") == 5
    for text in ("4.3", "bpw", "-4bpw", "0bpw", "4.3 bits", "99bpw"):
        with pytest.raises(UsageError, match=r"expected bits per weight, such as 4\.3bpw"):
            parse_budget(text)
