"""What norm means, against torch's own norms and arithmetic by hand."""

import pytest
import torch
from torch.nn import functional

from llmc.plugins.norm.reference import reference as norm


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(5, 3, 24, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 0.5


def test_layer_is_layer_norm(x: torch.Tensor) -> None:
    weight, bias = torch.randn(2, 24, dtype=torch.float64)
    expected = functional.layer_norm(x, (24,), weight, bias, 1e-5)
    torch.testing.assert_close(norm(x, weight, bias, epsilon=1e-5, kind="layer", offset=0.0), expected)


def test_rms_is_rms_norm(x: torch.Tensor) -> None:
    weight = torch.randn(24, dtype=torch.float64)
    expected = functional.rms_norm(x, (24,), weight, 1e-6)
    torch.testing.assert_close(norm(x, weight, None, epsilon=1e-6, kind="rms", offset=0.0), expected)


def test_l2_has_length_one(x: torch.Tensor) -> None:
    torch.testing.assert_close(
        norm(x, None, None, epsilon=1e-6, kind="l2", offset=0.0), functional.normalize(x, dim=-1)
    )


def test_the_offset_is_added_to_the_weight(x: torch.Tensor) -> None:
    weight = torch.randn(24, dtype=torch.float64)
    found = norm(x, weight, None, epsilon=1e-6, kind="rms", offset=1.0)
    torch.testing.assert_close(found, norm(x, weight + 1, None, epsilon=1e-6, kind="rms", offset=0.0))


def test_a_weight_may_differ_by_head(x: torch.Tensor) -> None:
    weight = torch.randn(3, 24, dtype=torch.float64)
    found = norm(x, weight, None, epsilon=1e-6, kind="layer", offset=0.0)
    for head in range(3):
        alone = norm(x[:, head], weight[head], None, epsilon=1e-6, kind="layer", offset=0.0)
        torch.testing.assert_close(found[:, head], alone)


def test_epsilon_decides_on_tiny_rows() -> None:
    x = torch.full((1, 4), 1e-3, dtype=torch.float64)
    assert norm(x, None, None, epsilon=1e-6, kind="rms", offset=0.0)[0, 0].item() == pytest.approx(1e-3 / 2e-6**0.5)


def test_halves_are_computed_in_float32() -> None:
    x = torch.randn(4, 4096).to(torch.bfloat16)
    found = norm(x, None, None, epsilon=1e-6, kind="rms", offset=0.0)
    assert found.dtype == torch.bfloat16
    expected = norm(x.double(), None, None, epsilon=1e-6, kind="rms", offset=0.0)
    torch.testing.assert_close(found.double(), expected, rtol=2**-8, atol=0)
