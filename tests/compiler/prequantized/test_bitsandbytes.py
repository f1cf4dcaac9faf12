"""bitsandbytes: int8 rows with SCB, and 4-bit floats, packed and dequantized here in plain loops."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray
from quantized_files import Packed, write_quantized

from llmc.compiler.checkpoint import Checkpoint
from llmc.compiler.quantized_weights import is_quantized
from llmc.compiler.weights import read
from llmc.errors import LlmcError

EIGHT = {"quant_method": "bitsandbytes", "load_in_8bit": True, "load_in_4bit": False, "llm_int8_threshold": 6.0}
FOUR = {"quant_method": "bitsandbytes", "load_in_4bit": True, "_load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
NAME = "model.layers.0.mlp.down_proj.weight"


def pack_int8(weight: NDArray[np.float32], random: np.random.Generator) -> Packed:
    codes = random.integers(-127, 128, weight.shape).astype(np.int8)
    scb = random.uniform(0.1, 0.5, weight.shape[0]).astype(np.float32)
    values = np.zeros(weight.shape, np.float32)
    for row in range(weight.shape[0]):
        for column in range(weight.shape[1]):
            product = np.float32(codes[row, column]) * scb[row]
            values[row, column] = np.float16(product * np.float32(1 / 127))
    return {"weight": codes, "SCB": scb, "weight_format": np.array(0, np.uint8)}, values


def test_int8(tmp_path: Path) -> None:
    """The codes are kept; with SCB / 127 as their scale they differ by a rounding of float32 from the library."""
    expected = write_quantized(tmp_path, EIGHT, pack_int8)
    checkpoint = Checkpoint.open(tmp_path)
    for name in checkpoint.names:
        source = checkpoint.weight(name)
        np.testing.assert_array_equal(read(source).astype(np.float32), expected[name].astype(np.float32))
    kept = checkpoint.weight(NAME)
    assert is_quantized(kept)
    np.testing.assert_allclose(kept.quantized_rows(0, 64).dequantize(), expected[NAME], rtol=5e-4, atol=1e-7)


def test_int8_in_another_order(tmp_path: Path) -> None:
    def turned(weight: NDArray[np.float32], random: np.random.Generator) -> Packed:
        tensors, values = pack_int8(weight, random)
        return tensors | {"weight_format": np.array([0, 1], np.uint8)}, values

    write_quantized(tmp_path, EIGHT, turned)
    with pytest.raises(LlmcError, match=r"weight_format is \[0, 1\]; only 0 \(rows\) is supported"):
        Checkpoint.open(tmp_path)


def pack_float4(weight: NDArray[np.float32], random: np.random.Generator, nested: bool, kind: str = "nf4") -> Packed:
    """Blocks of 64 run across rows of 80; two codes a byte, the first in the upper half."""
    table = random.uniform(-1, 1, 16).astype(np.float32)
    codes = random.integers(0, 16, weight.size)
    blocks = -(-weight.size // 64)
    state: dict[str, Any] = {"quant_type": kind, "blocksize": 64, "dtype": "bfloat16", "shape": list(weight.shape)}
    tensors = {
        "weight": (codes[::2] << 4 | codes[1::2]).astype(np.uint8)[:, None],
        "weight.quant_map": table,
    }
    if nested:
        state |= {"nested_blocksize": 16, "nested_dtype": "float32", "nested_offset": 0.123}
        small = random.integers(0, 256, blocks).astype(np.uint8)
        map_, outer = random.uniform(0, 1, 256).astype(np.float32), random.uniform(0.1, 0.2, -(-blocks // 16))
        outer = outer.astype(np.float32)
        tensors |= {"weight.absmax": small, "weight.nested_quant_map": map_, "weight.nested_absmax": outer}
        absmax = [map_[small[i]] * outer[i // 16] + np.float32(0.123) for i in range(blocks)]
    else:
        tensors["weight.absmax"] = random.uniform(0.1, 0.4, blocks).astype(np.float32)
        absmax = list(tensors["weight.absmax"])
    raw = json.dumps(state).encode()
    tensors[f"weight.quant_state.bitsandbytes__{kind}"] = np.frombuffer(raw, np.uint8)
    values = [ml_dtypes.bfloat16(table[code] * np.float32(absmax[i // 64])) for i, code in enumerate(codes)]
    return tensors, np.array(values).astype(np.float32).reshape(weight.shape)


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_float4(tmp_path: Path, nested: bool, kind: str) -> None:
    config = FOUR | {"bnb_4bit_quant_type": kind, "bnb_4bit_use_double_quant": nested}
    expected = write_quantized(
        tmp_path, config, lambda w, r: pack_float4(w, r, nested, kind), "bfloat16", intermediate_size=80
    )
    checkpoint = Checkpoint.open(tmp_path)
    for name in checkpoint.names:
        values = read(checkpoint.weight(name)).astype(np.float32)
        np.testing.assert_array_equal(values, expected[name].astype(np.float32), name)
    part = checkpoint.weight(NAME).rows(3, 10)
    np.testing.assert_array_equal(part.astype(np.float32), expected[NAME][3:10])
    assert any(f"{kind} weights are dequantized" in warning for warning in checkpoint.warnings)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (EIGHT | {"load_in_8bit": False}, "exactly one of load_in_8bit and load_in_4bit must be true"),
        (FOUR | {"bnb_4bit_quant_type": "int4"}, "bnb_4bit_quant_type 'int4' is not supported; supported: nf4, fp4"),
        (FOUR | {"bnb_4bit_quant_type": "fp4"}, "none of the tensors is quantized"),
    ],
)
def test_what_is_refused(tmp_path: Path, config: dict[str, Any], message: str) -> None:
    write_quantized(tmp_path, config, lambda w, r: pack_float4(w, r, False), "bfloat16")
    with pytest.raises(LlmcError) as error:
        Checkpoint.open(tmp_path)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("name", "array", "message"),
    [
        ("weight.absmax", np.zeros(3, np.float32), "expected [64]: for blocks of 64"),
        ("weight.quant_map", np.zeros(15, np.float32), "expected [16]"),
        ("weight", np.zeros((7, 1), np.uint8), "take 2048 bytes"),
        ("weight.quant_state.bitsandbytes__nf4", np.frombuffer(b"[1]", np.uint8), "is no JSON object"),
        ("weight.quant_state.bitsandbytes__nf4", np.frombuffer(b'{"shape": [1]}', np.uint8), "describes no nf4 matrix"),
        ("weight.quant_state.bitsandbytes__nf4", np.frombuffer(b'{"shape": 1}', np.uint8), "describes no nf4 matrix"),
    ],
)
def test_damaged_tensors(tmp_path: Path, name: str, array: NDArray[Any], message: str) -> None:
    def broken(weight: NDArray[np.float32], random: np.random.Generator) -> Packed:
        tensors, values = pack_float4(weight, random, False)
        return (tensors | {name: array} if weight.shape == (64, 64) else tensors), values

    write_quantized(tmp_path, FOUR, broken, "bfloat16")
    with pytest.raises(LlmcError) as error:
        Checkpoint.open(tmp_path)
    assert message in str(error.value)
