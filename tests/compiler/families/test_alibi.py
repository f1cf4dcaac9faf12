"""ALiBi slopes: those of the paper for a power of two, those of transformers otherwise."""

import pytest
import torch
from transformers.models.bloom.modeling_bloom import _get_alibi_slopes
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

from llmc.compiler.families import alibi


def test_the_papers_example() -> None:
    assert alibi.slopes(8).tolist() == [2.0**-i for i in range(1, 9)]


@pytest.mark.parametrize("heads", [1, 2, 3, 6, 12, 16, 25, 112])
def test_equals_bloom_and_mpt(heads: int) -> None:
    found = alibi.slopes(heads)
    torch.testing.assert_close(found, _get_alibi_slopes(heads, torch.device("cpu")), rtol=1e-6, atol=0)
    torch.testing.assert_close(found, -build_mpt_alibi_tensor(heads, 2)[:, 0, 0], rtol=1e-6, atol=0)
