"""Checkpoints of torchao: by construction, and where it is installed made by transformers with the library itself."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from checkpoints import safetensors_bytes
from numpy.typing import NDArray
from quantized_files import SIZES, Packed, bfloat16, random_codes, write_quantized
from safetensors import safe_open

from llmc.compiler.checkpoint import Checkpoint
from llmc.compiler.quantized_weights import is_quantized
from llmc.compiler.weights import read
from llmc.errors import LlmcError

NAME = "model.layers.0.mlp.down_proj.weight"
CONFIG = {"quant_method": "torchao", "quant_type": {"default": {"_type": "IntxWeightOnlyConfig", "_version": 2}}}
BFLOAT16 = {"_type": "torch.dtype", "_data": "bfloat16"}


def intx(weight: NDArray[np.float32], random: np.random.Generator, bits: int, block: int, zeros: bool) -> Packed:
    codes, scale, zero = random_codes(weight, random, bits, block, np.float32)
    scale, middle = bfloat16(scale), 1 << bits - 1
    zero = zero if zeros else np.full_like(zero, middle)
    values = np.zeros(weight.shape, np.float32)
    for row, column in np.ndindex(*weight.shape):
        g = column // block
        product = (float(codes[row, column]) - float(zero[row, g])) * float(scale[row, g])
        values[row, column] = ml_dtypes.bfloat16(product)
    stored = {"qdata": (codes.astype(np.int16) - middle).astype(np.int8), "scale": scale}
    return stored | {"zero_point": (zero.astype(np.int16) - middle).astype(np.int8)}, values


def int4(weight: NDArray[np.float32], random: np.random.Generator, group: int, offsets: bool) -> Packed:
    """Two codes of -8 to 7 a byte."""
    codes, scale, _ = random_codes(weight, random, 4, group, np.float32)
    signed = codes.astype(np.int8) - 8
    scale = bfloat16(scale)
    offset = bfloat16(random.uniform(0.25, 1, scale.shape) * scale.astype(np.float32)) if offsets else scale * 0
    packed = signed[:, ::2] & 15 | signed[:, 1::2] << 4
    values = np.zeros(weight.shape, np.float32)
    for row, column in np.ndindex(*weight.shape):
        g = column // group
        exact = float(signed[row, column]) * float(scale[row, g]) + float(offset[row, g])
        values[row, column] = ml_dtypes.bfloat16(exact)
    stored = {"scale": scale.T, "zero_point": offset.T}
    return {"qdata": packed} | {name: np.ascontiguousarray(array) for name, array in stored.items()}, values


def write(folder: Path, pack: Any, kind: str, data: Mapping[str, Any], **more: Any) -> dict[str, NDArray[Any]]:
    """As ``write_quantized``; the file says in its metadata how the weights are kept."""
    expected = write_quantized(folder, CONFIG, pack, "bfloat16")
    arrays, metadata = {}, {}
    with safe_open(folder / "model.safetensors", "np") as file:
        for name in file.keys():  # noqa: SIM118 - no mapping
            module, _, end = name.rpartition(".")
            kept = module.endswith("proj")
            arrays[f"{module}._weight_{end}" if kept else name] = file.get_tensor(name)
            own = {"shape": list(expected[f"{module}.weight"].shape)} if kind == "Int4Tensor" and kept else {}
            known = {"_type": kind, "_data": dict(data) | own} | more if kept else {"_type": "Tensor"}
            metadata[f"{module}.weight"] = json.dumps(known)
    aligned = dict(sorted(arrays.items(), key=lambda item: -item[1].itemsize))
    (folder / "model.safetensors").write_bytes(safetensors_bytes(aligned, metadata))
    return expected


def check(folder: Path, expected: Mapping[str, NDArray[Any]], form: tuple[str, int, str | None]) -> None:
    checkpoint = Checkpoint.open(folder)
    for name in checkpoint.names:
        source = checkpoint.weight(name)
        np.testing.assert_array_equal(read(source).astype(np.float32), expected[name].astype(np.float32), name)
        if name.endswith("proj.weight"):
            assert is_quantized(source), name
            assert (source.scheme.format, source.scheme.group, source.zero) == form


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize(("bits", "block"), [(4, 32), (3, 16), (8, 32)])
def test_integers_in_bytes(tmp_path: Path, bits: int, block: int, zeros: bool) -> None:
    kind = {"_type": "torch.dtype", "_data": f"int{bits}"}
    data = {"target_dtype": kind, "block_size": [1, block], "dtype": BFLOAT16, "activation_quantization": None}
    expected = write(tmp_path, lambda w, r: intx(w, r, bits, block, zeros), "IntxUnpackedToInt8Tensor", data)
    check(tmp_path, expected, ("int8" if bits == 8 else "int4", block, "uint8" if zeros else None))


@pytest.mark.parametrize("offsets", [False, True])
def test_pairs_of_int4(tmp_path: Path, offsets: bool) -> None:
    expected = write(tmp_path, lambda w, r: int4(w, r, 32, offsets), "Int4Tensor", {"block_size": [1, 32]})
    check(tmp_path, expected, ("int4", 32, "float32" if offsets else None))


def static(weight: NDArray[np.float32], random: np.random.Generator) -> Packed:
    tensors, values = intx(weight, random, 8, 32, False)
    scales = {"act_quant_scale": np.array([[0.05]], np.float32), "act_quant_zero_point": np.array([[3]], np.int8)}
    return tensors | scales, values


def test_scales_of_inputs(tmp_path: Path) -> None:
    expected = write(tmp_path, static, "Int8Tensor", {"block_size": [1, 32], "dtype": BFLOAT16})
    check(tmp_path, expected, ("int8", 32, None))
    source = Checkpoint.open(tmp_path).weight(NAME)
    assert is_quantized(source) and source.x_scale == (float(np.float32(0.05)), 3.0)


@pytest.mark.parametrize(
    ("kind", "data", "message"),
    [
        ("Int4TilePackedTo4dTensor", {}, "'Int4TilePackedTo4dTensor' is not supported; supported: Int8Tensor, Intx"),
        ("Int8Tensor", {"block_size": [1, 30]}, "blocks of 1 x 30 don't divide "),
        ("Int8Tensor", {"block_size": [1, 16]}, "_weight_scale': has the shape ["),
        ("Int8Tensor", {"block_size": [1, 2, 3]}, "block_size [1, 2, 3] is not supported; two numbers are"),
        ("Int8Tensor", {"dtype": {"_data": "int3"}}, "_data 'int3' is not supported; supported: float16"),
        ("IntxUnpackedToInt8Tensor", {"target_dtype": {"_data": "int4"}}, "has numbers from -"),
        ("Int4Tensor", {"block_size": [2, 32]}, "blocks of 2 x 32 in a weight of "),
    ],
)
def test_what_is_refused(tmp_path: Path, kind: str, data: dict[str, Any], message: str) -> None:
    given = {"block_size": [1, 32], "dtype": BFLOAT16} | data
    write(tmp_path, lambda w, r: intx(w, r, 8, 32, True), kind, given)
    with pytest.raises(LlmcError) as error:
        Checkpoint.open(tmp_path)
    assert message in str(error.value)


@pytest.mark.parametrize("kind", ["Int8Tensor", "IntxUnpackedToInt8Tensor"])
def test_without_zero_points(tmp_path: Path, kind: str) -> None:
    """They are not taken for zero where the library stored some."""

    def pack(weight: NDArray[np.float32], random: np.random.Generator) -> Packed:
        tensors, values = intx(weight, random, 8, 32, True)
        del tensors["zero_point"]
        return tensors, values

    data = {"block_size": [1, 32], "dtype": BFLOAT16}
    if kind != "Int8Tensor":
        write(tmp_path, pack, kind, data | {"target_dtype": {"_type": "torch.dtype", "_data": "int8"}})
    else:
        write(tmp_path, pack, kind, data, _tensor_data_names=["qdata", "scale", "zero_point"])
    with pytest.raises(LlmcError, match=r"_weight_zero_point'?:? is missing"):
        Checkpoint.open(tmp_path)


def test_without_metadata(tmp_path: Path) -> None:
    write(tmp_path, static, "Int8Tensor", {"block_size": [1, 32], "dtype": BFLOAT16})
    with safe_open(tmp_path / "model.safetensors", "np") as file:
        arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
    aligned = dict(sorted(arrays.items(), key=lambda item: -item[1].itemsize))
    (tmp_path / "model.safetensors").write_bytes(safetensors_bytes(aligned))
    with pytest.raises(LlmcError, match="the metadata of the file does not say what it is"):
        Checkpoint.open(tmp_path)


METHODS = {
    "Int8WeightOnlyConfig": ({}, ("int8", 0, None)),
    "Int8DynamicActivationInt8WeightConfig": ({}, ("int8", 0, None)),
    "Float8WeightOnlyConfig": ({}, ("fp8", 0, None)),
    "IntxWeightOnlyConfig": ({"weight_dtype": "int4"}, ("int4", 32, None)),
    "Int8DynamicActivationIntxWeightConfig": ({"weight_dtype": "int4", "zeros": True}, ("int4", 32, "uint8")),
}


@pytest.mark.parametrize("method", METHODS)
def test_like_the_library(tmp_path: Path, method: str) -> None:
    """Transformers quantizes and saves; what the library dequantizes is bit-equal."""
    import torch
    from torchao import quantization
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, TorchAoConfig

    torch.manual_seed(0)
    config = LlamaConfig(**SIZES, num_hidden_layers=2, max_position_embeddings=64, tie_word_embeddings=False)
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.3)
    model.save_pretrained(tmp_path / "float")
    options, form = METHODS[method]
    given: dict[str, Any] = {}
    if options:
        place = "granularity" if method == "IntxWeightOnlyConfig" else "weight_granularity"
        given = {"weight_dtype": torch.int4, place: quantization.PerGroup(32)}
    if "zeros" in options:
        given["weight_mapping_type"] = quantization.MappingType.ASYMMETRIC
    how = TorchAoConfig(quant_type=getattr(quantization, method)(**given))
    made = AutoModelForCausalLM.from_pretrained(tmp_path / "float", dtype=torch.bfloat16, quantization_config=how)
    made.save_pretrained(tmp_path / "model")
    expected = {
        name: (value.dequantize() if hasattr(value, "qdata") else value).float().numpy()
        for name, value in made.state_dict().items()
    }
    check(tmp_path / "model", expected, form)
