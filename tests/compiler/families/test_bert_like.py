"""bert_like: its fix is needed, and makes each of its architectures right."""

from typing import Any

import pytest
from configs import NO_GQA
from packed import check_fix, differences
from transformers import CONFIG_MAPPING, BigBirdConfig, RemBertConfig, RoFormerConfig

from llmc.compiler.families import bert_like
from llmc.compiler.trace import trace
from llmc.errors import CompileError


def test_fix() -> None:
    check_fix(bert_like.FIX)


@pytest.mark.parametrize(
    "config",
    [
        lambda: BigBirdConfig(**NO_GQA, is_decoder=True, attention_type="block_sparse"),
        lambda: RemBertConfig(
            **NO_GQA, is_decoder=True, input_embedding_size=32, output_embedding_size=48, classifier_dropout_prob=0.0
        ),
        lambda: RoFormerConfig(**NO_GQA, is_decoder=True),
        lambda: RoFormerConfig(**NO_GQA, is_decoder=True, rotary_value=True),
    ],
    ids=["big_bird", "rembert", "roformer", "roformer with rotated values"],
)
def test_architectures(config: Any) -> None:
    assert max(differences(config())) < 1e-4


@pytest.mark.parametrize("model_type", ["megatron-bert", "roformer", "bert"])
def test_encoders_are_refused(model_type: str) -> None:
    with pytest.raises(CompileError, match="attention to later tokens"):
        trace(CONFIG_MAPPING[model_type](**NO_GQA, is_decoder=False), max_seq_len=64)
