"""Doge."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import DogeConfig
from transformers.models.doge.modeling_doge import apply_rotary_pos_emb

from llmc.compiler.families.base import Fix, modules_of
from llmc.compiler.hooks import Mask, attend
from llmc.errors import CompileError


def _patch(model: nn.Module, max_seq_len: int) -> None:
    for attention in modules_of(model, "DogeAttention"):
        picked = attention.keep_window_size
        if max_seq_len > picked:
            raise CompileError(
                f"DogeAttention: attention to the {picked} tokens with the largest bias is not supported; up to that "
                f"length it attends to all: choose --max-seq-len {picked} or less"
            )
        attention.forward = _forward(attention)


def _forward(attention: Any) -> Any:
    def forward(
        hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], attention_mask: Mask, **_: Any
    ) -> tuple[Tensor, None]:
        """Each key has a bias, which becomes one more component of the key, times 1 in the query."""
        heads = (*hidden_states.shape[:-1], -1, attention.head_dim)
        q = attention.q_norm(attention.q_proj(hidden_states).view(heads)).transpose(1, 2)
        k = attention.k_norm(attention.k_proj(hidden_states).view(heads)).transpose(1, 2)
        values = attention.v_proj(hidden_states)
        bias = torch.exp(attention.A * functional.softplus(attention.dt_proj(values)))
        q, k = apply_rotary_pos_emb(q, k, *position_embeddings)
        q = torch.cat([q, torch.ones_like(q[..., :1])], -1)
        k = torch.cat([k, (bias / attention.scaling).transpose(1, 2)[..., None]], -1)
        out = attend(q, k, values.view(heads).transpose(1, 2), scale=attention.scaling, window=attention_mask.window)
        return attention.o_proj(out.flatten(2)), None

    return forward


FIX = Fix(
    architectures=("DogeForCausalLM",),
    why="it adds a bias for each key to the mask, which it takes for a tensor",
    patch=_patch,
    tiny=lambda: DogeConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        keep_window_size=256,
    ),
)
