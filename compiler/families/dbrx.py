"""DBRX."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import DbrxConfig

from llmc.compiler.families.base import Fix, modules_of
from llmc.compiler.hooks import moe
from llmc.compiler.probe import ExpertFunction, activation_name


def _patch(model: nn.Module, max_seq_len: int) -> None:
    for experts in modules_of(model, "DbrxExperts"):
        experts.forward = _forward(experts)


def _forward(experts: Any) -> Any:
    function = ExpertFunction.of(activation_name(experts.mlp.activation_fn), experts)
    shape = (experts.num_experts, experts.ffn_hidden_size, experts.hidden_size)

    def forward(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        gate, up, down = (w.view(shape) for w in (experts.mlp.w1, experts.mlp.v1, experts.mlp.w2))
        x = hidden_states.reshape(-1, experts.hidden_size)
        y = moe(x, top_k_index, top_k_weights, torch.cat([gate, up], 1), down.transpose(1, 2), function)
        return y.view(hidden_states.shape)

    return forward


FIX = Fix(
    architectures=("DbrxForCausalLM",),
    why="its experts do not ask the experts interface: they loop over the experts that some token chose",
    patch=_patch,
    tiny=lambda: DbrxConfig(
        vocab_size=128,
        d_model=64,
        n_heads=4,
        n_layers=2,
        max_seq_len=256,
        attn_config={"kv_n_heads": 2, "clip_qkv": 1.0, "rope_theta": 10000.0},
        ffn_config={"hidden_size": 64, "ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2},
    ),
)
