"""MPT."""

from typing import Any

from torch import Tensor, nn
from transformers import MptConfig

from llmc.compiler.families import alibi
from llmc.compiler.families.base import Fix, modules_of
from llmc.compiler.hooks import attend


def _patch(model: nn.Module, max_seq_len: int) -> None:
    for attention in modules_of(model, "MptAttention"):
        attention.register_buffer("alibi_slopes", alibi.slopes(attention.n_heads), persistent=False)
        attention.forward = _forward(attention)


def _forward(attention: Any) -> Any:
    def forward(hidden_states: Tensor, **_: Any) -> tuple[Tensor, None]:
        batch, tokens, _width = hidden_states.shape
        fused = attention.Wqkv(hidden_states)
        if attention.clip_qkv:
            fused = fused.clamp(-attention.clip_qkv, attention.clip_qkv)
        heads = (batch, tokens, attention.n_heads, attention.head_dim)
        q, k, v = (x.reshape(heads).transpose(1, 2) for x in fused.chunk(3, 2))
        out = attend(q, k, v, scale=attention.softmax_scale, slopes=attention.alibi_slopes)
        return attention.out_proj(out.reshape(batch, tokens, -1)), None

    return forward


FIX = Fix(
    architectures=("MptForCausalLM",),
    why="its attention does not ask the attention interface, and takes ALiBi as a tensor over one sequence",
    patch=_patch,
    tiny=lambda: MptConfig(vocab_size=128, d_model=64, n_layers=2, n_heads=4, expansion_ratio=2, max_seq_len=256),
)
