"""GPTQ checkpoints of both formats: packed here as AutoGPTQ does, dequantized in plain loops."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from quantized_files import GPTQ, Packed, pack_gptq, pack_words, plain_values, random_codes, write_quantized

from llmc.compiler.checkpoint import Checkpoint
from llmc.compiler.quantized_weights import is_quantized
from llmc.compiler.weights import read
from llmc.errors import LlmcError

NAME = "model.layers.0.mlp.down_proj.weight"


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("version", ["gptq", "gptq_v2"])
def test_values_and_codes(tmp_path: Path, bits: int, version: str) -> None:
    """MTH-05: the same numbers in both formats; checkpoint_format says whether one is added to zero points."""
    config = GPTQ | {"bits": bits, "checkpoint_format": version}
    expected = write_quantized(tmp_path, config, lambda w, r: pack_gptq(w, r, bits, minus_one=version == "gptq"))
    checkpoint = Checkpoint.open(tmp_path)
    for name in checkpoint.names:
        source = checkpoint.weight(name)
        np.testing.assert_array_equal(read(source).astype(np.float32), expected[name].astype(np.float32))
        if name.endswith("proj.weight"):
            assert is_quantized(source)
            assert (source.scheme.format, source.zero) == ("int8" if bits == 8 else "int4", "uint8")
            rows = source.quantized_rows(0, source.shape[0]).dequantize().astype(np.float16)
            np.testing.assert_array_equal(rows.astype(np.float32), expected[name])


def test_both_formats_mean_one_matrix(tmp_path: Path) -> None:
    """MTH-05: version 1 is what is meant where nothing is said."""
    ones = np.random.default_rng(3)
    twos = np.random.default_rng(3)

    def pack_v2(weight: NDArray[np.float32], random: np.random.Generator) -> Packed:
        tensors, values = pack_gptq(weight, twos)
        tensors["qzeros"] = (tensors["qzeros"].view(np.uint32) + np.uint32(0x11111111)).view(np.int32)
        return tensors, values

    write_quantized(tmp_path / "v1", GPTQ, lambda w, r: pack_gptq(w, ones))
    write_quantized(tmp_path / "v2", GPTQ | {"checkpoint_format": "gptq_v2"}, pack_v2)
    first, second = Checkpoint.open(tmp_path / "v1"), Checkpoint.open(tmp_path / "v2")
    for name in first.names:
        np.testing.assert_array_equal(read(first.weight(name)), read(second.weight(name)))


def test_a_zero_point_of_zero_survives_the_borrow(tmp_path: Path) -> None:
    """gptqmodel subtracts one from whole words, so a zero borrows from its neighbour: adding whole words undoes it."""

    def with_zeros(weight: NDArray[np.float32], random: np.random.Generator) -> Packed:
        codes, scale, zero = random_codes(weight, random, 4, 32)
        zero[::3] = 0
        tensors = {
            "qweight": np.ascontiguousarray(pack_words(codes, 4).T),
            "qzeros": (pack_words(zero.T, 4).view(np.uint32) - np.uint32(0x11111111)).view(np.int32),
            "scales": np.ascontiguousarray(scale.T),
        }
        return tensors, plain_values(codes, scale, zero, lambda column: column // 32)

    expected = write_quantized(tmp_path, GPTQ, with_zeros)
    np.testing.assert_array_equal(read(Checkpoint.open(tmp_path).weight(NAME)).astype(np.float32), expected[NAME])


@pytest.mark.parametrize("group", [32, 64])
def test_act_order(tmp_path: Path, group: int) -> None:
    """MTH-26: g_idx in any order says which scale a column has."""
    config = GPTQ | {"desc_act": True, "group_size": group}
    expected = write_quantized(tmp_path, config, lambda w, r: pack_gptq(w, r, group=group, act_order=True))
    checkpoint = Checkpoint.open(tmp_path)
    for name in checkpoint.names:
        values = read(checkpoint.weight(name)).astype(np.float32)
        np.testing.assert_array_equal(values, expected[name].astype(np.float32))
    kept = checkpoint.weight(NAME)
    assert is_quantized(kept)
    assert kept.order is not None
    rows = kept.quantized_rows(2, 9)
    np.testing.assert_array_equal(rows.dequantize().astype(np.float16), expected[NAME][2:9][:, kept.order])
    assert any("in act-order: " in warning for warning in checkpoint.warnings)


def test_groups_of_odd_sizes(tmp_path: Path) -> None:
    """A g_idx that puts more columns into one group than into another is no act-order that the engine knows."""

    def uneven(weight: NDArray[np.float32], random: np.random.Generator) -> Packed:
        codes, scale, zero = random_codes(weight, random, 4, 32)
        g_idx = np.sort(random.integers(0, scale.shape[1], codes.shape[1])).astype(np.int32)
        tensors = pack_gptq(weight, random)[0] | {
            "qweight": np.ascontiguousarray(pack_words(codes, 4).T),
            "qzeros": pack_words(zero.T, 4),
            "scales": np.ascontiguousarray(scale.T),
            "g_idx": g_idx,
        }
        return tensors, plain_values(codes, scale, zero, lambda column: int(g_idx[column]))

    expected = write_quantized(tmp_path, GPTQ | {"checkpoint_format": "gptq_v2"}, uneven)
    checkpoint = Checkpoint.open(tmp_path)
    assert not is_quantized(checkpoint.weight(NAME))
    np.testing.assert_array_equal(read(checkpoint.weight(NAME)).astype(np.float32), expected[NAME])
    assert any("other sizes than group_size says" in warning for warning in checkpoint.warnings)


def test_one_group_for_a_row(tmp_path: Path) -> None:
    """MTH-31: a group_size of -1 is one group for each output."""
    expected = write_quantized(tmp_path, GPTQ | {"group_size": -1}, lambda w, r: pack_gptq(w, r, group=-1))
    source = Checkpoint.open(tmp_path).weight(NAME)
    assert is_quantized(source)
    assert source.scheme.group == 0
    np.testing.assert_array_equal(read(source).astype(np.float32), expected[NAME])


def test_groups_that_are_too_large_become_several(tmp_path: Path) -> None:
    """1024 columns would need a larger group than the engine has: four of 256 with the same scale."""
    sizes = {"intermediate_size": 1040, "num_hidden_layers": 1}
    config = GPTQ | {"group_size": 1024}
    expected = write_quantized(tmp_path, config, lambda w, r: pack_gptq(w, r, group=1024), **sizes)
    source = Checkpoint.open(tmp_path).weight(NAME)
    assert is_quantized(source)
    assert source.scheme.group == 256
    rows = source.quantized_rows(0, 64)
    assert rows.scale.shape == (64, 5)
    np.testing.assert_array_equal(rows.dequantize().astype(np.float16).astype(np.float32), expected[NAME])


def test_files_of_their_own(tmp_path: Path) -> None:
    """AutoGPTQ once wrote quantize_config.json only."""
    expected = write_quantized(tmp_path, GPTQ, pack_gptq)
    config = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(config.replace('"quantization_config"', '"unused_key"'))
    (tmp_path / "quantize_config.json").write_text('{"bits": 4, "group_size": 32, "desc_act": false}')
    np.testing.assert_array_equal(read(Checkpoint.open(tmp_path).weight(NAME)).astype(np.float32), expected[NAME])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bits": 5}, "bits 5 is not supported; supported: 2, 3, 4, 8"),
        ({"checkpoint_format": "marlin"}, "checkpoint_format 'marlin' is not supported; supported: gptq, gptq_v2"),
        ({"bits": ...}, "bits is missing"),
        ({"dynamic": {"+:.*down.*": {"bits": 8}}}, "dynamic gives +:.*down.* other settings"),
        ({"group_size": -2}, "group_size -2 is no size"),
        ({"bits": 8}, "for a weight of 64 x 32 in groups of 32"),
    ],
)
def test_what_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    config = {key: value for key, value in (GPTQ | changes).items() if value is not ...}
    write_quantized(tmp_path, config, pack_gptq)
    with pytest.raises(LlmcError) as error:
        Checkpoint.open(tmp_path)
    assert message in str(error.value)


@pytest.mark.parametrize("lost", ["scales", "qzeros", "g_idx"])
def test_missing_tensors(tmp_path: Path, lost: str) -> None:
    def incomplete(weight: NDArray[np.float32], random: np.random.Generator) -> Packed:
        tensors, values = pack_gptq(weight, random)
        del tensors[lost]
        return tensors, values

    write_quantized(tmp_path, GPTQ | {"desc_act": True}, incomplete)
    with pytest.raises(LlmcError, match=rf"self_attn.\w_proj.{lost}'?:? is missing"):
        Checkpoint.open(tmp_path)


def test_g_idx_beyond_the_groups(tmp_path: Path) -> None:
    def broken(weight: NDArray[np.float32], random: np.random.Generator) -> Packed:
        tensors, values = pack_gptq(weight, random)
        tensors["g_idx"][5] = 99
        return tensors, values

    write_quantized(tmp_path, GPTQ, broken)
    with pytest.raises(LlmcError, match="names the groups 0 to 99, but there are 2"):
        Checkpoint.open(tmp_path)
