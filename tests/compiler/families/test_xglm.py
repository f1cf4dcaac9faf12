"""xglm: its fix is needed, and makes each of its architectures right."""

import pytest
from more_configs import BART
from packed import check_fix, differences
from transformers import CONFIG_MAPPING

from llmc.compiler.families import xglm


def test_fix() -> None:
    check_fix(xglm.FIX)


@pytest.mark.parametrize("model_type", ["trocr", "mvp"])
def test_architectures(model_type: str) -> None:
    assert max(differences(CONFIG_MAPPING[model_type](**BART))) < 1e-4
