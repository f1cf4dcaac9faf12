"""GGUF files: numbers, names and layouts as transformers has them; broken and unsupported ones refused by name."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType as Kind
from gguf.quants import dequantize, quantize
from gguf_files import f32, gguf_bytes, string, tensor_entry, write_gguf
from numpy.typing import NDArray

from llmc.compiler.checkpoint import Checkpoint
from llmc.compiler.gguf_file import GgufFile
from llmc.compiler.model_directory import ModelDirectory
from llmc.compiler.weights import read
from llmc.errors import CheckpointError, CompileError, LlmcError

Arrays = dict[str, NDArray[Any]]

SIZES = {
    "context_length": 64,
    "block_count": 2,
    "embedding_length": 64,
    "feed_forward_length": 96,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "rope.freq_base": 10000.0,
}
TOKENS = {"tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.eot_token_id": 5}


def llama_names(layers: int = 2) -> dict[str, str]:
    """GGUF's name of each tensor of a Llama."""
    names = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
    for i in range(layers):
        ours, theirs = f"blk.{i}.", f"model.layers.{i}."
        names |= {
            f"{ours}attn_norm.weight": f"{theirs}input_layernorm.weight",
            f"{ours}attn_q.weight": f"{theirs}self_attn.q_proj.weight",
            f"{ours}attn_k.weight": f"{theirs}self_attn.k_proj.weight",
            f"{ours}attn_v.weight": f"{theirs}self_attn.v_proj.weight",
            f"{ours}attn_output.weight": f"{theirs}self_attn.o_proj.weight",
            f"{ours}ffn_norm.weight": f"{theirs}post_attention_layernorm.weight",
            f"{ours}ffn_gate.weight": f"{theirs}mlp.gate_proj.weight",
            f"{ours}ffn_up.weight": f"{theirs}mlp.up_proj.weight",
            f"{ours}ffn_down.weight": f"{theirs}mlp.down_proj.weight",
        }
    return names


def interleaved(weight: NDArray[Any], heads: int) -> NDArray[Any]:
    """Llama.cpp's order of the rows of q and k."""
    half = weight.shape[0] // heads // 2
    return weight.reshape(heads, 2, half, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def random_arrays(shapes: dict[str, tuple[int, ...]]) -> Arrays:
    random = np.random.default_rng(0)
    return {name: random.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def llama_shapes(names: dict[str, str], head_dim: int = 16) -> dict[str, tuple[int, ...]]:
    """By the end of GGUF's name."""
    shapes = {
        "token_embd": (48, 64),
        "attn_q": (4 * head_dim, 64),
        "attn_k": (2 * head_dim, 64),
        "attn_v": (2 * head_dim, 64),
        "attn_output": (64, 4 * head_dim),
        "ffn_gate": (96, 64),
        "ffn_up": (96, 64),
        "ffn_down": (64, 96),
        "output": (48, 64),
        "attn_q_norm": (head_dim,),
        "attn_k_norm": (head_dim,),
    }
    return {name: shapes.get(name.removesuffix(".weight").rpartition(".")[2], (64,)) for name in names}


def metadata(architecture: str, **more: Any) -> dict[str, Any]:
    values = SIZES | more
    return {f"{architecture}.{key}": value for key, value in values.items() if value is not ...} | TOKENS


def write_llama(path: Path, **more: Any) -> Arrays:
    """A Llama with tied embeddings; returns its tensors under transformers' names."""
    names = llama_names()
    arrays = random_arrays(llama_shapes(names))
    stored = dict(arrays)
    for name in arrays:
        if ".attn_q." in name or ".attn_k." in name:
            stored[name] = interleaved(arrays[name], 4 if ".attn_q." in name else 2)
    write_gguf(path, "llama", metadata("llama", **more), stored)
    return {names[name]: array for name, array in arrays.items()}


def assert_weights(checkpoint: Checkpoint, expected: Arrays) -> None:
    for name, array in expected.items():
        found = read(checkpoint.weight(name))
        np.testing.assert_array_equal(found, array, err_msg=name)


def test_llama_with_its_rows_put_back(tmp_path: Path) -> None:
    expected = write_llama(tmp_path / "m.gguf")
    checkpoint = Checkpoint.open(tmp_path / "m.gguf")
    assert_weights(checkpoint, expected)
    assert checkpoint.weight("lm_head.weight") is checkpoint.weight("model.embed_tokens.weight")
    config = checkpoint.config
    assert config.architectures == ["LlamaForCausalLM"] and config.rms_norm_eps == 1e-5 and config.vocab_size == 48
    assert checkpoint.generation_config == {"eos_token_id": [2, 5], "bos_token_id": 1}
    assert checkpoint.dtype == "float32" and not checkpoint.warnings
    assert Checkpoint.open(tmp_path).names == checkpoint.names  # the only GGUF file of a directory


def test_a_file_that_is_named_may_be_a_link(tmp_path: Path) -> None:
    write_llama(tmp_path / "m.gguf")
    (tmp_path / "links").mkdir()
    (tmp_path / "links/m.gguf").symlink_to(tmp_path / "m.gguf")
    Checkpoint.open(tmp_path / "links/m.gguf")
    with pytest.raises(CheckpointError, match="leads out"):
        Checkpoint.open(tmp_path / "links")
    (tmp_path / "links/config.json").write_text("{}")  # as repositories of GGUF files have
    (tmp_path / "links/m.gguf").unlink()
    write_llama(tmp_path / "links/m.gguf")
    Checkpoint.open(tmp_path / "links")


def test_several_files_have_to_be_told_apart(tmp_path: Path) -> None:
    write_llama(tmp_path / "a.gguf")
    write_llama(tmp_path / "b.gguf")
    with pytest.raises(CheckpointError, match=r"a\.gguf, b\.gguf"):
        Checkpoint.open(tmp_path)


PLAIN_KINDS = {"float32": np.dtype(np.float32), "float16": np.dtype(np.float16)}
BLOCK_KINDS = [Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0]


@pytest.mark.parametrize("kind", BLOCK_KINDS, ids=lambda kind: kind.name)
def test_blocks_are_dequantized_row_by_row(tmp_path: Path, kind: Kind) -> None:
    array = np.random.default_rng(0).normal(size=(3, 5, 64)).astype(np.float32)
    path = write_gguf(tmp_path / "m.gguf", "llama", {}, {"x": (array, kind), "y": (array[0, 0], kind)})
    expected = dequantize(quantize(array, kind), kind)
    tensors = GgufFile.open(ModelDirectory(tmp_path), path.name).tensors
    x = tensors["x"]
    assert x.shape == (3, 5, 64) and x.dtype == "float32" and x.nbytes == expected.nbytes
    np.testing.assert_array_equal(read(x), expected)
    np.testing.assert_array_equal(x.rows(1, 2), expected[1:2])
    assert x.rows(2, 2).shape == (0, 5, 64)
    np.testing.assert_array_equal(read(tensors["y"]), expected[0, 0])
    np.testing.assert_array_equal(tensors["y"].rows(7, 40), expected[0, 0, 7:40])


def test_plain_types_are_read_exactly(tmp_path: Path) -> None:
    numbers = np.array([1.0, -0.5, 3.14159, 65504, 2**-14], np.float32)
    raw = {
        "f32": ((5,), 0, numbers.tobytes()),
        "f16": ((5,), 1, numbers.astype(np.float16).tobytes()),
        "bf16": ((5,), 30, numbers.astype(ml_dtypes.bfloat16).tobytes()),
    }
    (tmp_path / "m.gguf").write_bytes(gguf_bytes({"general.architecture": "llama"}, raw))
    tensors = GgufFile.open(ModelDirectory(tmp_path), "m.gguf").tensors
    for name, kind in (("f32", np.float32), ("f16", np.float16), ("bf16", ml_dtypes.bfloat16)):
        found = read(tensors[name])
        assert found.dtype == kind and found.tobytes() == numbers.astype(kind).tobytes()


def test_quantized_weights_are_computed_in_bfloat16_and_the_user_is_told(tmp_path: Path) -> None:
    names = llama_names()
    arrays = random_arrays(llama_shapes(names))
    stored = {name: (array, Kind.Q8_0) if array.ndim == 2 else array for name, array in arrays.items()}
    write_gguf(tmp_path / "m.gguf", "llama", metadata("llama"), stored)
    checkpoint = Checkpoint.open(tmp_path / "m.gguf")
    assert checkpoint.dtype == "bfloat16" and "Q8_0" in checkpoint.warnings[0]


# Architectures -------------------------------------------------------------------------------------------------------


def qwen2(path: Path) -> Arrays:
    names = llama_names() | {"output.weight": "lm_head.weight"}
    for i in range(2):
        for part in "qkv":
            names[f"blk.{i}.attn_{part}.bias"] = f"model.layers.{i}.self_attn.{part}_proj.bias"
    shapes = llama_shapes(names)
    shapes |= {name: (64 if "attn_q" in name else 32,) for name in names if name.endswith(".bias")}
    arrays = random_arrays(shapes)
    write_gguf(path, "qwen2", metadata("qwen2"), arrays)
    return {names[name]: array for name, array in arrays.items()}


def with_qk_norms(names: dict[str, str]) -> dict[str, str]:
    for i in range(2):
        for part in "qk":
            names[f"blk.{i}.attn_{part}_norm.weight"] = f"model.layers.{i}.self_attn.{part}_norm.weight"
    return names


def qwen3(path: Path) -> Arrays:
    names = with_qk_norms(llama_names())
    arrays = random_arrays(llama_shapes(names, head_dim=32))
    write_gguf(path, "qwen3", metadata("qwen3", **{"attention.key_length": 32, "attention.value_length": 32}), arrays)
    return {names[name]: array for name, array in arrays.items()}


def qwen3moe(path: Path) -> Arrays:
    names = {name: hf for name, hf in with_qk_norms(llama_names()).items() if ".ffn_" not in name or "norm" in name}
    shapes = llama_shapes(names)
    for i in range(2):
        shapes[f"blk.{i}.ffn_gate_inp.weight"] = (8, 64)
        shapes |= {f"blk.{i}.ffn_{part}_exps.weight": (8, 32, 64) for part in ("gate", "up")}
        shapes[f"blk.{i}.ffn_down_exps.weight"] = (8, 64, 32)
    arrays = random_arrays(shapes)
    experts = {"expert_count": 8, "expert_used_count": 2, "expert_feed_forward_length": 32}
    write_gguf(path, "qwen3moe", metadata("qwen3moe", **experts, **{"attention.key_length": 16}), arrays)
    expected = {names[name]: array for name, array in arrays.items() if name in names}
    for i in range(2):
        gate, up = (arrays[f"blk.{i}.ffn_{part}_exps.weight"] for part in ("gate", "up"))
        expected[f"model.layers.{i}.mlp.experts.gate_up_proj"] = np.concatenate([gate, up], 1)
        expected[f"model.layers.{i}.mlp.experts.down_proj"] = arrays[f"blk.{i}.ffn_down_exps.weight"]
        expected[f"model.layers.{i}.mlp.gate.weight"] = arrays[f"blk.{i}.ffn_gate_inp.weight"]
    return expected


def gemma(architecture: str) -> Callable[[Path], Arrays]:
    def write(path: Path) -> Arrays:
        names = with_qk_norms(llama_names()) if architecture == "gemma3" else llama_names()
        for i in range(2):
            names |= {
                f"blk.{i}.post_attention_norm.weight": f"model.layers.{i}.post_attention_layernorm.weight",
                f"blk.{i}.ffn_norm.weight": f"model.layers.{i}.pre_feedforward_layernorm.weight",
                f"blk.{i}.post_ffw_norm.weight": f"model.layers.{i}.post_feedforward_layernorm.weight",
            }
        arrays = random_arrays(llama_shapes(names))
        stored = {name: a + np.float32(1) if name.endswith("norm.weight") else a for name, a in arrays.items()}
        caps = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0} if architecture == "gemma2" else {}
        lengths = {"attention.key_length": 16, "attention.value_length": 16, "attention.sliding_window": 8}
        write_gguf(path, architecture, metadata(architecture, **caps, **lengths), stored)
        return {names[n]: a - np.float32(1) if n.endswith("norm.weight") else a for n, a in stored.items()}

    return write


def starcoder2(path: Path) -> Arrays:
    names = {name: hf for name, hf in llama_names().items() if "ffn_gate" not in name}
    names = {name: hf.replace("up_proj", "c_fc").replace("down_proj", "c_proj") for name, hf in names.items()}
    shapes = llama_shapes(names)
    for name in list(names):
        if name != "token_embd.weight":
            bias = name.replace("weight", "bias")
            names[bias] = names[name].replace("weight", "bias")
            shapes[bias] = shapes[name][:1]
    arrays = random_arrays(shapes)
    more = {"attention.layer_norm_epsilon": 1e-5, "attention.layer_norm_rms_epsilon": ...}
    write_gguf(path, "starcoder2", metadata("starcoder2", **more), arrays)
    return {names[name]: array for name, array in arrays.items()}


def gpt2(path: Path) -> Arrays:
    names = {
        "token_embd.weight": "transformer.wte.weight",
        "position_embd.weight": "transformer.wpe.weight",
        "output_norm.weight": "transformer.ln_f.weight",
        "output_norm.bias": "transformer.ln_f.bias",
    }
    parts = {
        "attn_norm": "ln_1",
        "attn_qkv": "attn.c_attn",
        "attn_output": "attn.c_proj",
        "ffn_norm": "ln_2",
        "ffn_up": "mlp.c_fc",
        "ffn_down": "mlp.c_proj",
    }
    rows = {"attn_qkv": (192, 64), "attn_output": (64, 64), "ffn_up": (96, 64), "ffn_down": (64, 96)}
    shapes = {"token_embd.weight": (48, 64), "position_embd.weight": (64, 64)}
    shapes |= {"output_norm.weight": (64,), "output_norm.bias": (64,)}
    for i in range(2):
        for ours, theirs in parts.items():
            for suffix in ("weight", "bias"):
                names[f"blk.{i}.{ours}.{suffix}"] = f"transformer.h.{i}.{theirs}.{suffix}"
                shape = rows.get(ours, (64,))
                shapes[f"blk.{i}.{ours}.{suffix}"] = shape if suffix == "weight" else shape[:1]
    arrays = random_arrays(shapes)
    keys = ("context_length", "block_count", "embedding_length", "feed_forward_length", "attention.head_count")
    values = {f"gpt2.{key}": SIZES[key] for key in keys} | {"gpt2.attention.layer_norm_epsilon": 1e-5}
    write_gguf(path, "gpt2", values, arrays)
    return {names[n]: a.T if "c_" in names[n] and n.endswith("weight") else a for n, a in arrays.items()}


WRITERS = {
    "qwen2": qwen2,
    "qwen3": qwen3,
    "qwen3moe": qwen3moe,
    "gemma2": gemma("gemma2"),
    "gemma3": gemma("gemma3"),
    "starcoder2": starcoder2,
    "gpt2": gpt2,
}


@pytest.mark.parametrize("architecture", WRITERS)
def test_names_and_layouts_of(tmp_path: Path, architecture: str) -> None:
    expected = WRITERS[architecture](tmp_path / "m.gguf")
    checkpoint = Checkpoint.open(tmp_path / "m.gguf")
    assert_weights(checkpoint, expected)
    assert set(checkpoint.names) - {"lm_head.weight"} == set(expected) - {"lm_head.weight"}


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3moe", "gemma2", "gemma3", "gpt2", "starcoder2"])
def test_config_agrees_with_transformers_loader(tmp_path: Path, architecture: str) -> None:
    """An independent reading of the same metadata, where transformers has one."""
    from transformers import AutoConfig

    WRITERS[architecture](tmp_path / "m.gguf")
    ours = Checkpoint.open(tmp_path / "m.gguf").config.to_dict()
    theirs = AutoConfig.from_pretrained(tmp_path, gguf_file="m.gguf").to_dict()
    # Theirs are defaults of the class where the file says better (llama.cpp's own rule), or are read elsewhere.
    known = {
        "architectures",
        "_name_or_path",
        "_model_name_or_path",
        "query_pre_attn_scalar",
        "vocab_size",
        "unk_token_id",
        "pad_token_id",
    }
    if architecture == "gpt2":  # the file names no special tokens
        known |= {"bos_token_id", "eos_token_id"}
    if architecture in ("gpt2", "starcoder2"):  # theirs leaves the epsilon, the context and the width at defaults
        known |= {"n_ctx", "n_inner", "n_positions", "feed_forward_length", "rope_parameters", "tie_word_embeddings"}
    if architecture == "qwen3moe":
        known |= {"moe_intermediate_size"}
    if architecture == "gemma2":
        known |= {"attn_logit_softcapping", "final_logit_softcapping"}
    for key in set(ours) & set(theirs) - known:
        expected = pytest.approx(theirs[key], rel=1e-6) if isinstance(theirs[key], float) else theirs[key]
        assert ours[key] == expected, key


def test_the_better_of_two_copies_of_a_tied_matrix(tmp_path: Path) -> None:
    names = llama_names()
    arrays = random_arrays(llama_shapes(names))
    table = arrays["token_embd.weight"]
    stored: dict[str, Any] = dict(arrays) | {
        "token_embd.weight": (table, Kind.Q5_0),
        "output.weight": (table, Kind.Q8_0),
    }
    write_gguf(tmp_path / "m.gguf", "llama", metadata("llama"), stored)
    checkpoint = Checkpoint.open(tmp_path / "m.gguf")
    found = read(checkpoint.weight("model.embed_tokens.weight"))
    np.testing.assert_array_equal(found, dequantize(quantize(table, Kind.Q8_0), Kind.Q8_0))
    assert checkpoint.weight("lm_head.weight") is checkpoint.weight("model.embed_tokens.weight")
    assert "one matrix" in checkpoint.warnings[0]
    stored["output.weight"] = (table[::-1], Kind.Q8_0)  # another matrix
    write_gguf(tmp_path / "m.gguf", "llama", metadata("llama"), stored)
    checkpoint = Checkpoint.open(tmp_path / "m.gguf")
    assert checkpoint.weight("lm_head.weight") is not checkpoint.weight("model.embed_tokens.weight")


def test_ropes(tmp_path: Path) -> None:
    write_llama(tmp_path / "m.gguf", **{"rope.scaling.type": "linear", "rope.scaling.factor": 4.0})
    rope = Checkpoint.open(tmp_path / "m.gguf").config.rope_parameters
    assert (rope["rope_type"], rope["factor"], rope["rope_theta"]) == ("linear", 4.0, 10000.0)
    write_llama(tmp_path / "m.gguf", **{"rope.scaling.type": "spiral"})
    refused(tmp_path / "m.gguf", "'spiral'", error=CompileError)


def test_the_frequency_factors_of_llama_3(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = {"rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope |= {"rope_type": "llama3", "original_max_position_embeddings": 8192}
    config = LlamaConfig(hidden_size=64, num_attention_heads=4, rope_parameters=rope)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = 1 / (500000.0 ** (torch.arange(0, 16, 2) / 16))
    names = llama_names()
    arrays = random_arrays(llama_shapes(names)) | {"rope_freqs.weight": (plain / scaled).numpy().astype(np.float32)}
    write_gguf(tmp_path / "m.gguf", "llama", metadata("llama", **{"rope.freq_base": 500000.0}), arrays)
    found = Checkpoint.open(tmp_path / "m.gguf").config.rope_parameters
    assert {key: found[key] for key in rope} == rope
    arrays["rope_freqs.weight"] = np.linspace(1, 2, 8, dtype=np.float32)
    write_gguf(tmp_path / "m.gguf", "llama", metadata("llama"), arrays)
    refused(tmp_path / "m.gguf", "rope_freqs.weight", error=CompileError)


# Refusals ------------------------------------------------------------------------------------------------------------


def refused(path: Path, *words: str, error: type[LlmcError] = CheckpointError) -> None:
    with pytest.raises(error) as caught:
        Checkpoint.open(path)
    for word in words:
        assert word in str(caught.value), str(caught.value)


def test_what_is_not_supported_is_named(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, "mamba", {}, {"x": np.ones(4, np.float32)})
    refused(path, "'mamba'", "llama", error=CompileError)
    write_llama(path, expert_count=8)
    refused(path, "llama.expert_count", error=CompileError)
    write_llama(path, **{"attention.head_count_kv": [2, 2]})
    refused(path, "llama.attention.head_count_kv", error=CompileError)
    write_llama(path, **{"attention.value_length": 32})
    refused(path, "value_length", error=CompileError)
    write_llama(path, **{"rope.dimension_count": 8})
    refused(path, "rope.dimension_count", error=CompileError)


def test_missing_and_left_over_tensors_are_named(tmp_path: Path) -> None:
    names = llama_names()
    arrays = random_arrays(llama_shapes(names))
    path = write_gguf(tmp_path / "m.gguf", "llama", metadata("llama"), arrays | {"blk.0.extra": np.ones(4, np.float32)})
    refused(path, "blk.0.extra")
    del arrays["blk.1.ffn_up.weight"]
    refused(write_gguf(path, "llama", metadata("llama"), arrays), "model.layers.1.mlp.up_proj.weight")


A = {"general.architecture": "llama"}
X = {"x": f32(np.ones(8))}
XY = X | {"y": f32(np.ones(8))}
WHOLE = gguf_bytes(A, XY)
HEAD = b"GGUF" + struct.pack("<IQQ", 3, 1, 0)


def entry(shape: tuple[int, ...], kind: int = 0, offset: int = 0, data: int = 32) -> bytes:
    head = HEAD + tensor_entry("x", shape, kind, offset)
    return head + b"\0" * (-len(head) % 32) + b"\0" * data


BROKEN = {
    "empty": b"",
    "other magic": gguf_bytes(A, X, magic=b"GGML"),
    "version 1": gguf_bytes(A, X, version=1),
    "version 4": gguf_bytes(A, X, version=4),
    "big-endian": gguf_bytes(A, X, version=3 << 24),
    "cut in the header": WHOLE[:20],
    "cut in the metadata": WHOLE[:50],
    "cut in the tensors": WHOLE[:130],
    "cut in the data": WHOLE[:-40],
    "cut by a byte": WHOLE[:-1],
    "bytes after the end": WHOLE + b"\0" * 64,
    "2^60 tensors": gguf_bytes(A, X, tensor_count=1 << 60),
    "2^63 keys": gguf_bytes(A, X, metadata_count=1 << 63),
    "no tensors": gguf_bytes(A, {}),
    "key twice": HEAD[:-8] + struct.pack("<Q", 2) + 2 * (string("a") + struct.pack("<If", 6, 1.0)),
    "string of 2^64 - 1": HEAD[:-8] + struct.pack("<QQ", 1, (1 << 64) - 1),
    "key of 100 kB": HEAD[:-8] + struct.pack("<Q", 1) + string("a" * 100_000),
    "key that is not UTF-8": HEAD[:-8] + struct.pack("<Q", 1) + string(b"\xff") + struct.pack("<If", 6, 1.0),
    "kind 99": HEAD[:-8] + struct.pack("<Q", 1) + string("a") + struct.pack("<I", 99) + bytes(64),
    "array of arrays": HEAD[:-8] + struct.pack("<Q", 1) + string("a") + struct.pack("<IIQ", 9, 9, 1) + bytes(64),
    "array of 2^61": HEAD[:-8] + struct.pack("<Q", 1) + string("a") + struct.pack("<IIQ", 9, 4, 1 << 61) + bytes(64),
    "texts of 2^61": HEAD[:-8] + struct.pack("<Q", 1) + string("a") + struct.pack("<IIQ", 9, 8, 1 << 61) + bytes(64),
    "alignment 3": gguf_bytes(A | {"general.alignment": 3}, X),
    "alignment 0": gguf_bytes(A | {"general.alignment": 0}, X),
    "no dimensions": entry(()),
    "5 dimensions": entry((1, 1, 1, 1, 8)),
    "size 0": entry((0,)),
    "overflow": entry((1 << 32, 1 << 32)),
    "overflow to zero": entry((1 << 63, 2)),
    "type 77": entry((8,), 77),
    "type IQ1_S": entry((256,), 19, data=50),
    "row that is no block": entry((8,), 8),
    "offset beyond the end": entry((8,), 0, 64),
    "offset that is not aligned": entry((8,), 0, 4),
    "hole": gguf_bytes(A, XY, shift=32),
    "overlap": gguf_bytes(A, {"x": f32(np.ones(16)), "y": f32(np.ones(8))}, shift=-32),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_malformed_file_is_refused(tmp_path: Path, case: str) -> None:
    (tmp_path / "m.gguf").write_bytes(BROKEN[case])
    refused(tmp_path / "m.gguf", "m.gguf")


def test_another_alignment_and_no_padding_at_the_end(tmp_path: Path) -> None:
    odd = {"x": f32(np.arange(3)), "y": f32(np.arange(5))}
    (tmp_path / "m.gguf").write_bytes(gguf_bytes(A | {"general.alignment": 64}, odd, alignment=64))
    tensors = GgufFile.open(ModelDirectory(tmp_path), "m.gguf").tensors
    np.testing.assert_array_equal(read(tensors["y"]), np.arange(5, dtype=np.float32))


# Tokenizers ----------------------------------------------------------------------------------------------------------


def byte_level(pre: str) -> dict[str, Any]:
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    tokens = ["<|end|>", "<|start|>", *bytes_to_unicode().values(), "he", "12"]
    return {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 3] + [1] * (len(tokens) - 2),
        "tokenizer.ggml.merges": ["h e", "1 2"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.chat_template": "{{ messages }}",
    }


def test_what_the_pre_tokenizers_name_means(tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    from llmc.compiler.gguf_tokenizer import freeze_gguf

    def tokens(pre: str, text: str) -> list[str]:
        frozen = freeze_gguf(byte_level(pre), "m.gguf")
        assert frozen is not None and frozen.prefix_ids == (1,) and frozen.suffix_ids == ()
        assert frozen.files["chat_template.jinja"] == b"{{ messages }}"
        encoded: list[str] = Tokenizer.from_str(frozen.files["tokenizer.json"].decode()).encode(text).tokens
        return encoded

    assert tokens("gpt-2", "he12<|end|>") == ["<|start|>", "he", "12", "<|end|>"]
    assert tokens("smollm", "he12") == ["<|start|>", "he", "1", "2"]
    assert tokens("qwen2", "e\u0301") == tokens("qwen2", "\u00e9")
    assert tokens("gpt-2", "e\u0301") != tokens("gpt-2", "\u00e9")
    with pytest.raises(CheckpointError, match="'futuristic'"):
        freeze_gguf(byte_level("futuristic"), "m.gguf")
    with pytest.raises(CheckpointError, match="99999"):
        freeze_gguf(byte_level("gpt-2") | {"tokenizer.ggml.eos_token_id": 99999}, "m.gguf")
    assert freeze_gguf({"general.architecture": "llama"}, "m.gguf") is None


# Real files ----------------------------------------------------------------------------------------------------------

REAL = {
    "SmolLM2-135M-Instruct.Q4_1.gguf": "SmolLM2-135M-Instruct-float32",
    "Qwen2.5-Coder-0.5B-Instruct.Q4_K_M.gguf": "Qwen2.5-Coder-0.5B-Instruct-bfloat16",
    "gemma-3-270m.Q4_K_M.gguf": "gemma-3-270m-bfloat16",
}


@pytest.mark.real_model
@pytest.mark.parametrize("name", REAL)
def test_a_real_file_gives_the_bits_of_its_converted_directory(real_model: Callable[[str], Path], name: str) -> None:
    ours, theirs = Checkpoint.open(real_model(name)), Checkpoint.open(real_model(REAL[name]))
    assert set(ours.names) == set(theirs.names)
    for parameter in ours.names:
        expected = read(theirs.weight(parameter))
        found = read(ours.weight(parameter)).astype(expected.dtype)
        assert np.array_equal(found.view(np.uint8), expected.view(np.uint8)), parameter
    a, b = ours.tokenizer(), theirs.tokenizer()
    assert a is not None and b is not None
    assert a.files["tokenizer.json"] == b.files["tokenizer.json"]
    assert a.files.get("chat_template.jinja") == b.files.get("chat_template.jinja")
    assert (a.prefix_ids, a.suffix_ids) == (b.prefix_ids, b.suffix_ids)
    keys = (
        "rope_parameters",
        "rms_norm_eps",
        "max_position_embeddings",
        "tie_word_embeddings",
        "eos_token_id",
        "head_dim",
    )
    for key in keys:
        assert getattr(ours.config, key, None) == getattr(theirs.config, key, None), key
