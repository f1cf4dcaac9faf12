"""XGLM, and decoders with the same attention: TrOCR, MVP."""

from typing import Any

from torch import Tensor, nn
from transformers import XGLMConfig

from llmc.compiler.families.base import Fix, modules_of
from llmc.compiler.hooks import attend
from llmc.errors import CompileError


def _patch(model: nn.Module, max_seq_len: int) -> None:
    for name in ("XGLMAttention", "TrOCRAttention", "MvpAttention"):
        for attention in modules_of(model, name):
            attention.forward = _forward(attention)


def _forward(attention: Any) -> Any:
    def forward(hidden_states: Tensor, attn_prompt: Tensor | None = None, **_: Any) -> tuple[Tensor, None]:
        if attn_prompt is not None:
            raise CompileError("MvpAttention: prompts of keys and values are not supported")
        batch, tokens, _width = hidden_states.shape
        heads = (batch, tokens, attention.num_heads, attention.head_dim)
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        q, k, v = (project(hidden_states).view(heads).transpose(1, 2) for project in projections)
        out = attend(q, k, v, scale=attention.scaling)
        return attention.out_proj(out.reshape(batch, tokens, -1)), None

    return forward


FIX = Fix(
    architectures=("XGLMForCausalLM", "TrOCRForCausalLM", "MvpForCausalLM"),
    why="their attention does not ask the attention interface",
    patch=_patch,
    tiny=lambda: XGLMConfig(
        vocab_size=128, d_model=64, ffn_dim=96, num_layers=2, attention_heads=4, max_position_embeddings=256
    ),
)
