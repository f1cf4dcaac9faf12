"""doge: its fix is needed, and makes it right."""

import pytest
from configs import SIZES
from packed import check_fix, differences
from transformers import DogeConfig

from llmc.compiler.families import doge
from llmc.compiler.trace import trace
from llmc.errors import CompileError


def test_fix() -> None:
    check_fix(doge.FIX)


def test_a_window() -> None:
    assert max(differences(DogeConfig(**SIZES, sliding_window=8))) < 1e-4


def test_experts_are_refused() -> None:
    """Transformers cuts the router's logits across tokens, so that a token's experts depend on later tokens."""
    config = DogeConfig(**SIZES, is_moe=True, num_experts=16, num_experts_per_tok=2)
    with pytest.raises(CompileError, match=r"model\.layers\.0\.mlp: aten\.view\.default mixes the tokens"):
        trace(config, max_seq_len=256)


def test_a_sequence_longer_than_the_window_is_refused() -> None:
    with pytest.raises(CompileError, match="choose --max-seq-len 256 or less"):
        trace(doge.FIX.tiny(), max_seq_len=257)
