"""sparse_attention: dense while the indexer would pick every token, refused beyond."""

import pytest
from configs import ROUTED_EXPERTS, SIZES
from packed import check_fix, differences
from transformers import GlmMoeDsaConfig

from llmc.compiler.families import sparse_attention
from llmc.compiler.trace import trace
from llmc.errors import CompileError

INDEXER = {"index_n_heads": 2, "index_head_dim": 16, "index_topk": 256}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}


def test_fix() -> None:
    check_fix(sparse_attention.FIX)


def test_glm() -> None:
    assert max(differences(GlmMoeDsaConfig(**SIZES | LATENT | ROUTED_EXPERTS | INDEXER))) < 1e-4


def test_a_sequence_longer_than_what_is_picked_is_refused() -> None:
    with pytest.raises(CompileError, match="sparse attention to 256 tokens is not supported for sequences of 257"):
        trace(sparse_attention.FIX.tiny(), max_seq_len=257)
