"""Norms, activations and gates are recognised by what they compute."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.activations import ACT2FN
from transformers.models.cohere.modeling_cohere import CohereLayerNorm
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.llama4.modeling_llama4 import Llama4TextL2Norm
from transformers.models.olmo.modeling_olmo import OlmoLayerNorm
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated

from llmc.compiler.probe import (
    ExpertFunction,
    activation_name,
    expert_function,
    name_expert_functions,
    replace_norms_and_activations,
)
from llmc.compiler.torch_ops import register_ops
from llmc.errors import CompileError
from llmc.plugins.norm.reference import reference as norm

register_ops()


def replaced(module: nn.Module) -> Any:
    """What the forward of a module was replaced by, or None."""
    replace_norms_and_activations(nn.ModuleList([module]))
    return module.__dict__.get("forward")


NORMS = {
    "llama": (lambda: LlamaRMSNorm(24, eps=1e-5), {"kind": "rms", "offset": 0.0, "epsilon": 1e-5}),
    "gemma": (lambda: GemmaRMSNorm(24, eps=1e-6), {"kind": "rms", "offset": 1.0, "epsilon": 1e-6}),
    "cohere, by head": (lambda: CohereLayerNorm((3, 24), eps=1e-5), {"kind": "layer", "offset": 0.0, "epsilon": 1e-5}),
    "olmo, no weight": (lambda: OlmoLayerNorm(24), {"kind": "layer", "offset": 0.0, "epsilon": 1e-5}),
    "llama4's l2 is rms": (lambda: Llama4TextL2Norm(1e-6), {"kind": "rms", "offset": 0.0, "epsilon": 1e-6}),
    "torch layer": (lambda: nn.LayerNorm(24, eps=1e-12), {"kind": "layer", "offset": 0.0, "epsilon": 1e-12}),
    "torch rms": (lambda: nn.RMSNorm(24, eps=1e-6), {"kind": "rms", "offset": 0.0, "epsilon": 1e-6}),
}


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("name", NORMS)
def test_norms(name: str, device: str) -> None:
    make, attributes = NORMS[name]
    with torch.device(device):
        module = make()
    assert replaced(module) is not None
    module = module.to_empty(device="cpu")
    for p in module.parameters():
        p.data = torch.randn(p.shape)
    x = torch.randn(5, 3, 24) * 1e-3
    weights = (module._parameters.get("weight"), module._parameters.get("bias"))
    torch.testing.assert_close(module(x), norm(x, *weights, **attributes))


class Scaled(nn.Module):
    """Nearly a norm: the third power of the values is averaged."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(24))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x / (x.abs() ** 3).mean(-1, keepdim=True) ** (1 / 3)


@pytest.mark.parametrize(
    "make",
    [Scaled, lambda: Qwen3NextRMSNormGated(24), lambda: nn.Linear(24, 24), lambda: nn.Embedding(24, 24), nn.Identity],
    ids=["another power", "gated", "linear", "embedding", "identity"],
)
def test_what_is_no_norm_stays(make: Any) -> None:
    assert replaced(make()) is None


def test_instances_that_compute_different_things_are_told_apart() -> None:
    class Act(nn.Module):
        def __init__(self, function: Any) -> None:
            super().__init__()
            self.function = function

        def forward(self, x: Tensor) -> Tensor:
            return self.function(x)

    model = nn.ModuleList([Act(functional.silu), Act(torch.tanh), Act(functional.mish)])
    replace_norms_and_activations(model)
    x = torch.randn(7)
    torch.testing.assert_close(model[0](x), functional.silu(x))
    torch.testing.assert_close(model[1](x), torch.tanh(x))
    assert "forward" not in model[2].__dict__


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("silu", "silu"),
        ("gelu", "gelu"),
        ("gelu_new", "gelu_tanh"),
        ("gelu_fast", "gelu_tanh"),
        ("gelu_pytorch_tanh", "gelu_tanh"),
        ("quick_gelu", "quick_gelu"),
        ("relu", "relu"),
        ("relu2", "relu2"),
        ("sigmoid", "sigmoid"),
        ("tanh", "tanh"),
        ("mish", None),
        ("leaky_relu", None),
    ],
)
def test_activations(name: str, expected: str | None) -> None:
    assert activation_name(ACT2FN[name]) == expected


class Experts(nn.Module):
    """Just enough of a class with the experts interface."""

    has_gate = True

    def __init__(self, gate: Any, **attributes: float) -> None:
        super().__init__()
        self.gate = gate
        self.__dict__.update(attributes)

    def _apply_gate(self, x: Tensor) -> Tensor:
        return self.gate(self, x)


def interleaved(self: Any, x: Tensor) -> Tensor:
    gate, up = x[..., ::2].clamp(max=self.limit), x[..., 1::2].clamp(-self.limit, self.limit)
    return (up + 1) * gate * torch.sigmoid(gate * self.alpha)


def clamped(self: Any, x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return functional.silu(gate.clamp(max=self.swiglu_limit)) * up.clamp(-self.swiglu_limit, self.swiglu_limit)


@pytest.mark.parametrize(
    ("experts", "expected"),
    [
        (Experts(lambda s, x: functional.gelu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1]), ExpertFunction("gelu", True)),
        (Experts(interleaved, alpha=1.702, limit=7.0), ExpertFunction("gpt_oss", True, True, 1.702, 7.0)),
        (Experts(clamped, swiglu_limit=10.0), ExpertFunction("silu", True, limit=10.0)),
    ],
    ids=["gelu", "gpt_oss", "limited"],
)
def test_gates_of_experts(experts: Experts, expected: ExpertFunction) -> None:
    name_expert_functions(experts)
    assert expert_function(experts) == expected


def test_an_unknown_gate_is_refused() -> None:
    experts = Experts(lambda s, x: x.chunk(2, -1)[0] * 2)
    name_expert_functions(experts)
    with pytest.raises(CompileError, match="what its experts compute between their two products is not known"):
        expert_function(experts)
