"""Checkpoints of compressed-tensors: by construction, and made by the library itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray
from quantized_files import (
    Packed,
    bfloat16,
    compressed_config,
    pack_compressed,
    packed_config,
    plain_values,
    random_codes,
    write_quantized,
)

from llmc.compiler.checkpoint import Checkpoint
from llmc.compiler.quantized_weights import is_quantized
from llmc.compiler.weights import read
from llmc.errors import LlmcError

NAME = "model.layers.0.mlp.down_proj.weight"
FP8 = np.dtype(ml_dtypes.float8_e4m3fn)


def check(path: Path, expected: dict[str, NDArray[Any]], quantized: bool = True) -> Checkpoint:
    checkpoint = Checkpoint.open(path)
    for name in checkpoint.names:
        source = checkpoint.weight(name)
        np.testing.assert_array_equal(read(source).astype(np.float32), expected[name].astype(np.float32), name)
        if name.endswith("proj.weight") and quantized:
            assert is_quantized(source), name
            rows = source.quantized_rows(1, source.shape[0]).dequantize().astype(read(source).dtype)
            np.testing.assert_array_equal(rows.astype(np.float32), expected[name][1:], name)
    return checkpoint


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("group", [32, 64, 0])
@pytest.mark.parametrize("symmetric", [True, False])
def test_packed(tmp_path: Path, bits: int, group: int, symmetric: bool) -> None:
    values = packed_config(bits, group, symmetric)
    sizes = {"num_hidden_layers": 1, "intermediate_size": 80}
    expected = write_quantized(
        tmp_path, values, lambda w, r: pack_compressed(w, r, bits, group, symmetric), "bfloat16", **sizes
    )
    source = check(tmp_path, expected).weight(NAME)
    assert is_quantized(source)
    assert (source.scheme.format, source.scheme.group) == ("int8" if bits == 8 else "int4", group)
    assert source.zero == (None if symmetric else "uint8")


def test_packed_in_act_order(tmp_path: Path) -> None:
    expected = write_quantized(
        tmp_path,
        packed_config(symmetric=False),
        lambda w, r: pack_compressed(w, r, symmetric=False, act_order=True),
        "bfloat16",
    )
    checkpoint = check(tmp_path, expected, quantized=False)
    assert any("with zero points in act-order: 14" in warning for warning in checkpoint.warnings)


def pack_int8(weight: NDArray[np.float32], random: np.random.Generator, strategy: str, symmetric: bool) -> Packed:
    codes, scale, zero = random_codes(weight, random, 8, -1, np.float32)
    if strategy == "tensor":
        scale, zero = scale[:1].repeat(len(scale), 0), zero[:1].repeat(len(zero), 0)
    zero = np.full_like(zero, 128) if symmetric else zero
    stored = (scale, zero) if strategy == "channel" else (scale[0], zero[0])
    tensors = {"weight": (codes - 128).astype(np.int8), "weight_scale": stored[0]}
    if not symmetric:
        tensors["weight_zero_point"] = (stored[1] - 128).astype(np.int8)
    return tensors, plain_values(codes, scale, zero, lambda column: 0)


@pytest.mark.parametrize("strategy", ["channel", "tensor"])
@pytest.mark.parametrize("symmetric", [True, False])
def test_int8(tmp_path: Path, strategy: str, symmetric: bool) -> None:
    weights = {"num_bits": 8, "type": "int", "symmetric": symmetric, "strategy": strategy}
    values = compressed_config("int-quantized", weights)
    values["config_groups"]["group_0"]["input_activations"] = {"num_bits": 8, "dynamic": True, "strategy": "token"}
    check(tmp_path, write_quantized(tmp_path, values, lambda w, r: pack_int8(w, r, strategy, symmetric), "float32"))


def pack_fp8(weight: NDArray[np.float32], random: np.random.Generator, strategy: str, block: int = 32) -> Packed:
    """``weight_scale`` is [1], [N, 1] or one for each block."""
    rows, columns = weight.shape
    codes = (weight * 300).clip(-448, 448).astype(FP8)
    grid = {"tensor": (1, 1), "channel": (rows, 1), "block": (-(-rows // block), -(-columns // block))}[strategy]
    scale = bfloat16(random.uniform(0.001, 0.01, grid))
    values = np.zeros(weight.shape, np.float32)
    for row in range(rows):
        for column in range(columns):
            at = {"tensor": (0, 0), "channel": (row, 0), "block": (row // block, column // block)}[strategy]
            values[row, column] = ml_dtypes.bfloat16(float(codes[row, column]) * float(scale[at]))
    return {"weight": codes, "weight_scale": scale[0] if strategy == "tensor" else scale}, values


@pytest.mark.parametrize("strategy", ["tensor", "channel", "block"])
def test_fp8(tmp_path: Path, strategy: str) -> None:
    """With scales of the inputs."""

    def pack_with_input(weight: NDArray[np.float32], random: np.random.Generator) -> Packed:
        tensors, values = pack_fp8(weight, random, strategy)
        return tensors | {"input_scale": bfloat16(np.ones(1, np.float32))}, values

    weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy}
    if strategy == "block":
        weights["block_structure"] = [32, 32]
    values = compressed_config("float-quantized", weights)
    values["config_groups"]["group_0"]["input_activations"] = {"num_bits": 8, "type": "float", "dynamic": False}
    source = check(tmp_path, write_quantized(tmp_path, values, pack_with_input, "bfloat16")).weight(NAME)
    assert is_quantized(source) and source.x_scale == (1.0,)


def test_static_inputs_without_their_zero_point(tmp_path: Path) -> None:
    """They are not taken for symmetric ones."""
    weights = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
    values = compressed_config("int-quantized", weights)
    inputs = {"num_bits": 8, "type": "int", "dynamic": False, "strategy": "tensor", "symmetric": False}
    values["config_groups"]["group_0"]["input_activations"] = inputs

    def pack(weight: NDArray[np.float32], random: np.random.Generator) -> Packed:
        tensors, expected = pack_int8(weight, random, "channel", True)
        return tensors | {"input_scale": np.ones(1, np.float32)}, expected

    write_quantized(tmp_path, values, pack, "float32")
    with pytest.raises(LlmcError, match=r"input_zero_point'?: is missing, though the inputs are not symmetric"):
        Checkpoint.open(tmp_path)


def test_groups_of_modules_with_schemes_of_their_own(tmp_path: Path) -> None:
    """A module that a group names by its name or a pattern is not one of "Linear"."""
    values = packed_config()
    eight = packed_config(8)["config_groups"]["group_0"] | {"targets": ["re:.*down_proj"]}
    values["config_groups"] = {"group_0": values["config_groups"]["group_0"], "group_1": eight}

    def mixed(weight: NDArray[np.float32], random: np.random.Generator) -> Packed:
        return pack_compressed(weight, random, 8 if weight.shape == (64, 96) else 4)

    check(tmp_path, write_quantized(tmp_path, values, mixed, "bfloat16"))


@pytest.mark.parametrize(
    ("format", "weights", "message"),
    [
        ("nvfp4-pack-quantized", {}, "format 'nvfp4-pack-quantized' is not supported; supported: pack-quantized"),
        ("pack-quantized", {"num_bits": 5}, "num_bits 5 is not supported; supported: 2, 3, 4, 8"),
        ("pack-quantized", {"strategy": "tensor_group"}, "strategy 'tensor_group' is not supported"),
        ("pack-quantized", {"strategy": "channel"}, "strategy 'channel' does not fit group_size"),
        ("pack-quantized", {"type": "float"}, "numbers of type float in the format pack-quantized"),
        ("pack-quantized", {"group_size": 16}, "weight_scale': has the shape [64, 2], expected [64, 4]"),
        ("pack-quantized", {"num_bits": 8}, "weight_packed' has the shape [64, 8], expected [64, 16]"),
        ("pack-quantized", {"symmetric": False}, "weight_zero_point' is missing"),
        (
            "pack-quantized",
            {"strategy": "block", "group_size": None, "block_structure": [0, "x"]},
            "block_structure must be two numbers above 0, found [0, 'x']",
        ),
    ],
)
def test_what_is_refused(tmp_path: Path, format: str, weights: dict[str, Any], message: str) -> None:
    values = packed_config()
    values["format"] = format
    values["config_groups"]["group_0"]["weights"] |= weights
    write_quantized(tmp_path, values, pack_compressed, "bfloat16")
    with pytest.raises(LlmcError) as error:
        Checkpoint.open(tmp_path)
    assert message in str(error.value)


def test_a_module_that_no_group_is_for(tmp_path: Path) -> None:
    values = packed_config()
    values["config_groups"]["group_0"]["targets"] = ["re:.*mlp.*", "re:(", "re:a{99999999999}"]
    write_quantized(tmp_path, values, pack_compressed, "bfloat16")
    with pytest.raises(LlmcError, match="q_proj has quantized weights, but no group of config_groups is for it"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize(
    ("bits", "group", "symmetric"), [(4, 32, True), (4, 32, False), (4, 0, True), (8, 32, True), (3, 32, False)]
)
def test_like_the_library(tmp_path: Path, bits: int, group: int, symmetric: bool) -> None:
    """The library packs, and unpacks again for the numbers that are expected."""
    import torch
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme

    values = packed_config(bits, group, symmetric)
    scheme = QuantizationScheme(**values["config_groups"]["group_0"])
    compressor = BaseCompressor.get_value_from_registry("pack-quantized")

    def by_library(weight: NDArray[np.float32], random: np.random.Generator) -> Packed:
        _, scale, zero = random_codes(weight, random, bits, group or -1, np.float32)
        state = {
            "weight": torch.tensor(weight).to(torch.bfloat16),
            "weight_scale": torch.tensor(scale).to(torch.bfloat16),
            "weight_zero_point": torch.tensor(zero - (1 << (bits - 1)) if not symmetric else zero * 0).to(torch.int8),
        }
        packed = compressor.compress(state, scheme)
        values = compressor.decompress(packed, scheme)["weight"].to(torch.float32).numpy()
        arrays = {
            name: bfloat16(tensor.to(torch.float32).numpy()) if tensor.dtype == torch.bfloat16 else tensor.numpy()
            for name, tensor in packed.items()
        }
        return arrays, values

    check(tmp_path, write_quantized(tmp_path, values, by_library, "bfloat16"))
