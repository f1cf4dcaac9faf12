"""roberta: its fix is needed, and makes each of its architectures right."""

import pytest
from configs import NO_GQA
from packed import check_fix, differences
from transformers import CONFIG_MAPPING

from llmc.compiler.families import roberta


def test_fix() -> None:
    check_fix(roberta.FIX)


@pytest.mark.parametrize("model_type", ["camembert", "xlm-roberta-xl", "data2vec-text", "roberta-prelayernorm"])
def test_architectures(model_type: str) -> None:
    config = CONFIG_MAPPING[model_type](**NO_GQA, is_decoder=True)
    assert max(differences(config)) < 1e-4
