"""Llama 4."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import Llama4TextConfig

from llmc.compiler.families.base import Fix, modules_of
from llmc.compiler.hooks import moe
from llmc.compiler.probe import ExpertFunction, activation_name


def _patch(model: nn.Module, max_seq_len: int) -> None:
    for block in modules_of(model, "Llama4TextMoe"):
        block.forward = _forward(block)


def _forward(block: Any) -> Any:
    experts = block.experts
    function = activation_name(experts.act_fn)

    def forward(hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        x = hidden_states.reshape(-1, block.hidden_dim)
        logits = nn.functional.linear(x, block.router.weight)
        values, ids = torch.topk(logits, block.top_k, dim=1)
        y = block.shared_expert(x)
        # The score scales the input of an expert and not its output, so each choice is a call of its own.
        for choice, score in enumerate(torch.sigmoid(values).split(1, 1)):
            y = y + moe(
                x * score,
                ids[:, choice : choice + 1],
                torch.ones_like(score),
                experts.gate_up_proj.transpose(1, 2),
                experts.down_proj.transpose(1, 2),
                ExpertFunction.of(function, block),
            )
        return y, logits

    return forward


FIX = Fix(
    architectures=("Llama4ForCausalLM", "Llama4ForConditionalGeneration"),
    why="its experts do not ask the experts interface: every token goes through all of them",
    patch=_patch,
    tiny=lambda: Llama4TextConfig(
        vocab_size=128,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=96,
        intermediate_size_mlp=96,
        num_local_experts=4,
        num_experts_per_tok=2,
        attention_chunk_size=8,
        interleave_moe_layer_step=1,
        no_rope_layers=[1, 0],
        max_position_embeddings=256,
    ),
)
