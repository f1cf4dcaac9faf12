"""Writes small quantized model directories as other libraries do, and says in plain loops what their numbers are."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from checkpoints import CODES, Arrays, llama_arrays, write_model
from numpy.typing import NDArray

CODES.update({"int8": "I8", "int64": "I64"})

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 48,
}

Packed = tuple[Arrays, NDArray[np.float32]]
"""The tensors of a module by the end of their names, and the weight [rows, columns] that they mean."""


def write_quantized(
    folder: Path,
    quantization: Mapping[str, Any],
    pack: Callable[[NDArray[np.float32], np.random.Generator], Packed],
    dtype: str = "float16",
    **config: Any,
) -> Arrays:
    """A Llama of which the linears of the layers are packed; returns all weights as floats."""
    values = SIZES | {"torch_dtype": dtype} | config
    random = np.random.default_rng(7)
    stored, expected = {}, {}
    for name, array in llama_arrays(dtype, **values).items():
        if not name.endswith("proj.weight"):
            stored[name] = expected[name] = (array * 0.1 if array.ndim > 1 else array).astype(array.dtype)
            continue
        tensors, expected[name] = pack(array.astype(np.float32) * 0.1, random)
        stem = name.removesuffix(".weight")
        stored |= {f"{stem}.{end}": tensor for end, tensor in tensors.items()}
    aligned = dict(sorted(stored.items(), key=lambda item: -item[1].itemsize))  # as the safetensors library writes them
    write_model(folder, aligned, quantization_config=dict(quantization), **values)
    return expected


def random_codes(
    weight: NDArray[np.float32], random: np.random.Generator, bits: int, group: int, scale_dtype: Any = np.float16
) -> tuple[NDArray[np.int64], NDArray[Any], NDArray[np.int64]]:
    """Codes [rows, columns], scales and zero points [rows, G], all values of both occurring."""
    rows, columns = weight.shape
    count = -(-columns // group) if group > 0 else 1
    codes = random.integers(0, 1 << bits, (rows, columns))
    scale = (random.uniform(0.5, 1.5, (rows, count)) * 0.5 / (1 << bits)).astype(scale_dtype)
    return codes, scale, random.integers(0, 1 << bits, (rows, count))


def plain_values(
    codes: NDArray[Any], scale: NDArray[Any], zero: NDArray[Any], group_of: Callable[[int], int]
) -> NDArray[np.float32]:
    """(code - zero) * scale, one by one: the product of Python floats is exact, then rounded to the scale's dtype."""
    result = np.zeros(codes.shape, np.float32)
    for row in range(codes.shape[0]):
        for column in range(codes.shape[1]):
            g = group_of(column)
            value = (float(codes[row, column]) - float(zero[row, g])) * float(scale[row, g])
            result[row, column] = scale.dtype.type(value)
    return result


def pack_words(codes: NDArray[Any], bits: int) -> NDArray[np.int32]:
    """Codes [rows, columns], bit after bit into 32-bit words, the lowest first."""
    rows, columns = codes.shape
    words = np.zeros((rows, -(-columns * bits // 32)), np.uint64)
    for row in range(rows):
        number = sum(int(code) << (bits * i) for i, code in enumerate(codes[row]))
        for word in range(words.shape[1]):
            words[row, word] = number >> (32 * word) & 0xFFFFFFFF
    return words.astype(np.uint32).view(np.int32)


def bfloat16(array: NDArray[Any]) -> NDArray[Any]:
    return array.astype(ml_dtypes.bfloat16)


def edit_config(folder: Path, **changes: Any) -> None:
    """Change keys of quantization_config; ... removes one."""
    path = folder / "config.json"
    values = json.loads(path.read_text())
    quantization = values["quantization_config"] | changes
    values["quantization_config"] = {key: value for key, value in quantization.items() if value is not ...}
    path.write_text(json.dumps(values))


# ------------------------------------------------------------------------------------------------ formats
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
AWQ_PLACES = (0, 2, 4, 6, 1, 3, 5, 7)
"""Output of each nibble of a word, from the lowest on."""


def _awq_words(codes: NDArray[Any]) -> NDArray[np.int32]:
    """[K, N] -> words [K, N / 8]."""
    words = np.zeros((codes.shape[0], codes.shape[1] // 8), np.uint32)
    for nibble, place in enumerate(AWQ_PLACES):
        words |= codes[:, place::8].astype(np.uint32) << np.uint32(4 * nibble)
    return words.view(np.int32)


def pack_awq(weight: NDArray[np.float32], random: np.random.Generator, group: int = 32) -> Packed:
    codes, scale, zero = random_codes(weight, random, 4, group)
    tensors = {
        "qweight": _awq_words(codes.T),
        "qzeros": _awq_words(zero.T),
        "scales": np.ascontiguousarray(scale.T),
    }
    return tensors, plain_values(codes, scale, zero, lambda column: column // group if group > 0 else 0)


GPTQ: dict[str, Any] = {
    "quant_method": "gptq",
    "bits": 4,
    "group_size": 32,
    "desc_act": False,
    "sym": False,
    "damp_percent": 0.01,
}


def pack_gptq(
    weight: NDArray[np.float32],
    random: np.random.Generator,
    bits: int = 4,
    group: int = 32,
    minus_one: bool = True,
    act_order: bool = False,
) -> Packed:
    codes, scale, zero = random_codes(weight, random, bits, group)
    columns = codes.shape[1]
    zero = np.maximum(zero, 1) if minus_one else zero
    order = random.permutation(columns) if act_order else np.arange(columns)
    g_idx = (order // (group if group > 0 else columns)).astype(np.int32)
    tensors = {
        "qweight": np.ascontiguousarray(pack_words(codes, bits).T),
        "qzeros": pack_words(zero.T - (1 if minus_one else 0), bits),
        "scales": np.ascontiguousarray(scale.T),
        "g_idx": g_idx,
    }
    return tensors, plain_values(codes, scale, zero, lambda column: int(g_idx[column]))


def compressed_config(format: str, weights: dict[str, Any], **more: Any) -> dict[str, Any]:
    scheme = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "config_groups": {"group_0": scheme},
        "ignore": ["lm_head"],
        "quantization_status": "compressed",
        **more,
    }


def packed_config(bits: int = 4, group: int = 32, symmetric: bool = True) -> dict[str, Any]:
    strategy = "group" if group else "channel"
    values = {"num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": strategy}
    return compressed_config(
        "pack-quantized", values | {"group_size": group or None, "dynamic": False, "observer": "minmax"}
    )


def pack_compressed(
    weight: NDArray[np.float32],
    random: np.random.Generator,
    bits: int = 4,
    group: int = 32,
    symmetric: bool = True,
    act_order: bool = False,
) -> Packed:
    codes, scale, zero = random_codes(weight, random, bits, group or -1, np.float32)
    scale = bfloat16(scale)
    columns = codes.shape[1]
    zero = np.full_like(zero, 1 << (bits - 1)) if symmetric else zero
    tensors = {
        "weight_packed": pack_words(codes, bits),
        "weight_scale": scale,
        "weight_shape": np.array(codes.shape, np.int64),
    }
    if not symmetric:
        tensors["weight_zero_point"] = np.ascontiguousarray(pack_words(zero.T, bits).T)
    order = random.permutation(columns) if act_order else np.arange(columns)
    g_idx = (order // (group or columns)).astype(np.int32)
    if act_order:
        tensors["weight_g_idx"] = g_idx
    return tensors, plain_values(codes, scale, zero, lambda column: int(g_idx[column]))


FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [32, 32]}


def pack_fp8(
    weight: NDArray[np.float32], random: np.random.Generator, block: tuple[int, int] | None = (32, 32)
) -> Packed:
    rows, columns = weight.shape
    tall, wide = block or weight.shape
    codes = (weight * 400).clip(-448, 448).astype(ml_dtypes.float8_e4m3fn)
    scale = random.uniform(0.001, 0.01, (-(-rows // tall), -(-columns // wide))).astype(np.float32)
    values = np.zeros(weight.shape, np.float32)
    for row in range(rows):
        for column in range(columns):
            exact = float(codes[row, column]) * float(scale[row // tall, column // wide])
            values[row, column] = ml_dtypes.bfloat16(np.float32(exact))
    return {"weight": codes, "weight_scale_inv": scale if block else scale.reshape(())}, values
