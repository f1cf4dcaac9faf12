"""GPT, the first one."""

from typing import Any

from torch import Tensor
from transformers import OpenAIGPTConfig

from llmc.compiler.families.base import Fix
from llmc.compiler.hooks import attend


def _patch(model: Any, max_seq_len: int) -> None:
    for block in model.transformer.h:
        block.attn.forward = _forward(block.attn)


def _forward(attention: Any) -> Any:
    def forward(x: Tensor, *_: Any, **__: Any) -> list[Tensor]:
        batch, tokens, width = x.shape
        heads = (batch, tokens, attention.n_head, width // attention.n_head)
        q, k, v = (part.view(heads).transpose(1, 2) for part in attention.c_attn(x).split(attention.split_size, 2))
        out = attend(q, k, v, scale=heads[-1] ** -0.5 if attention.scale else 1.0)
        return [attention.c_proj(out.reshape(batch, tokens, -1))]

    return forward


FIX = Fix(
    architectures=("OpenAIGPTLMHeadModel",),
    why="its attention cuts its masks out of a table of one sequence",
    patch=_patch,
    tiny=lambda: OpenAIGPTConfig(vocab_size=128, n_embd=64, n_layer=2, n_head=4, n_positions=256),
)
