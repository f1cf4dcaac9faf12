import pytest
import torch
from torch import Tensor

from llmc.passes.fx.rope_tables import Rotation, explains, find_rope, sample_positions

COUNT, HEADS, SIZE = 500, 3, 8
FREQUENCIES = 100.0 ** (-torch.arange(4) / 4)


def half(x: Tensor, positions: Tensor) -> Tensor:
    angles = positions[:, None, None] * FREQUENCIES
    a, b = x.chunk(2, -1)
    return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), -1)


def test_samples_begin_at_zero_and_reach_the_end() -> None:
    for count in (1, 2, 7, 4096, 131072):
        positions = sample_positions(count)
        assert positions[0] == 0 and positions[-1] == count - 1 and len(positions) <= 26
        assert positions.tolist() == sorted(set(positions.tolist()))


def test_finds_a_rope_with_a_compact_table() -> None:
    rope = find_rope(half, HEADS, SIZE, sample_positions(COUNT), COUNT)
    assert rope is not None
    assert rope.table.shape == (COUNT, 8)
    assert rope.index.tolist() == [
        [0, 1, 2, 3, 4, 5, 6, 7],
        [0, 1, 2, 3, 0, 1, 2, 3],
        [4, 5, 6, 7, 0, 1, 2, 3],
        [4, 5, 6, 7, 4, 5, 6, 7],
    ]
    assert rope.sign.tolist() == [[1.0] * 8, [-1.0] * 4 + [1.0] * 4]
    assert explains(rope, half, HEADS, SIZE, torch.arange(0, COUNT, 7))
    assert not explains(rope, lambda x, p: half(x, p + 1), HEADS, SIZE, torch.arange(0, COUNT, 7))


def test_what_is_not_rotated_reads_a_column_of_ones() -> None:
    def partial(x: Tensor, positions: Tensor) -> Tensor:
        return torch.cat((half(x[..., :8], positions), x[..., 8:]), -1)

    rope = find_rope(partial, HEADS, 11, sample_positions(COUNT), COUNT)
    assert rope is not None
    assert rope.table.shape == (COUNT, 9) and bool((rope.table == 1).all(0).any())
    assert rope.sign[1, 8:].tolist() == [0.0] * 3
    assert rope.index[0, 8:].tolist() == rope.index[2, 8:].tolist() == [8, 9, 10]


def test_a_chain_of_inputs_takes_three_probes() -> None:
    def cycle(x: Tensor, positions: Tensor) -> Tensor:  # each reads its neighbour: an odd cycle
        return x * (1 + positions[:, None, None]) + x.roll(1, -1) * 2

    rope = find_rope(cycle, HEADS, 5, sample_positions(COUNT), COUNT)
    assert rope is not None
    assert explains(rope, cycle, HEADS, 5, torch.arange(0, COUNT, 7))
    assert rope.table.shape == (COUNT, 2)


def test_columns_that_differ_between_the_samples_are_kept_apart() -> None:
    def almost(x: Tensor, positions: Tensor) -> Tensor:  # both halves are scaled alike but at position 4
        return x * torch.where(
            (positions[:, None, None] == 4) & (torch.arange(8) > 3), 7.0, 1.0 + positions[:, None, None]
        )

    assert 4 not in sample_positions(COUNT)
    rope = find_rope(almost, HEADS, SIZE, sample_positions(COUNT), COUNT)
    assert rope is not None
    assert explains(rope, almost, HEADS, SIZE, torch.arange(COUNT))


@pytest.mark.parametrize(
    "rotate",
    [
        pytest.param(lambda x, p: x + x.roll(1, -1) + x.roll(2, -1), id="rule 1: three inputs"),
        pytest.param(lambda x, p: x * torch.arange(8), id="rule 1: an output reads nothing"),
        pytest.param(lambda x, p: x.flip(1) + x, id="rule 1: another head"),
        pytest.param(lambda x, p: x * torch.arange(1, 4)[:, None], id="rule 1: unlike heads"),
        pytest.param(lambda x, p: x * x, id="rule 1: not linear"),
        pytest.param(lambda x, p: x * p.max() / (1 + p[:, None, None]), id="rule 2: other positions count"),
    ],
)
def test_everything_else_is_none(rotate: Rotation) -> None:
    assert find_rope(rotate, HEADS, SIZE, sample_positions(COUNT), COUNT) is None
