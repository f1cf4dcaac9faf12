"""LongCat-Flash."""

from typing import Any

from torch import Tensor, nn
from transformers import LongcatFlashConfig

from llmc.compiler.families.base import Fix, modules_of
from llmc.compiler.hooks import moe
from llmc.compiler.probe import ExpertFunction, activation_name


def _patch(model: nn.Module, max_seq_len: int) -> None:
    for experts in modules_of(model, "LongcatFlashExperts"):
        experts.forward = _forward(experts)


def _forward(experts: Any) -> Any:
    function = ExpertFunction.of(activation_name(experts.act_fn), experts)
    routed = experts.num_routed_experts

    def forward(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Experts from ``routed`` on hand their input on; llmc::moe leaves them out."""
        kept = (top_k_weights * (top_k_index >= routed)).sum(-1, keepdim=True)
        weights = (experts.gate_up_proj[:routed], experts.down_proj)
        y: Tensor = moe(hidden_states, top_k_index, top_k_weights, *weights, function) + hidden_states * kept
        return y

    return forward


FIX = Fix(
    architectures=("LongcatFlashForCausalLM",),
    why="its experts do not ask the experts interface, and some of them compute nothing",
    patch=_patch,
    tiny=lambda: LongcatFlashConfig(
        vocab_size=128,
        hidden_size=64,
        ffn_hidden_size=96,
        num_layers=2,
        num_attention_heads=4,
        head_dim=8,
        q_lora_rank=24,
        kv_lora_rank=16,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=16,
        n_routed_experts=4,
        zero_expert_num=2,
        moe_topk=2,
        expert_ffn_hidden_size=32,
        max_position_embeddings=256,
    ),
)
