"""Rotary embedding: the reference against complex rotations, the kernels' bits, and positions out of range."""

import numpy as np
import pytest
import torch

from llmc.plugins import kernels
from llmc.plugins.rope.reference import pairing, reference

ISAS = pytest.mark.parametrize("isa", kernels.isas())
NAMES = ("half", "interleaved", "partial", "permuted", "scale")


def angles(size: int, positions: int) -> np.ndarray:
    return np.arange(positions)[:, None] * 10000.0 ** (-np.arange(0, size, 2) / size)


def cos_sin(size: int, positions: int) -> np.ndarray:
    """The table of the half and interleaved pairings: cosines, then sines."""
    angle = angles(size, positions)
    return np.concatenate([np.cos(angle), np.sin(angle)], 1).astype(np.float32)


@pytest.mark.parametrize("name", ["half", "interleaved"])
def test_the_reference_turns_pairs_of_dims_as_complex_numbers(name: str) -> None:
    size, heads = 16, 3
    index, sign, _ = pairing(name, size)
    x = np.random.default_rng(0).standard_normal((5, heads, size))
    positions = np.array([0, 1, 7, 30, 2])
    table = cos_sin(size, 31)
    found = reference(*map(torch.from_numpy, (x, positions, table, index, sign))).numpy()
    first, second = (slice(0, 8), slice(8, 16)) if name == "half" else (slice(0, 16, 2), slice(1, 16, 2))
    turned = (x[..., first] + 1j * x[..., second]) * np.exp(1j * angles(size, 31)[positions])[:, None]
    np.testing.assert_allclose(found[..., first], turned.real, 1e-6, 1e-6)
    np.testing.assert_allclose(found[..., second], turned.imag, 1e-6, 1e-6)


def test_scores_depend_on_distance_only() -> None:
    size = 32
    index, sign, _ = pairing("half", size)
    q, k = np.random.default_rng(1).standard_normal((2, 1, 1, size)).astype(np.float32)

    def turned(x: np.ndarray, position: int) -> np.ndarray:
        y = np.empty_like(x)
        kernels.run_op("rope", [x, np.array([position], np.int32), cos_sin(size, 200), index, sign], [y])
        return y.ravel()

    scores = [float(turned(q, p + 5) @ turned(k, p)) for p in (0, 3, 60, 190)]
    np.testing.assert_allclose(scores, scores[0], 1e-5, 1e-5)


@ISAS
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", [2, 6, 20, 64, 80])
def test_a_row_has_the_same_bits_in_any_batch(isa: str, name: str, size: int) -> None:
    generator = np.random.default_rng(size)
    index, sign, columns = pairing(name, size)
    table = generator.standard_normal((50, columns), np.float32)
    x = generator.standard_normal((90, 3, size), np.float32)
    positions = generator.integers(0, 50, 90)
    whole = np.empty_like(x)
    kernels.run_op("rope", [x, positions, table, index, sign], [whole], isa=isa, threads=2)
    given = map(torch.from_numpy, (x.astype(np.float64), positions, table, index, sign))
    np.testing.assert_allclose(whole, reference(*given), 1e-6, 1e-6)
    for row in (0, 44, 89):
        alone = np.empty_like(x[:1])
        inputs = [x[row : row + 1], positions[row : row + 1].astype(np.int32), table, index, sign]
        kernels.run_op("rope", inputs, [alone], isa=isa)
        np.testing.assert_array_equal(alone[0], whole[row])


@ISAS
def test_heads_may_be_slices_and_outputs_narrower(isa: str) -> None:
    index, sign, columns = pairing("half", 16)
    index, sign = np.ascontiguousarray(index[:, :12]), np.ascontiguousarray(sign[:, :12])
    generator = np.random.default_rng(2)
    table, merged = generator.standard_normal((9, columns), np.float32), generator.standard_normal((4, 100), np.float32)
    x = np.lib.stride_tricks.as_strided(merged[:, 10:], (4, 3, 16), (400, 64, 4))
    positions = np.arange(4, dtype=np.int32)
    y = np.empty((4, 3, 12), np.float32)
    kernels.run_op("rope", [x, positions, table, index, sign], [y], isa=isa)
    given = map(torch.from_numpy, (x.copy(), positions, table, index, sign))
    np.testing.assert_allclose(y, reference(*given), 1e-6, 1e-6)


@pytest.mark.parametrize("position", [-1, 50])
def test_positions_out_of_range_are_refused(position: int) -> None:
    index, sign, columns = pairing("half", 8)
    x, table = np.ones((2, 1, 8), np.float32), np.ones((50, columns), np.float32)
    with pytest.raises(kernels.KernelError, match=rf"position {position} is beyond the 50 positions of the engine"):
        kernels.run_op("rope", [x, np.array([3, position], np.int32), table, index, sign], [x.copy()])


def test_indices_out_of_range_are_refused() -> None:
    index, sign, columns = pairing("half", 8)
    x, table = np.ones((1, 1, 8), np.float32), np.ones((50, columns), np.float32)
    for row in range(4):
        bad = index.copy()
        bad[row, 3] = 8
        with pytest.raises(kernels.KernelError, match="index points outside"):
            kernels.run_op("rope", [x, np.zeros(1, np.int32), table, bad, sign], [x.copy()])
