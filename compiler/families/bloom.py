"""BLOOM."""

from typing import Any

from torch import Tensor, nn
from transformers import BloomConfig

from llmc.compiler.families import alibi
from llmc.compiler.families.base import Fix, modules_of
from llmc.compiler.hooks import attend


def _patch(model: nn.Module, max_seq_len: int) -> None:
    for attention in modules_of(model, "BloomAttention"):
        attention.register_buffer("alibi_slopes", alibi.slopes(attention.num_heads), persistent=False)
        attention.forward = _forward(attention)


def _forward(attention: Any) -> Any:
    def forward(hidden_states: Tensor, residual: Tensor, **_: Any) -> tuple[Tensor, None]:
        batch, tokens, _width = hidden_states.shape
        fused = attention.query_key_value(hidden_states).view(batch, tokens, attention.num_heads, 3, attention.head_dim)
        q, k, v = (x.transpose(1, 2) for x in fused.unbind(3))
        out = attend(q, k, v, scale=attention.inv_norm_factor, slopes=attention.alibi_slopes)
        return attention.dense(out.reshape(batch, tokens, -1)) + residual, None

    return forward


FIX = Fix(
    architectures=("BloomForCausalLM",),
    why="its attention does not ask the attention interface, and takes ALiBi as a tensor over one sequence",
    patch=_patch,
    tiny=lambda: BloomConfig(vocab_size=128, hidden_size=64, n_layer=2, n_head=4),
)
