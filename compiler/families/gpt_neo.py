"""GPT-Neo."""

from typing import Any

from torch import Tensor, nn
from transformers import GPTNeoConfig

from llmc.compiler.families.base import Fix, modules_of
from llmc.compiler.hooks import attend


def _patch(model: nn.Module, max_seq_len: int) -> None:
    for attention in modules_of(model, "GPTNeoSelfAttention"):
        attention.forward = _forward(attention)


def _forward(attention: Any) -> Any:
    window = attention.config.window_size if attention.attention_type == "local" else 0

    def forward(hidden_states: Tensor, **_: Any) -> tuple[Tensor, None]:
        batch, tokens, _width = hidden_states.shape
        heads = (batch, tokens, attention.num_heads, attention.head_dim)
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        q, k, v = (project(hidden_states).view(heads).transpose(1, 2) for project in projections)
        out = attend(q, k, v, scale=1.0, window=window)
        return attention.out_proj(out.reshape(batch, tokens, -1)), None

    return forward


FIX = Fix(
    architectures=("GPTNeoForCausalLM",),
    why="the attention class is chosen in __init__, and it cuts its masks out of a table of one sequence",
    patch=_patch,
    tiny=lambda: GPTNeoConfig(
        vocab_size=128,
        hidden_size=64,
        num_layers=2,
        num_heads=4,
        intermediate_size=96,
        max_position_embeddings=256,
        attention_types=[[["global", "local"], 1]],
        window_size=8,
    ),
)
