"""MXFP4 experts as gpt-oss stores them: transformers' own dequantization says what they are."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from llmc.compiler.prequantized.base import read_quantized
from llmc.compiler.quantized_views import find_quantized
from llmc.compiler.weights import Array, Transpose, read
from llmc.errors import LlmcError

STEM = "model.layers.0.mlp.experts.gate_up_proj"


class Model:
    """What is looked at of a model."""

    base_model_prefix = "model"

    def named_modules(self) -> list[Any]:
        return []


def arrays() -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    random = np.random.default_rng(0)
    blocks = random.integers(0, 256, (3, 10, 2, 16), dtype=np.uint8)
    return blocks, random.integers(100, 140, (3, 10, 2), dtype=np.uint8)


def test_like_transformers() -> None:
    """[experts, in, out] as the model has it; seen from the outputs, the codes are kept as int8."""
    import torch
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    blocks, scales = arrays()
    expected = convert_moe_packed_tensors(torch.from_numpy(blocks), torch.from_numpy(scales)).float().numpy()
    tensors = {f"{STEM}_blocks": Array(blocks), f"{STEM}_scales": Array(scales)}
    found, _ = read_quantized({"quant_method": "mxfp4"}, tensors, "config.json", None, Model())
    assert set(found) == {STEM}
    values = read(found[STEM])
    assert values.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(values.astype(np.float32), expected)
    kept = find_quantized(Transpose(found[STEM], (0, 2, 1)))
    assert kept is not None
    assert (kept.scheme.format, kept.scheme.group) == ("int8", 32)
    rows = kept.quantized_rows(0, 30).dequantize().reshape(3, 10, 64)
    np.testing.assert_array_equal(rows, expected.transpose(0, 2, 1))


@pytest.mark.parametrize("scales", [None, np.zeros((3, 10, 3), np.uint8)])
def test_scales_that_do_not_fit(scales: NDArray[np.uint8] | None) -> None:
    tensors = {f"{STEM}_blocks": Array(arrays()[0])} | ({} if scales is None else {f"{STEM}_scales": Array(scales)})
    with pytest.raises(LlmcError, match=r"gate_up_proj_scales' (is missing|has the shape \[3, 10, 3\])"):
        read_quantized({"quant_method": "mxfp4"}, tensors, "config.json", None, Model())
