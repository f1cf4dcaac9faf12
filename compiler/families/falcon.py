"""Falcon."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import FalconConfig
from transformers.models.falcon.modeling_falcon import apply_rotary_pos_emb

from llmc.compiler.families import alibi
from llmc.compiler.families.base import Fix, modules_of
from llmc.compiler.hooks import attend


def _patch(model: Any, max_seq_len: int) -> None:
    for attention in modules_of(model, "FalconAttention"):
        if attention.config.alibi:
            # Falcon adds ALiBi before the scores are scaled, and rounds the slopes to bfloat16.
            slopes = alibi.slopes(attention.num_heads).to(torch.bfloat16).float() * attention.inv_norm_factor
            attention.register_buffer("alibi_slopes", slopes, persistent=False)
        attention.forward = _forward(attention)
    if model.config.alibi:
        # The model would merge ALiBi into the mask, which it takes for a tensor.
        model.transformer.use_alibi = False
        model.transformer.rotary_emb = _NoRope()


class _NoRope(nn.Module):
    """In the place of a rotary embedding that ALiBi does without."""

    def forward(self, hidden_states: Tensor, position_ids: Tensor) -> None:
        """Nothing."""


def _forward(attention: Any) -> Any:
    def forward(hidden_states: Tensor, position_embeddings: Any = None, **_: Any) -> tuple[Tensor, None]:
        batch, tokens, _width = hidden_states.shape
        q, k, v = (x.transpose(1, 2) for x in _heads(attention, attention.query_key_value(hidden_states)))
        slopes = None
        if attention.config.alibi:
            slopes = attention.alibi_slopes
        else:
            q, k = apply_rotary_pos_emb(q, k, *position_embeddings)
        out = attend(q, k, v, scale=attention.inv_norm_factor, slopes=slopes)
        return attention.dense(out.reshape(batch, tokens, -1)), None

    return forward


def _heads(attention: Any, fused: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[1, T, heads, size] of queries, keys and values; keys and values are not repeated for the groups of queries.

    The rows of the fused product are grouped by kv head: its queries, its key, its value.
    """
    batch, tokens, _ = fused.shape
    kv_heads = attention.num_kv_heads
    group = attention.num_heads // kv_heads
    grouped = fused.view(batch, tokens, kv_heads, group + 2, attention.head_dim)
    q, k, v = torch.split(grouped, [group, 1, 1], 3)
    return q.flatten(2, 3), k.flatten(2, 3), v.flatten(2, 3)


FIX = Fix(
    architectures=("FalconForCausalLM",),
    why="the attention class is chosen in __init__, before the attention interface is asked",
    patch=_patch,
    tiny=lambda: FalconConfig(
        vocab_size=128,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        ffn_hidden_size=96,
        alibi=True,
        multi_query=False,
        parallel_attn=False,
        bias=True,
    ),
    reference="sdpa",  # eager adds ALiBi twice, so it is no yardstick
)
