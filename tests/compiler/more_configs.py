"""More decoders of transformers that work as they are, or with a family fix; see configs.py.

They show that nothing is fitted to the first list. Many accept the common sizes and need no more.
"""

from __future__ import annotations

from typing import Any

from configs import EXPERTS, FINE_EXPERTS, MAX_LEN, MLA, NO_GQA, PLAIN, ROUTED_EXPERTS, SIZES, SLIDING_THEN_FULL, Config

SMALL = SIZES | {"num_hidden_layers": 2}
HEADS = SMALL | {"head_dim": 16}
WINDOW = {"sliding_window": 8}
SHARED = {"shared_expert_intermediate_size": 48, "shared_intermediate_size": 48}
DECODER = {"is_decoder": True, "type_vocab_size": 2}
BART = {
    "vocab_size": 128,
    "d_model": 64,
    "decoder_layers": 2,
    "decoder_attention_heads": 4,
    "decoder_ffn_dim": 96,
    "encoder_layers": 1,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 96,
    "max_position_embeddings": MAX_LEN,
    "is_decoder": True,
    "is_encoder_decoder": False,
}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}

VALUES: dict[str, dict[str, Any]] = {
    # dense
    "arcee": HEADS,
    "bitnet": SMALL,
    "codegen": {
        **PLAIN,
        "n_embd": 64,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": MAX_LEN,
        "n_inner": 96,
        "rotary_dim": 8,
    },
    "ctrl": {"vocab_size": 128, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": MAX_LEN, "dff": 96},
    "cwm": HEADS | WINDOW,
    "dory": HEADS | WINDOW,
    "exaone": HEADS,
    "glm": HEADS,
    "gpt_neox_japanese": NO_GQA | {"intermediate_multiple_size": 2},
    "granite_swa": SMALL | WINDOW,
    "helium": HEADS,
    "hrm_text": HEADS,
    "hunyuan_v1_dense": HEADS,
    "hyperclovax": HEADS,
    "jais2": HEADS,
    "ministral3": HEADS | WINDOW,
    "modernbert-decoder": NO_GQA,
    "moshi": HEADS | WINDOW | {"ffn_dim": 96},
    "nanochat": SMALL,
    "nemotron": HEADS,
    "olmo3": SMALL | WINDOW,
    "openai-gpt": {"vocab_size": 128, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": MAX_LEN},
    "persimmon": NO_GQA,
    "seed_oss": HEADS,
    "vaultgemma": HEADS | WINDOW,
    "youtu": SMALL | MLA,
    # mixtures of experts
    "afmoe": HEADS | FINE_EXPERTS | WINDOW,
    "aria_text": HEADS | {"moe_num_experts": 4, "moe_topk": 2},
    "axk1": SMALL | MLA | ROUTED_EXPERTS,
    "beam": HEADS | FINE_EXPERTS | WINDOW | {"n_group": 1, "topk_group": 1},
    "cohere2_moe": HEADS | FINE_EXPERTS | WINDOW,
    "dbrx": {
        "vocab_size": 128,
        "d_model": 64,
        "n_heads": 4,
        "n_layers": 2,
        "max_seq_len": MAX_LEN,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 1.0, "rope_theta": 10000.0},
        "ffn_config": {"hidden_size": 64, "ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "dots1": SMALL | ROUTED_EXPERTS | WINDOW,
    "ernie4_5_moe": SMALL | {"moe_intermediate_size": 32, "moe_num_experts": 4, "moe_k": 2},
    "exaone_moe": SMALL | ROUTED_EXPERTS | FINE_EXPERTS | WINDOW,
    "flex_olmo": SMALL | {"num_experts": 4, "num_experts_per_tok": 2},
    "flint": HEADS | FINE_EXPERTS | SHARED | WINDOW,
    "granitemoe_swa": SMALL | EXPERTS | SHARED | WINDOW,
    "granitemoeshared": SMALL | EXPERTS | SHARED,
    "hunyuan_v1_moe": HEADS | {"num_experts": 4, "moe_topk": 2},
    "hy_v3": HEADS | FINE_EXPERTS,
    "laguna": HEADS | FINE_EXPERTS | SHARED | WINDOW,
    "longcat_flash": {
        **{key: value for key, value in (SIZES | MLA).items() if key != "num_key_value_heads"},
        "head_dim": 8,
        "num_layers": 2,
        "n_routed_experts": 4,
        "zero_expert_num": 2,
        "moe_topk": 2,
        "expert_ffn_hidden_size": 32,
        "ffn_hidden_size": 96,
    },
    "mellum": HEADS | FINE_EXPERTS | WINDOW,
    "mimo_v2_flash": HEADS | ROUTED_EXPERTS | WINDOW | {"v_head_dim": 16},
    "minimax_m2": HEADS | EXPERTS,
    "minimax_m3_vl_text": HEADS | EXPERTS | SHARED | {"rotary_dim": 8},
    "solar_open": HEADS | ROUTED_EXPERTS,
    # sparse attention, dense within its reach
    "deepseek_v32": SMALL | MLA | ROUTED_EXPERTS | {"index_topk": MAX_LEN, "index_n_heads": 2, "index_head_dim": 16},
    "glm_moe_dsa": SMALL | MLA | ROUTED_EXPERTS | {"index_topk": MAX_LEN, "index_n_heads": 2, "index_head_dim": 16},
    # hybrids whose layers are all attention
    "lfm2": SMALL | {"layer_types": ["full_attention"] * 2},
    "qwen3_next": HEADS | FINE_EXPERTS | SHARED | {"layer_types": ["full_attention"] * 2},
    # decoders from families of encoders
    "bart": BART,
    "bert": NO_GQA | DECODER,
    "roberta": NO_GQA | DECODER,
    "roformer": NO_GQA | DECODER,
    # the text part of multimodal models
    "emu3": {"text_config": HEADS},
    "gemma3": {
        "text_config": HEADS | WINDOW | {"query_pre_attn_scalar": 16, "layer_types": SLIDING_THEN_FULL},
        "vision_config": VISION,
        "image_token_index": 100,
        "boi_token_index": 101,
        "eoi_token_index": 102,
        "mm_tokens_per_image": 4,
    },
}
MORE = {name: Config(name, values) for name, values in VALUES.items()}
