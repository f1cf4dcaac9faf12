"""Norms: the reference against PyTorch's modules, and what must not change a row's bits."""

import numpy as np
import pytest
import torch
from torch import nn
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from llmc.plugins import kernels
from llmc.plugins.norm import KINDS
from llmc.plugins.norm.reference import reference

ISAS = pytest.mark.parametrize("isa", kernels.isas())


def run(x: np.ndarray, *parameters: np.ndarray | None, isa: str, threads: int = 1, **attributes: object) -> np.ndarray:
    y = np.full(x.shape, np.nan, np.float32)
    values = {"epsilon": 1e-5, "kind": "rms", "offset": 0.0} | attributes
    kernels.run_op("norm", [x, *parameters], [y], values, isa=isa, threads=threads)  # type: ignore[arg-type]
    return y


def test_the_reference_is_what_pytorch_computes() -> None:
    x, weight, bias = torch.randn(5, 24), torch.randn(24), torch.randn(24)
    layer, rms = nn.LayerNorm(24, eps=1e-4), nn.RMSNorm(24, eps=1e-4)
    layer.weight.data, layer.bias.data, rms.weight.data = weight, bias, weight
    close = torch.testing.assert_close
    close(reference(x, weight, bias, epsilon=1e-4, kind="layer", offset=0.0), layer(x).detach())
    close(reference(x, weight, None, epsilon=1e-4, kind="rms", offset=0.0), rms(x).detach())
    close(reference(x, weight - 1, None, epsilon=1e-4, kind="rms", offset=1.0), rms(x).detach())
    close(reference(x, None, None, epsilon=1e-4, kind="l2", offset=0.0), nn.functional.normalize(x, dim=-1, eps=1e-4))


@ISAS
@pytest.mark.parametrize(("variant", "offset", "ulps"), [(LlamaRMSNorm, 0.0, 1), (Gemma2RMSNorm, 1.0, 0)])
def test_mth_01_order_and_dtype_of_the_weight(isa: str, variant: type[nn.Module], offset: float, ulps: int) -> None:
    """Llama rounds to bfloat16 before it multiplies by the weight, Gemma after; here nothing is rounded in between."""
    x, weight = np.arange(1, 257, dtype=np.float32)[None], np.full(256, 1.001, np.float32)
    module = variant(256, eps=1e-5)
    module.weight.data = torch.from_numpy(weight)
    wanted = module(torch.from_numpy(x).bfloat16()).detach().bfloat16().view(torch.int16).numpy()
    found = torch.from_numpy(run(x, weight, isa=isa, offset=offset)).bfloat16().view(torch.int16).numpy()
    assert np.abs(found.astype(int) - wanted).max() <= ulps


@ISAS
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", [1, 7, 16, 20, 64, 65, 576])
def test_a_row_has_the_same_bits_in_any_batch(isa: str, kind: str, width: int) -> None:
    generator = np.random.default_rng(width)
    x, weight = generator.standard_normal((172, width), np.float32), generator.standard_normal(width, np.float32)
    whole = run(x, weight, None, isa=isa, kind=kind, threads=2)
    np.testing.assert_array_equal(run(x, weight, None, isa=isa, kind=kind), whole)
    for row in (0, 77, 171):
        np.testing.assert_array_equal(run(x[row : row + 1], weight, None, isa=isa, kind=kind)[0], whole[row])


@ISAS
@pytest.mark.parametrize("shift", [0.0, 100.0, 1e4])
def test_layer_norm_stays_exact_far_from_zero(isa: str, shift: float) -> None:
    x = (np.random.default_rng(0).standard_normal((4, 576)) + shift).astype(np.float32)
    wide = x.astype(np.float64)
    wanted = (wide - wide.mean(-1, keepdims=True)) / np.sqrt(wide.var(-1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(run(x, isa=isa, kind="layer"), wanted, 1e-5, 1e-5)


@ISAS
def test_heads_have_weights_of_their_own_and_rows_may_be_strided(isa: str) -> None:
    generator = np.random.default_rng(3)
    wide, weight = generator.standard_normal((6, 200), np.float32), generator.standard_normal((4, 20), np.float32)
    x = wide[:, 40:120].reshape(6, 4, 20)
    view = np.lib.stride_tricks.as_strided(wide[:, 40:], (6, 4, 20), (800, 80, 4))
    found = run(view, weight, None, isa=isa)
    for head in range(4):
        alone = run(np.ascontiguousarray(x[:, head]), weight[head], None, isa=isa)
        np.testing.assert_array_equal(found[:, head], alone)


def test_wrong_arguments_are_refused() -> None:
    x = np.ones((3, 8), np.float32)
    with pytest.raises(kernels.KernelError, match="no kind of norm 'rns'; known: rms, layer, l2"):
        run(x, isa="scalar", kind="rns")
    with pytest.raises(kernels.KernelError, match=r"weight and bias must be float32 \[D\]"):
        run(x, np.ones(7, np.float32), isa="scalar")
    with pytest.raises(kernels.KernelError, match=r"weight and bias must be float32 \[D\]"):
        run(x, np.ones((2, 8), np.float32), isa="scalar")
