"""BERT-like decoders: Megatron-BERT, RemBERT, BigBird, RoFormer."""

from typing import Any

from torch import Tensor
from transformers import MegatronBertConfig

from llmc.compiler.families.base import Fix, modules_of
from llmc.compiler.hooks import attend
from llmc.errors import CompileError

_ATTENTION = ("MegatronBertSelfAttention", "RemBertSelfAttention", "BigBirdSelfAttention", "RoFormerSelfAttention")


def _patch(model: Any, max_seq_len: int) -> None:
    if type(model).__name__ == "BigBirdForCausalLM":
        model.bert.set_attention_type("original_full")  # as transformers does once there is a cache
    for name in _ATTENTION:
        for attention in modules_of(model, name):
            if not attention.is_decoder:
                raise CompileError(f"{name}: attention to later tokens (is_decoder is false) is not supported")
            attention.forward = _forward(attention)


def _forward(attention: Any) -> Any:
    rotates = hasattr(attention, "apply_rotary_position_embeddings")

    def forward(
        hidden_states: Tensor, attention_mask: Any = None, sinusoidal_pos: Tensor | None = None, *_: Any, **__: Any
    ) -> tuple[Tensor, None]:
        batch, tokens, _width = hidden_states.shape
        heads = (batch, tokens, attention.num_attention_heads, attention.attention_head_size)
        projections = (attention.query, attention.key, attention.value)
        q, k, v = (project(hidden_states).view(heads).transpose(1, 2) for project in projections)
        if rotates and attention.rotary_value:
            q, k, v = attention.apply_rotary_position_embeddings(sinusoidal_pos, q, k, v)
        elif rotates:
            q, k = attention.apply_rotary_position_embeddings(sinusoidal_pos, q, k)
        out = attend(q, k, v, scale=attention.attention_head_size**-0.5)
        return out.reshape(batch, tokens, -1), None

    return forward


FIX = Fix(
    architectures=("MegatronBertForCausalLM", "RemBertForCausalLM", "BigBirdForCausalLM", "RoFormerForCausalLM"),
    why="their attention does not ask the attention interface",
    patch=_patch,
    tiny=lambda: MegatronBertConfig(
        vocab_size=128,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=96,
        max_position_embeddings=256,
        is_decoder=True,
        pad_token_id=0,
    ),
)
