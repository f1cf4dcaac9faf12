"""Sparse attention that picks its tokens with an indexer: DeepSeek V3.2, GLM with DSA, AXK2."""

from typing import Any

from torch import nn
from transformers import DeepseekV32Config

from llmc.compiler.families.base import Fix
from llmc.compiler.hooks import AllTokens
from llmc.errors import CompileError


def _patch(model: nn.Module, max_seq_len: int) -> None:
    for name, module in model.named_modules():
        picked = getattr(module, "index_topk", None)
        if not isinstance(picked, int) or not type(module).__name__.endswith("Indexer"):
            continue
        if max_seq_len > picked:
            raise CompileError(
                f"{name}: sparse attention to {picked} tokens is not supported for sequences of {max_seq_len}; up to "
                f"{picked} it attends to all: choose --max-seq-len {picked} or less"
            )
        module.forward = _all_tokens


def _all_tokens(*_: Any, **__: Any) -> AllTokens:
    return AllTokens()


FIX = Fix(
    architectures=(
        "DeepseekV32ForCausalLM",
        "GlmMoeDsaForCausalLM",
        "AXK2ForCausalLM",
        "HYV4ForCausalLM",
        "Dots3NoteForCausalLM",
    ),
    why="its indexer attends by itself; while a sequence is no longer than what it picks, it picks everything",
    patch=_patch,
    tiny=lambda: DeepseekV32Config(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        moe_intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=24,
        kv_lora_rank=16,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=16,
        n_routed_experts=4,
        n_shared_experts=1,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        index_n_heads=2,
        index_head_dim=16,
        index_topk=256,
        max_position_embeddings=256,
    ),
)
