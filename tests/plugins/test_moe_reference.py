"""What moe means, against the experts of transformers and loops by hand."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from transformers import GptOssConfig, MixtralConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from llmc.plugins.moe.reference import reference as moe

PLAIN = {"function": "silu", "gated": True, "interleaved": False, "alpha": 0.0, "limit": 0.0}


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))) * 0.5


def routed(experts: int = 4, tokens: int = 9, top_k: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.stack([torch.randperm(experts, generator=generator)[:top_k] for _ in range(tokens)])
    return numbers(tokens, 16), ids, torch.rand(tokens, top_k, generator=generator)


def filled(kind: Any, config: Any) -> Any:
    config._experts_implementation = "eager"
    module = kind(config).eval()
    for p in module.parameters():
        p.data = numbers(*p.shape)
    return module


def test_equals_mixtral() -> None:
    experts = filled(MixtralExperts, MixtralConfig(hidden_size=16, intermediate_size=24, num_local_experts=4))
    x, ids, weights = routed()
    found = moe(x, ids, weights, experts.gate_up_proj, experts.down_proj, None, None, **PLAIN)
    torch.testing.assert_close(found, experts(x, ids, weights))


def test_equals_gpt_oss() -> None:
    """Transposed weights, biases, gates and ups in turn, limits that bite."""
    experts = filled(GptOssExperts, GptOssConfig(hidden_size=16, intermediate_size=24, num_local_experts=4))
    experts.limit = 0.8
    x, ids, weights = routed()
    attributes = PLAIN | {"function": "gpt_oss", "interleaved": True, "alpha": experts.alpha, "limit": experts.limit}
    found = moe(
        x,
        ids,
        weights,
        experts.gate_up_proj.transpose(1, 2),
        experts.down_proj.transpose(1, 2),
        experts.gate_up_proj_bias,
        experts.down_proj_bias,
        **attributes,
    )
    torch.testing.assert_close(found, experts(x, ids, weights))


@pytest.mark.parametrize("tokens", [1, 5])
def test_experts_without_a_gate(tokens: int) -> None:
    x, ids, weights = routed(tokens=tokens)
    up, down = numbers(4, 24, 16), numbers(4, 16, 24)
    found = moe(x, ids, weights, up, down, None, None, **PLAIN | {"function": "relu2", "gated": False})
    for t in range(tokens):
        chosen = zip(ids[t].tolist(), weights[t], strict=True)
        expected = sum(w * (down[e] @ functional.relu(up[e] @ x[t]).square()) for e, w in chosen)
        torch.testing.assert_close(found[t], expected)


def test_ids_out_of_range_contribute_nothing() -> None:
    x, ids, weights = routed()
    gate_up, down = numbers(4, 48, 16), numbers(4, 16, 24)
    out_of_range = ids.clone()
    out_of_range[:, 1] = 4
    found = moe(x, out_of_range, weights, gate_up, down, None, None, **PLAIN)
    torch.testing.assert_close(found, moe(x, ids[:, :1], weights[:, :1], gate_up, down, None, None, **PLAIN))


def test_a_limit_cuts_gate_and_up() -> None:
    x, ids, weights = routed(experts=1, top_k=1)
    gate_up, down = numbers(1, 48, 16) * 5, numbers(1, 16, 24)
    found = moe(x, ids, weights, gate_up, down, None, None, **PLAIN | {"limit": 0.5})
    gate, up = functional.linear(x, gate_up[0]).chunk(2, -1)
    inner = functional.silu(gate.clamp(max=0.5)) * up.clamp(-0.5, 0.5)
    torch.testing.assert_close(found, functional.linear(inner, down[0]) * weights)
