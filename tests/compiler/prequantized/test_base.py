"""What all quantized checkpoints have in common: refusals, notes, and the packing of codes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import llama_arrays, write_llama, write_model
from quantized_files import AWQ, SIZES, edit_config, pack_awq, pack_words, write_quantized

from llmc.compiler.checkpoint import Checkpoint
from llmc.compiler.prequantized.base import kinds, read_quantized
from llmc.compiler.prequantized.sources import unpack
from llmc.compiler.quantized_views import find_quantized
from llmc.compiler.weights import Array, Transpose, read
from llmc.errors import CheckpointError, CompileError, LlmcError


def test_kinds() -> None:
    assert sorted(kinds()) == ["awq", "bitsandbytes", "compressed-tensors", "fp8", "gptq", "mxfp4", "torchao"]


@pytest.mark.parametrize("method", ["quanto", "hqq", None, 3])
def test_a_method_that_is_not_known(tmp_path: Path, method: Any) -> None:
    write_quantized(tmp_path, AWQ | {"quant_method": method}, pack_awq)
    with pytest.raises(CompileError, match=rf"quantized by {method!r}, which is not supported; supported: awq, "):
        Checkpoint.open(tmp_path)


def test_a_config_that_is_no_object(tmp_path: Path) -> None:
    write_llama(tmp_path, quantization_config="awq")
    with pytest.raises(CheckpointError, match="quantization_config must be an object, found 'awq'"):
        Checkpoint.open(tmp_path)


def test_a_config_without_quantized_tensors(tmp_path: Path) -> None:
    write_llama(tmp_path, quantization_config=AWQ)
    with pytest.raises(CheckpointError, match="says awq, but none of the tensors is quantized"):
        Checkpoint.open(tmp_path)


def test_quantized_tensors_without_a_config(tmp_path: Path) -> None:
    write_quantized(tmp_path, AWQ, pack_awq)
    values = json.loads((tmp_path / "config.json").read_text())
    del values["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match=r"14 of 21 tensors are missing: .*; tensors that no parameter takes: "):
        Checkpoint.open(tmp_path)


def test_a_weight_that_is_there_twice(tmp_path: Path) -> None:
    def twice(weight: Any, random: Any) -> Any:
        tensors, values = pack_awq(weight, random)
        return tensors | {"weight": values.astype(np.float16)}, values

    write_quantized(tmp_path, AWQ, twice)
    with pytest.raises(CheckpointError, match=r"holds 'model.layers.0.*weight' both quantized and as floats"):
        Checkpoint.open(tmp_path)


def test_keys_that_nobody_knows_are_told(tmp_path: Path) -> None:
    write_quantized(tmp_path, AWQ, pack_awq)
    edit_config(tmp_path, new_key=3, no_value=None, off=False)
    warnings = Checkpoint.open(tmp_path).warnings
    assert any(warning.endswith("keys that were not looked at: new_key") for warning in warnings)


def test_an_older_key(tmp_path: Path) -> None:
    """compressed-tensors was called compression_config once."""
    write_quantized(tmp_path, AWQ, pack_awq)
    text = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(text.replace('"quantization_config"', '"compression_config"'))
    assert Checkpoint.open(tmp_path).names


@pytest.mark.parametrize(
    ("name", "array", "message"),
    [
        ("qweight", np.zeros((64, 8), np.int64), "qweight' is int64, expected int32"),
        ("qzeros", np.zeros((3, 8), np.int32), "qzeros' has the shape [3, 8], expected [2, 8]"),
        ("scales", np.zeros((2, 64), np.int32), "scales' is int32, expected float16 or bfloat16 or float32"),
        ("qweight", np.zeros(64, np.int32), "qweight' has the shape [64], expected [any, any]"),
        ("qweight", np.zeros((0, 8), np.int32), "qweight': has the shape [0, 8]: it is empty"),
    ],
)
def test_tensors_of_another_dtype_or_shape(tmp_path: Path, name: str, array: Any, message: str) -> None:
    def broken(weight: Any, random: Any) -> Any:
        tensors, values = pack_awq(weight, random)
        return (tensors | {name: array} if weight.shape == (64, 64) else tensors), values

    write_quantized(tmp_path, AWQ, broken)
    with pytest.raises(CheckpointError) as error:
        Checkpoint.open(tmp_path)
    assert message in str(error.value)


def test_a_weight_of_another_size_than_the_model_has(tmp_path: Path) -> None:
    write_quantized(tmp_path, AWQ, pack_awq)
    values = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(values | {"intermediate_size": 128}))
    with pytest.raises(CheckpointError, match=r"has the shape \[96, 64\], but config.json asks for \[128, 64\]"):
        Checkpoint.open(tmp_path)


def test_conv1d_has_columns_of_outputs() -> None:
    """GPT-2's linears are turned, in all formats."""

    class Conv1D:
        """Its name is what counts."""

    class Model:
        base_model_prefix = "transformer"

        def named_modules(self) -> list[Any]:
            return [("transformer.h.0.attn.c_attn", Conv1D())]

    tensors, values = pack_awq(np.zeros((96, 64), np.float32), np.random.default_rng(0))
    arrays = {f"h.0.attn.c_attn.{name}": Array(array) for name, array in tensors.items()}
    found, _ = read_quantized(AWQ, arrays, "config.json", None, Model())
    source = found["h.0.attn.c_attn.weight"]
    np.testing.assert_array_equal(read(source).astype(np.float32), values.T)
    assert find_quantized(Transpose(source, (1, 0))) is not None


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_unpack(bits: int) -> None:
    codes = np.random.default_rng(bits).integers(0, 1 << bits, (5, 37)).astype(np.uint8)
    np.testing.assert_array_equal(unpack(pack_words(codes, bits), bits, 37), codes)


def test_files_are_named(tmp_path: Path) -> None:
    """A damaged directory is named once, with its tensor."""
    arrays = llama_arrays("float16", **SIZES)
    name = "model.layers.0.self_attn.q_proj"
    del arrays[f"{name}.weight"]
    arrays[f"{name}.qweight"] = np.zeros((64, 8), np.int32)
    write_model(tmp_path, arrays, quantization_config=AWQ, **SIZES)
    with pytest.raises(LlmcError) as error:
        Checkpoint.open(tmp_path)
    assert str(error.value) == f"{tmp_path}: tensor '{name}.scales' is missing, for a weight of 64 x 64 in groups of 32"
