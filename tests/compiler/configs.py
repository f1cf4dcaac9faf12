"""The decoders that have to work: one small config each, and how to compare it with transformers.

``CONFIGS[name]`` is a ``Config``. Every size is set, since the defaults make large models.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from transformers.models.auto.configuration_auto import CONFIG_MAPPING

MAX_LEN = 256

TOKENS = {"vocab_size": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SIZES = TOKENS | {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_LEN,
    "tie_word_embeddings": False,
}
NO_GQA = {key: value for key, value in SIZES.items() if key != "num_key_value_heads"}
"""For families without grouped queries."""
PLAIN = {key: value for key, value in NO_GQA.items() if key != "intermediate_size"}
"""For families that derive the width of the MLP as well."""
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
FINE_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
ROUTED_EXPERTS = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
MLA = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
SLIDING_THEN_FULL = ["sliding_attention", "full_attention"]


@dataclass(frozen=True)
class Config:
    """A small model of one architecture."""

    model_type: str
    values: Mapping[str, Any]
    reference: str = "eager"
    """Attention of transformers to compare with."""
    max_len: int = MAX_LEN
    """The engine's longest sequence, which decides on the regime of ropes that switch."""
    tags: frozenset[str] = field(default_factory=frozenset)

    def make(self) -> Any:
        """The config object."""
        return CONFIG_MAPPING[self.model_type](**copy.deepcopy(dict(self.values)))


def rope(kind: str, **values: Any) -> dict[str, Any]:
    """The rope_parameters of a config."""
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **values}}


CONFIGS: dict[str, Config] = {
    # plain transformers with a half rope
    "llama": Config("llama", SIZES),
    "llama_tied_bias": Config("llama", SIZES | {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    "llama_llama3_rope": Config(
        "llama",
        SIZES
        | rope(
            "llama3",
            rope_theta=500000.0,
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=64,
        ),
    ),
    "llama_linear_rope": Config("llama", SIZES | rope("linear", factor=2.0)),
    "llama_yarn": Config("llama", SIZES | rope("yarn", factor=4.0, original_max_position_embeddings=64)),
    "llama_dynamic_ntk": Config("llama", SIZES | rope("dynamic", factor=2.0)),
    "mistral": Config("mistral", SIZES | {"sliding_window": 8, "head_dim": 16}),
    "ministral": Config("ministral", SIZES | {"sliding_window": 8, "head_dim": 16}),
    "qwen2": Config("qwen2", SIZES | {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}),
    "qwen3": Config("qwen3", SIZES | {"head_dim": 16}),
    "gemma": Config("gemma", SIZES | {"head_dim": 16, "tie_word_embeddings": True}),
    "gemma2": Config(
        "gemma2",
        SIZES | {"head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 16, "tie_word_embeddings": True},
    ),
    "gemma3_text": Config(
        "gemma3_text",
        SIZES
        | {
            "head_dim": 16,
            "sliding_window": 8,
            "query_pre_attn_scalar": 16,
            "tie_word_embeddings": True,
            "layer_types": ["sliding_attention", *SLIDING_THEN_FULL],
        },
    ),
    "gemma3n_text": Config(
        "gemma3n_text",
        SIZES
        | {
            "head_dim": 16,
            "sliding_window": 8,
            "num_hidden_layers": 4,
            "num_kv_shared_layers": 2,
            "layer_types": SLIDING_THEN_FULL * 2,
            "vocab_size_per_layer_input": 128,
            "hidden_size_per_layer_input": 16,
            "laurel_rank": 8,
            "activation_sparsity_pattern": [0.95, 0.0, 0.5, 0.0],
            "altup_num_inputs": 2,
        },
    ),
    "gemma4_text": Config(
        "gemma4_text",
        SIZES
        | {
            "head_dim": 16,
            "global_head_dim": 16,
            "sliding_window": 8,
            "num_hidden_layers": 4,
            "layer_types": SLIDING_THEN_FULL * 2,
            "vocab_size_per_layer_input": 128,
            "hidden_size_per_layer_input": 16,
        },
    ),
    "phi3": Config("phi3", SIZES | {"sliding_window": 8}),
    "phi3_longrope": Config(
        "phi3",
        SIZES
        | {"original_max_position_embeddings": 64}
        | rope(
            "longrope",
            short_factor=[1.0 + 0.1 * i for i in range(8)],
            long_factor=[2.0 + 0.3 * i for i in range(8)],
            factor=4.0,
            original_max_position_embeddings=64,
        ),
        max_len=64,
    ),
    "starcoder2": Config("starcoder2", SIZES | {"sliding_window": 8, "use_bias": True}),
    "olmo": Config("olmo", SIZES | {"clip_qkv": 0.5}),
    "olmo2": Config("olmo2", SIZES),
    "granite": Config(
        "granite",
        SIZES
        | {
            "embedding_multiplier": 12.0,
            "logits_scaling": 8.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.1,
        },
    ),
    "smollm3": Config("smollm3", SIZES | {"no_rope_layers": [1, 1, 0]}),
    "exaone4": Config("exaone4", SIZES | {"sliding_window": 8, "sliding_window_pattern": 3}),
    "apertus": Config("apertus", SIZES),
    "diffllama": Config("diffllama", SIZES),
    # partial, interleaved or permuted ropes
    "phi": Config("phi", SIZES | {"partial_rotary_factor": 0.5}),
    "gpt_neox": Config("gpt_neox", NO_GQA),
    "stablelm": Config("stablelm", SIZES | {"partial_rotary_factor": 0.25, "use_qkv_bias": True}),
    "gptj": Config(
        "gptj",
        TOKENS | {"n_embd": 64, "n_layer": 3, "n_head": 4, "rotary_dim": 8, "n_positions": MAX_LEN, "n_inner": 96},
    ),
    "glm4": Config("glm4", SIZES | {"head_dim": 16}),
    "cohere": Config("cohere", SIZES | {"use_qk_norm": True}),
    "cohere2": Config(
        "cohere2",
        SIZES | {"sliding_window": 8, "head_dim": 16, "layer_types": ["sliding_attention", *SLIDING_THEN_FULL]},
    ),
    "ernie4_5": Config("ernie4_5", SIZES | {"head_dim": 16}),
    # learned or no positions, ALiBi
    "gpt2": Config("gpt2", PLAIN | {"tie_word_embeddings": True}),
    "gpt_bigcode": Config("gpt_bigcode", PLAIN),
    "opt": Config("opt", PLAIN | {"ffn_dim": 96, "word_embed_proj_dim": 64}),
    "biogpt": Config("biogpt", NO_GQA),
    "xglm": Config(
        "xglm",
        TOKENS
        | {
            "d_model": 64,
            "ffn_dim": 96,
            "num_layers": 3,
            "attention_heads": 4,
            "max_position_embeddings": MAX_LEN,
            "tie_word_embeddings": True,
        },
    ),
    "gpt_neo": Config(
        "gpt_neo",
        TOKENS
        | {
            "hidden_size": 64,
            "num_layers": 4,
            "num_heads": 4,
            "intermediate_size": 96,
            "max_position_embeddings": MAX_LEN,
            "attention_types": [[["global", "local"], 2]],
            "window_size": 8,
        },
    ),
    "bloom": Config("bloom", PLAIN),
    "mpt": Config(
        "mpt", TOKENS | {"d_model": 64, "n_heads": 4, "n_layers": 3, "expansion_ratio": 2, "max_seq_len": MAX_LEN}
    ),
    "falcon_rotary": Config(
        "falcon",
        PLAIN
        | {
            "multi_query": True,
            "new_decoder_architecture": False,
            "parallel_attn": True,
            "alibi": False,
            "ffn_hidden_size": 96,
        },
    ),
    "falcon_new": Config(
        "falcon",
        PLAIN
        | {
            "num_kv_heads": 2,
            "new_decoder_architecture": True,
            "parallel_attn": True,
            "alibi": False,
            "ffn_hidden_size": 96,
        },
    ),
    # transformers' eager attention adds falcon's ALiBi twice
    "falcon_alibi": Config(
        "falcon",
        PLAIN
        | {
            "multi_query": False,
            "new_decoder_architecture": False,
            "parallel_attn": False,
            "alibi": True,
            "bias": True,
            "ffn_hidden_size": 96,
        },
        reference="sdpa",
    ),
    # latent attention
    "deepseek_v2": Config("deepseek_v2", SIZES | MLA | ROUTED_EXPERTS | {"topk_method": "greedy"}),
    "deepseek_v3": Config("deepseek_v3", SIZES | MLA | ROUTED_EXPERTS | {"n_group": 2}),
    "minicpm3": Config("minicpm3", SIZES | MLA),
    # mixtures of experts
    "qwen2_moe": Config(
        "qwen2_moe", SIZES | FINE_EXPERTS | {"shared_expert_intermediate_size": 48, "decoder_sparse_step": 1}
    ),
    "qwen3_moe": Config(
        "qwen3_moe", SIZES | FINE_EXPERTS | {"head_dim": 16, "decoder_sparse_step": 1, "norm_topk_prob": True}
    ),
    "mixtral": Config("mixtral", SIZES | EXPERTS | {"sliding_window": 8}),
    "olmoe": Config("olmoe", SIZES | {"num_experts": 4, "num_experts_per_tok": 2}),
    "granitemoe": Config("granitemoe", SIZES | EXPERTS),
    "granitemoehybrid_attention": Config(
        "granitemoehybrid", SIZES | EXPERTS | {"shared_intermediate_size": 48, "layer_types": ["attention"] * 3}
    ),
    "glm4_moe": Config("glm4_moe", SIZES | ROUTED_EXPERTS | {"head_dim": 16}),
    "gpt_oss": Config("gpt_oss", SIZES | EXPERTS | {"head_dim": 16, "sliding_window": 8}),
    "phimoe": Config("phimoe", SIZES | EXPERTS),
    "llama4_text": Config(
        "llama4_text",
        SIZES
        | {
            "head_dim": 16,
            "num_hidden_layers": 4,
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "intermediate_size_mlp": 96,
            "attention_chunk_size": 8,
            "interleave_moe_layer_step": 2,
            "no_rope_layers": [1, 1, 1, 0],
            "floor_scale": 4,
            "attn_scale": 0.3,
        },
    ),
    "jetmoe": Config("jetmoe", SIZES | EXPERTS | {"num_attention_heads": 4, "kv_channels": 16}),
}
