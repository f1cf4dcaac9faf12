"""Writes small model directories, whole and broken, without the code under test."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

Arrays = dict[str, NDArray[Any]]

CODES = {
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "uint8": "U8",
    "int32": "I32",
    "int64": "I64",
    "bool": "BOOL",
}

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 48,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}


def llama_arrays(dtype: str = "float32", seed: int = 0, **config: Any) -> Arrays:
    """Random weights of a Llama of this config."""
    values = CONFIG | config
    random = np.random.default_rng(seed)
    hidden, inner, dim = values["hidden_size"], values["intermediate_size"], values["head_dim"]
    q, kv = values["num_attention_heads"] * dim, values["num_key_value_heads"] * dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (values["vocab_size"], hidden)}
    for layer in range(values["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        shapes |= {
            f"{prefix}input_layernorm.weight": (hidden,),
            f"{prefix}self_attn.q_proj.weight": (q, hidden),
            f"{prefix}self_attn.k_proj.weight": (kv, hidden),
            f"{prefix}self_attn.v_proj.weight": (kv, hidden),
            f"{prefix}self_attn.o_proj.weight": (hidden, q),
            f"{prefix}post_attention_layernorm.weight": (hidden,),
            f"{prefix}mlp.gate_proj.weight": (inner, hidden),
            f"{prefix}mlp.up_proj.weight": (inner, hidden),
            f"{prefix}mlp.down_proj.weight": (hidden, inner),
        }
    shapes |= {"model.norm.weight": (hidden,), "lm_head.weight": (values["vocab_size"], hidden)}
    numbers = {name: random.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    if values["tie_word_embeddings"]:
        del numbers["lm_head.weight"]
    return {name: array.astype(np_dtype(dtype)) for name, array in numbers.items()}


def np_dtype(name: str) -> np.dtype[Any]:
    return np.dtype(getattr(ml_dtypes, name)) if hasattr(ml_dtypes, name) else np.dtype(name)


def safetensors_bytes(arrays: Mapping[str, NDArray[Any]], metadata: Mapping[str, str] | None = None) -> bytes:
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    data = b""
    for name, array in arrays.items():
        raw = array.tobytes()
        offsets = [len(data), len(data) + len(raw)]
        header[name] = {"dtype": CODES[array.dtype.name], "shape": list(array.shape), "data_offsets": offsets}
        data += raw
    return with_header(json.dumps(header).encode(), data)


def with_header(header: bytes, data: bytes = b"") -> bytes:
    return len(header).to_bytes(8, "little") + header + data


def write_model(
    folder: Path, arrays: Mapping[str, NDArray[Any]], metadata: Mapping[str, str] | None = None, **config: Any
) -> Path:
    """A directory with config.json and model.safetensors. A config value of ... removes the key."""
    folder.mkdir(parents=True, exist_ok=True)
    values = {key: value for key, value in (CONFIG | config).items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(values))
    (folder / "model.safetensors").write_bytes(safetensors_bytes(arrays, metadata))
    return folder


def write_llama(folder: Path, dtype: str = "float32", **config: Any) -> Path:
    return write_model(folder, llama_arrays(dtype, **config), **config)


def write_sharded(folder: Path, arrays: Mapping[str, NDArray[Any]], count: int = 2, **config: Any) -> list[str]:
    """The same in several files with an index; returns their names."""
    write_model(folder, {}, **config)
    (folder / "model.safetensors").unlink()
    names = [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
    home = {tensor: names[i % count] for i, tensor in enumerate(arrays)}
    for name in names:
        part = {tensor: array for tensor, array in arrays.items() if home[tensor] == name}
        (folder / name).write_bytes(safetensors_bytes(part))
    write_index(folder, home)
    return names


def write_index(folder: Path, home: Mapping[str, str]) -> None:
    content = {"metadata": {"total_size": 1}, "weight_map": dict(home)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(content))
