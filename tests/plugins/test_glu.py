import torch

from llmc.plugins.glu.reference import reference


def test_values_by_hand() -> None:
    gate, up = (
        torch.tensor([[0.0, 1.0, -2.0]], dtype=torch.float64),
        torch.tensor([[5.0, 2.0, 3.0]], dtype=torch.float64),
    )
    sigmoid = 1 / (1 + torch.exp(-gate))
    torch.testing.assert_close(reference(gate, up, function="silu"), gate * sigmoid * up)
    torch.testing.assert_close(reference(gate, up, function="sigmoid"), sigmoid * up)
    assert reference(gate, up, function="relu2").tolist() == [[0.0, 2.0, 0.0]]


def test_gelu_is_known_at_one() -> None:
    """Hendrycks and Gimpel (2016): gelu(1) = Phi(1) = 0.841345."""
    one = torch.ones(1, 1, dtype=torch.float64)
    torch.testing.assert_close(reference(one, one, function="gelu"), 0.8413447460685429 * one)
    torch.testing.assert_close(reference(one, one, function="gelu_tanh"), 0.8411919906082768 * one)
