"""The reference against complex numbers, and what a rotation must keep."""

import pytest
import torch

from llmc.plugins.rope.reference import pairing, reference


def inputs(name: str, size: int = 8, positions: int = 30) -> tuple[torch.Tensor, ...]:
    index, sign, columns = pairing(name, size)
    half = columns // 2
    angles = torch.arange(positions)[:, None].double() * 10.0 ** (-torch.arange(half) / 4)
    table = torch.cat((angles.cos(), angles.sin(), torch.ones(positions, columns - 2 * half)), 1)
    return table, torch.from_numpy(index), torch.from_numpy(sign), angles


@pytest.mark.parametrize("name", ["half", "interleaved"])
def test_is_a_product_of_complex_numbers(name: str) -> None:
    table, index, sign, angles = inputs(name)
    x = torch.randn(5, 2, 8, dtype=torch.float64)
    ids = torch.tensor([0, 3, 29, 3, 1])
    y = reference(x, ids, table, index, sign)
    pairs = [(i, i + 4) for i in range(4)] if name == "half" else [(2 * i, 2 * i + 1) for i in range(4)]
    for number, (a, b) in enumerate(pairs):
        turned = torch.complex(x[..., a], x[..., b]) * torch.polar(
            torch.ones(5, 1).double(), angles[ids, number : number + 1]
        )
        torch.testing.assert_close(torch.complex(y[..., a], y[..., b]), turned)


def test_scores_depend_on_the_distance_alone() -> None:
    """Su et al. (2021), section 3.2: <R_m q, R_n k> is a function of m - n."""
    table, index, sign, _ = inputs("half")
    q, k = torch.randn(2, 1, 1, 8, dtype=torch.float64)

    def score(m: int, n: int) -> float:
        turned = [reference(x, torch.tensor([p]), table, index, sign) for x, p in ((q, m), (k, n))]
        return float((turned[0] * turned[1]).sum())

    assert score(7, 2) == pytest.approx(score(25, 20), abs=1e-12)
    assert score(7, 2) != pytest.approx(score(8, 2), abs=1e-3)


def test_a_single_term_and_position_zero_change_nothing() -> None:
    table, index, sign, _ = inputs("partial")
    x = torch.randn(2, 3, 8, dtype=torch.float64)
    y = reference(x, torch.tensor([0, 9]), table, index, sign)
    torch.testing.assert_close(y[0], x[0])
    torch.testing.assert_close(y[1, :, 4:], x[1, :, 4:])
    assert float((y - x)[1, :, :4].abs().max()) > 0.01
