"""8-bit floats with a scale for each block: plain loops, and transformers' own dequantization."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray
from quantized_files import FP8, Packed, pack_fp8, write_quantized

from llmc.compiler.checkpoint import Checkpoint
from llmc.compiler.quantized_weights import is_quantized
from llmc.compiler.weights import read
from llmc.errors import LlmcError

NAME = "model.layers.0.mlp.down_proj.weight"


@pytest.mark.parametrize("block", [(32, 32), (64, 16), (40, 48), None])
def test_values_and_codes(tmp_path: Path, block: tuple[int, int] | None) -> None:
    """Blocks of 40 x 48 end in smaller ones; groups that the engine has keep the codes."""
    config = FP8 | {"weight_block_size": list(block) if block else None}
    expected = write_quantized(tmp_path, config, lambda w, r: pack_fp8(w, r, block), "bfloat16")
    checkpoint = Checkpoint.open(tmp_path)
    for name in checkpoint.names:
        source = checkpoint.weight(name)
        np.testing.assert_array_equal(read(source).astype(np.float32), expected[name].astype(np.float32), name)
        if name.endswith("proj.weight"):
            assert is_quantized(source)
            assert (source.scheme.format, source.zero, source.dtype) == ("fp8", None, "bfloat16")
            rows = source.quantized_rows(7, 20).dequantize().astype(ml_dtypes.bfloat16)
            np.testing.assert_array_equal(rows.astype(np.float32), expected[name][7:20])


def test_like_transformers(tmp_path: Path) -> None:
    import torch
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    kept: dict[str, NDArray[np.float32]] = {}

    def by_library(weight: NDArray[np.float32], random: np.random.Generator) -> Packed:
        tensors, _ = pack_fp8(weight, random)
        codes = torch.from_numpy(tensors["weight"].view(np.uint8)).view(torch.float8_e4m3fn)
        scale = torch.from_numpy(tensors["weight_scale_inv"])
        found = Fp8Dequantize(None)._dequantize_one(codes, scale, torch.bfloat16)
        return tensors, found.to(torch.float32).numpy()

    kept |= write_quantized(tmp_path, FP8, by_library, "bfloat16")
    values = read(Checkpoint.open(tmp_path).weight(NAME)).astype(np.float32)
    np.testing.assert_array_equal(values, kept[NAME])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weight_block_size": [128]}, "weight_block_size must be two numbers above 0, found [128]"),
        ({"weight_block_size": [64, 64]}, "weight_scale_inv': has the shape [2, 2], expected [1, 1] for [64, 64]"),
        ({"fmt": "e5m2"}, "fmt 'e5m2' is not supported; supported: e4m3"),
    ],
)
def test_what_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    write_quantized(tmp_path, FP8 | changes, pack_fp8, "bfloat16")
    with pytest.raises(LlmcError) as error:
        Checkpoint.open(tmp_path)
    assert message in str(error.value)


@pytest.mark.parametrize("lost", ["weight_scale_inv", "weight"])
def test_missing_tensors(tmp_path: Path, lost: str) -> None:
    def incomplete(weight: NDArray[np.float32], random: np.random.Generator) -> Packed:
        tensors, values = pack_fp8(weight, random)
        if weight.shape == (64, 96):
            del tensors[lost]
        return tensors, values

    write_quantized(tmp_path, FP8, incomplete, "bfloat16")
    with pytest.raises(LlmcError, match=f"down_proj.{lost}'?:? is missing"):
        Checkpoint.open(tmp_path)
