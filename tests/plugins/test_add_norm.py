import torch

from llmc.plugins.add_norm.reference import reference


def test_gives_the_sum_and_a_row_of_unit_size() -> None:
    a, b = torch.randn(2, 4, 16, dtype=torch.float64)
    total, y = reference(a, b, None, None, epsilon=0.0, kind="rms", offset=0.0)
    torch.testing.assert_close(total, a + b)
    torch.testing.assert_close(y.square().mean(-1), torch.ones(4, dtype=torch.float64))
    torch.testing.assert_close(y * total.norm(dim=-1, keepdim=True) / 4, total)


def test_equals_layer_norm_of_torch() -> None:
    a, b = torch.randn(2, 4, 16, dtype=torch.float64)
    weight, bias = torch.randn(2, 16, dtype=torch.float64)
    _, y = reference(a, b, weight - 1, bias, epsilon=1e-3, kind="layer", offset=1.0)
    torch.testing.assert_close(y, torch.nn.functional.layer_norm(a + b, (16,), weight, bias, 1e-3))
