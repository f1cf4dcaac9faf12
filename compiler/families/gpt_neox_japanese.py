"""GPT-NeoX Japanese."""

from typing import Any

from torch import Tensor, nn
from transformers import GPTNeoXJapaneseConfig

from llmc.compiler.families.base import Fix, modules_of
from llmc.compiler.hooks import attend


def _patch(model: nn.Module, max_seq_len: int) -> None:
    for attention in modules_of(model, "GPTNeoXJapaneseAttention"):
        attention._attn = _attend(attention)


def _attend(attention: Any) -> Any:
    def forward(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, None]:
        return attend(query, key, value, scale=1 / attention.norm_factor).transpose(1, 2), None

    return forward


FIX = Fix(
    architectures=("GPTNeoXJapaneseForCausalLM",),
    why="its attention does not ask the attention interface",
    patch=_patch,
    tiny=lambda: GPTNeoXJapaneseConfig(
        vocab_size=128,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_multiple_size=2,
        max_position_embeddings=256,
    ),
)
