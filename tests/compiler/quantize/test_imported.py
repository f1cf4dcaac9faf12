"""Engines of quantized checkpoints: the codes are kept, and the numbers are those of transformers on what they mean."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import CONFIG, llama_arrays, write_model
from engines import Packed
from gguf.constants import GGMLQuantizationType as Kind
from gguf_files import write_gguf
from numpy.typing import NDArray
from quantized_files import (
    AWQ,
    FP8,
    GPTQ,
    SIZES,
    bfloat16,
    pack_awq,
    pack_compressed,
    pack_fp8,
    pack_gptq,
    packed_config,
    write_quantized,
)
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from llmc.compiler.api import Compiled, build_engine, compile_model
from llmc.compiler.checkpoint import Checkpoint
from llmc.compiler.config import BuildConfig
from llmc.compiler.progress import Progress
from llmc.compiler.quantized_views import find_quantized
from llmc.compiler.quantized_weights import in_order
from llmc.compiler.weights import read
from llmc.errors import CompileError, UsageError
from llmc.runtime.devices.cpu import CpuExecutor
from llmc.runtime.engine import load_engine

IDS = [3, 40, 17, 5, 29, 11, 2, 33, 8]

FORMATS: dict[str, tuple[dict[str, Any], Callable[..., Any], tuple[str, int]]] = {
    "awq": (AWQ, pack_awq, ("int4", 32)),
    "awq, odd groups": (AWQ | {"group_size": 64}, lambda w, r: pack_awq(w, r, 64), ("int4", 64)),
    "gptq v1": (GPTQ, pack_gptq, ("int4", 32)),
    "gptq v2": (
        GPTQ | {"checkpoint_format": "gptq_v2", "bits": 8, "group_size": -1},
        lambda w, r: pack_gptq(w, r, 8, -1, False),
        ("int8", 0),
    ),
    "gptq act-order": (GPTQ | {"desc_act": True}, lambda w, r: pack_gptq(w, r, act_order=True), ("int4", 32)),
    "compressed-tensors": (packed_config(), pack_compressed, ("int4", 32)),
    "compressed-tensors with zero points": (
        packed_config(symmetric=False),
        lambda w, r: pack_compressed(w, r, symmetric=False),
        ("int4", 32),
    ),
    "fp8": (FP8, pack_fp8, ("fp8", 32)),
}


@pytest.mark.parametrize(("kind", "end"), [("gptq v1", "scales"), ("fp8", "weight")])
def test_numbers_that_are_not_finite(tmp_path: Path, kind: str, end: str) -> None:
    values, pack, _ = FORMATS[kind]

    def broken(weight: NDArray[np.float32], random: np.random.Generator) -> Any:
        tensors, expected = pack(weight, random)
        if weight.shape == (64, 96):
            tensors[end] = np.full(tensors[end].shape, np.nan, tensors[end].dtype)
        return tensors, expected

    write_quantized(tmp_path / "model", values, broken)
    with pytest.raises(CompileError, match=r"down_proj\.weight.*; the checkpoint is damaged"):
        build_engine(tmp_path / "model", tmp_path / "engine", BuildConfig())
    assert not (tmp_path / "engine").exists()


def compiled(path: Path, **options: Any) -> Compiled:
    checkpoint = Checkpoint.open(path, dequantize=bool(options.get("dequantize")))
    return compile_model(checkpoint, BuildConfig(**options), Progress())


def numbers(checkpoint: Checkpoint, name: str) -> NDArray[np.float32]:
    """What the codes stand for, before that is rounded to the dtype of the library that wrote them."""
    source = checkpoint.weight(name)
    found = find_quantized(source)
    if found is None:
        return read(source).astype(np.float32)
    values = found.quantized_rows(0, int(np.prod(found.shape[:-1]))).dequantize()
    return in_order(values, found.order).reshape(found.shape)


def expected_logits(path: Path, config: dict[str, Any]) -> NDArray[np.float32]:
    """Of transformers, in float32."""
    checkpoint = Checkpoint.open(path)
    values = {key: value for key, value in config.items() if key not in ("quantization_config", "torch_dtype")}
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[config["model_type"]].from_dict(values)).float().eval()
    state = {name: torch.from_numpy(numbers(checkpoint, name)) for name in checkpoint.names}
    model.load_state_dict(state)
    with torch.no_grad():
        logits: NDArray[np.float32] = model(torch.tensor([IDS])).logits[0].numpy()
    return logits


def config_of(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((path / "config.json").read_text())
    return found


def engine_logits(engine: Path) -> NDArray[np.float32]:
    """A prefill of most tokens, then one at a time."""
    executor = CpuExecutor(load_engine(engine), num_blocks=8)
    packed = Packed(executor, {"a": IDS})
    return packed.run([[("a", 6)], [("a", 1)], [("a", 2)]])["a"]


def close(found: NDArray[np.float32], expected: NDArray[np.float32], bound: float) -> bool:
    return bool(np.abs(found - expected).max() <= bound * np.abs(expected).max())


@pytest.mark.parametrize("name", FORMATS)
def test_logits(tmp_path: Path, name: str) -> None:
    """In float32 they are those of transformers; with the inputs rounded to int8 they are near."""
    quantization, pack, (format, group) = FORMATS[name]
    write_quantized(tmp_path / "model", quantization, pack, "float32" if name == "fp8" else "float16")
    expected = expected_logits(tmp_path / "model", config_of(tmp_path / "model"))
    result = build_engine(tmp_path / "model", tmp_path / "exact", BuildConfig(compute="float32", dtype="float32"))
    assert close(engine_logits(tmp_path / "exact"), expected, 1e-4)
    plan = load_engine(tmp_path / "exact").plan
    products = [step for step in plan.steps if step.op == "quantized_linear"]
    if format == "plain":
        assert not products
        return
    # q, k and v are one, and so are gate and up, unless each has an order of its own
    assert len(products) == 2 * (7 if "act-order" in name else 4)
    assert {(step.attributes["format"], step.attributes["group"]) for step in products} == {(format, group)}
    assert {step.op for step in plan.steps if "layers" in step.module} & {"linear"} == set()
    kept = [entry for entry in result.report["coverage"] if not entry["reason"]]
    assert [(entry["format"], entry["group"]) for entry in kept] == [(format, group)] * len(products)
    build_engine(tmp_path / "model", tmp_path / "fast", BuildConfig())
    assert close(engine_logits(tmp_path / "fast"), expected, 0.05)


def test_floats_on_request(tmp_path: Path) -> None:
    write_quantized(tmp_path / "model", AWQ, pack_awq)
    build_engine(tmp_path / "model", tmp_path / "engine", BuildConfig(dtype="float32", dequantize=True))
    engine = load_engine(tmp_path / "engine")
    assert "quantized_linear" not in {step.op for step in engine.plan.steps}
    expected = expected_logits(tmp_path / "model", config_of(tmp_path / "model"))
    assert close(engine_logits(tmp_path / "engine"), expected, 2e-3)  # the library rounds to float16


def test_parts_of_a_merged_weight_that_differ(tmp_path: Path) -> None:
    """v has 8 bits: it becomes a product of its own, and q and k stay in 4."""
    config = packed_config()
    eight = packed_config(8)["config_groups"]["group_0"] | {"targets": ["re:.*(v|up)_proj"]}
    config["config_groups"]["group_1"] = eight
    model = tmp_path / "model"
    four, also_eight = tmp_path / "four", tmp_path / "eight"
    write_quantized(four, packed_config(), pack_compressed, "float16")
    write_quantized(also_eight, packed_config(8), lambda w, r: pack_compressed(w, r, 8), "float16")
    wide = {name: array for name, array in stored(also_eight).items() if ".v_proj." in name or ".up_proj." in name}
    arrays = stored(four) | wide
    write_model(model, arrays, **(config_of(four) | {"quantization_config": config}))
    build_engine(model, tmp_path / "engine", BuildConfig(compute="float32", dtype="float32"))
    formats = [
        (step.attributes["format"], step.module.rpartition(".")[2])
        for step in load_engine(tmp_path / "engine").plan.steps
        if step.op == "quantized_linear"
    ]
    assert [format for format, _ in formats] == ["int4", "int8", "int4", "int4", "int8", "int4"] * 2
    assert close(engine_logits(tmp_path / "engine"), expected_logits(model, config_of(model)), 1e-4)


def stored(path: Path) -> dict[str, NDArray[Any]]:
    from safetensors import safe_open

    with safe_open(path / "model.safetensors", "np") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping


@pytest.mark.parametrize(
    ("compute", "message"),
    [("fp8", "--compute fp8: not for int4 weights"), ("int3", "--compute int3: unknown; known: auto, int8")],
)
def test_computes_that_do_not_fit(tmp_path: Path, compute: str, message: str) -> None:
    write_quantized(tmp_path, AWQ, pack_awq)
    with pytest.raises(UsageError, match=message):
        compiled(tmp_path, compute=compute)


def test_a_compute_that_nothing_follows(tmp_path: Path) -> None:
    write_model(tmp_path, llama_arrays())
    with pytest.raises(UsageError, match="--compute bfloat16: no weights are quantized"):
        compiled(tmp_path, compute="bfloat16")


GGUF_SIZES = {
    "context_length": 64,
    "block_count": 1,
    "embedding_length": 64,
    "feed_forward_length": 96,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "rope.freq_base": 10000.0,
}
GGUF_KINDS = {
    "token_embd.weight": Kind.Q8_0,
    "blk.0.attn_q.weight": Kind.Q4_1,
    "blk.0.attn_k.weight": Kind.Q4_1,
    "blk.0.attn_v.weight": Kind.Q5_0,
    "blk.0.attn_output.weight": Kind.Q4_0,
    "blk.0.ffn_gate.weight": Kind.Q5_1,
    "blk.0.ffn_up.weight": Kind.Q5_1,
    "blk.0.ffn_down.weight": Kind.Q8_0,
}


def test_gguf(tmp_path: Path) -> None:
    """Offsets, permuted rows, parts in several types, and a table that embedding and head share."""
    random = np.random.default_rng(0)
    shapes = {"token_embd": (48, 64), "attn_k": (32, 64), "attn_v": (32, 64), "ffn_down": (64, 96)}
    shapes |= {"ffn_gate": (96, 64), "ffn_up": (96, 64)}
    tensors: dict[str, Any] = {
        name: (random.normal(size=shapes.get(name.split(".")[-2], (64, 64))).astype(np.float32) * 0.2, kind)
        for name, kind in GGUF_KINDS.items()
    }
    for name in ("blk.0.attn_norm.weight", "blk.0.ffn_norm.weight", "output_norm.weight"):
        tensors[name] = random.normal(size=64).astype(np.float32) + 1
    metadata = {f"llama.{key}": value for key, value in GGUF_SIZES.items()}
    path = write_gguf(tmp_path / "m.gguf", "llama", metadata | {"tokenizer.ggml.eos_token_id": 2}, tensors)
    build_engine(path, tmp_path / "engine", BuildConfig(compute="float32", kv_dtype="float32"))
    sizes = {"num_hidden_layers": 1, "tie_word_embeddings": True, "rope_theta": 10000.0}
    expected = expected_logits(path, CONFIG | SIZES | sizes)
    assert close(engine_logits(tmp_path / "engine"), expected, 1e-4)
    engine = load_engine(tmp_path / "engine")
    forms = [
        (s.attributes["format"], s.op) for s in engine.plan.steps if s.attributes.get("format", "plain") != "plain"
    ]
    products = ["int4", "int8", "int4", "int8", "int8", "int8"]  # q and k, v, o, gate and up, down, head
    assert forms == [("int8", "embedding"), *((format, "quantized_linear") for format in products)]
    table = next(step for step in engine.plan.steps if step.op == "embedding").inputs[1]
    head = [step for step in engine.plan.steps if step.op == "quantized_linear"][-1].inputs[1]
    assert engine.plan.value(table).base == engine.plan.value(head).base


MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": 48,
    "hidden_size": 64,
    "moe_intermediate_size": 40,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@pytest.mark.parametrize(
    ("name", "quantization", "pack"),
    [
        ("compressed-tensors", packed_config(group=16), lambda w, r: pack_compressed(w, r, group=16)),
        ("fp8", FP8 | {"weight_block_size": [8, 16]}, lambda w, r: pack_fp8(w, r, (8, 16))),
    ],
)
def test_experts(tmp_path: Path, name: str, quantization: dict[str, Any], pack: Callable[..., Any]) -> None:
    """Each expert is stored by itself; joined and stacked they are quantized still."""
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING["qwen3_moe"].from_dict(MOE))
    random = np.random.default_rng(1)
    arrays: dict[str, Any] = {}
    for key, value in model.state_dict().items():
        weight = random.normal(size=tuple(value.shape)).astype(np.float32) * 0.2
        if ".experts." in key:
            arrays |= experts(key, weight, pack, random)
        elif key.endswith("proj.weight"):
            arrays |= {key.replace("weight", end): tensor for end, tensor in pack(weight, random)[0].items()}
        else:
            arrays[key] = (weight if weight.ndim > 1 else 1 + weight).astype(np.float16)
    aligned = dict(sorted(arrays.items(), key=lambda item: -item[1].itemsize))
    write_model(tmp_path / "model", aligned, quantization_config=quantization, **MOE)
    build_engine(tmp_path / "model", tmp_path / "engine", BuildConfig(compute="float32", dtype="float32"))
    moe = [step for step in load_engine(tmp_path / "engine").plan.steps if step.op == "moe"]
    assert [step.attributes["format"] for step in moe] == ["fp8" if name == "fp8" else "int4"]
    expected = expected_logits(tmp_path / "model", config_of(tmp_path / "model"))
    assert close(engine_logits(tmp_path / "engine"), expected, 1e-4)


def experts(key: str, weight: NDArray[np.float32], pack: Callable[..., Any], random: Any) -> dict[str, Any]:
    """A stacked parameter of the model as tensors of each expert."""
    prefix, _, kind = key.rpartition(".")
    arrays = {}
    for number, matrix in enumerate(weight):
        parts = {"down_proj": matrix}
        if kind == "gate_up_proj":
            parts = dict(zip(("gate_proj", "up_proj"), np.split(matrix, 2), strict=True))
        for part, values in parts.items():
            for end, tensor in pack(values, random)[0].items():
                arrays[f"{prefix}.{number}.{part}.{end}"] = tensor
    return arrays


GPT_OSS = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "vocab_size": 48,
    "hidden_size": 64,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
    "sliding_window": 32,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "torch_dtype": "bfloat16",
    "eos_token_id": 2,
}


def test_mxfp4_experts(tmp_path: Path) -> None:
    """The parameters have columns of outputs; the codes have rows of them, which is what the engine wants."""
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING["gpt_oss"].from_dict(GPT_OSS))
    random = np.random.default_rng(1)
    arrays: dict[str, Any] = {}
    for key, value in model.state_dict().items():
        if key.endswith(("gate_up_proj", "down_proj")):
            experts, columns, rows = value.shape
            arrays[f"{key}_blocks"] = random.integers(0, 256, (experts, rows, columns // 32, 16), dtype=np.uint8)
            arrays[f"{key}_scales"] = random.integers(122, 126, (experts, rows, columns // 32), dtype=np.uint8)
        else:
            weight = random.normal(size=tuple(value.shape)).astype(np.float32) * 0.2
            arrays[key] = bfloat16(weight if weight.ndim > 1 else 1 + weight)
    aligned = dict(sorted(arrays.items(), key=lambda item: -item[1].itemsize))
    write_model(tmp_path / "model", aligned, quantization_config={"quant_method": "mxfp4"}, **GPT_OSS)
    build_engine(tmp_path / "model", tmp_path / "engine", BuildConfig(compute="float32", dtype="float32"))
    moe = [step for step in load_engine(tmp_path / "engine").plan.steps if step.op == "moe"]
    assert [(step.attributes["format"], step.attributes["group"]) for step in moe] == [("int8", 32)]
    expected = expected_logits(tmp_path / "model", config_of(tmp_path / "model"))
    assert close(engine_logits(tmp_path / "engine"), expected, 1e-4)
