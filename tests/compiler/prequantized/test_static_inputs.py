"""Checkpoints with scales for inputs: the compressed-tensors library makes them and computes with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
    QuantizationStatus,
    apply_quantization_config,
)
from engines import Packed
from numpy.typing import NDArray
from quantized_files import FP8, SIZES, pack_fp8, write_quantized
from transformers import LlamaConfig, LlamaForCausalLM

from llmc.compiler.api import build_engine
from llmc.compiler.checkpoint import Checkpoint
from llmc.compiler.config import BuildConfig
from llmc.compiler.weights import read
from llmc.errors import CheckpointError
from llmc.runtime.devices.cpu import CpuExecutor
from llmc.runtime.engine import Engine, load_engine

IDS = [3, 40, 17, 5, 29, 11, 2, 33, 8]

SCHEMES = {
    "int8": {"num_bits": 8, "symmetric": True},
    "int8 with zero points": {"num_bits": 8, "symmetric": False},
    "fp8": {"num_bits": 8, "type": "float", "symmetric": True},
}


def written_by_library(folder: Path, inputs: dict[str, Any], strategy: str) -> tuple[NDArray[Any], dict[str, Any]]:
    """The logits of the library's own rounded model, and its weights once they are decompressed."""
    torch.manual_seed(0)
    sizes = SIZES | {"num_hidden_layers": 2, "max_position_embeddings": 64, "attention_bias": True}
    model = LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=False, eos_token_id=2)).eval()
    linears = {name: m for name, m in model.named_modules() if isinstance(m, torch.nn.Linear) and name != "lm_head"}
    seen: dict[str, torch.Tensor] = {}
    hooks = [m.register_forward_pre_hook(lambda _, given, n=n: seen.update({n: given[0]})) for n, m in linears.items()]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.2) if parameter.ndim > 1 else parameter.uniform_(0.5, 1)
        model(torch.tensor([IDS]))
    for hook in hooks:
        hook.remove()
    scheme = QuantizationScheme(
        targets=["Linear"],
        weights=QuantizationArgs(**inputs | {"symmetric": True}, strategy=strategy),
        input_activations=QuantizationArgs(**inputs, strategy="tensor", dynamic=False),
    )
    apply_quantization_config(model, QuantizationConfig(config_groups={"group_0": scheme}, ignore=["lm_head"]))
    largest = 448 if "type" in inputs else 127
    for name, module in linears.items():
        weight, x = module.weight.detach().abs(), seen[name]
        module.weight_scale.data = (
            weight.amax(1, keepdim=True) if strategy == "channel" else weight.amax()[None]
        ) / largest
        scale = x.abs().amax() / largest if inputs["symmetric"] else (x.amax() - x.amin()) / 255
        module.input_scale.data = scale.reshape(1)
        if not inputs["symmetric"]:
            module.input_zero_point.data = torch.round(-128 - x.amin() / scale).reshape(1).to(torch.int8)
        module.quantization_status = QuantizationStatus.FROZEN
    with torch.no_grad():
        logits = model(torch.tensor([IDS])).logits[0].numpy()
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(str(folder))
    compressor.decompress_model(model)
    return logits, {name: module.weight.detach().numpy() for name, module in linears.items()}


def run(engine: Engine) -> NDArray[np.float32]:
    """A prefill of most tokens, then one at a time."""
    return Packed(CpuExecutor(engine, num_blocks=8), {"a": IDS}).run([[("a", 6)], [("a", 1)], [("a", 2)]])["a"]


@pytest.mark.parametrize(("kind", "strategy"), [(kind, "channel") for kind in SCHEMES] + [("fp8", "tensor")])
def test_like_the_library(tmp_path: Path, kind: str, strategy: str) -> None:
    """Weights bit-equal, the scales are in the plan, and logits and greedy tokens are those of its rounded model."""
    expected, weights = written_by_library(tmp_path / "model", SCHEMES[kind], strategy)
    checkpoint = Checkpoint.open(tmp_path / "model")
    for name, values in weights.items():
        np.testing.assert_array_equal(read(checkpoint.weight(f"{name}.weight")).astype(np.float32), values, name)
    result = build_engine(tmp_path / "model", tmp_path / "e", BuildConfig(dtype="float32", kv_dtype="float32"))
    engine = load_engine(tmp_path / "e")
    products = [step for step in engine.plan.steps if step.op == "quantized_linear"]
    compute = "fp8" if kind == "fp8" else "int8"
    assert {(step.attributes["compute"], step.attributes["x_group"]) for step in products} == {(compute, 0)}
    assert len(products) == 2 * 4, "q, k and v have one scale, and so have gate and up"
    entries = [entry for entry in result.report["coverage"] if not entry["reason"]]
    assert all(entry["input_scale"] > 0 for entry in entries) and len(entries) == len(products)
    assert any(entry["input_zero_point"] for entry in entries) == (kind == "int8 with zero points")
    found = run(engine)
    assert np.abs(found - expected).max() < (0.02 if kind == "fp8" else 2e-3) * np.abs(expected).max()
    np.testing.assert_array_equal(found.argmax(-1), expected.argmax(-1))
    build_engine(tmp_path / "model", tmp_path / "x", BuildConfig(dtype="float32", compute="float32"))
    steps = load_engine(tmp_path / "x").plan.steps
    assert all(len(step.inputs) < 6 or step.inputs[5] is None for step in steps if step.op == "quantized_linear")


def pack_static(weight: NDArray[np.float32], random: np.random.Generator) -> Any:
    """One scale for a weight as DeepSeek's static scheme has it, and one for its inputs."""
    tensors, values = pack_fp8(weight, random, None)
    return tensors | {"activation_scale": np.float32(random.uniform(0.004, 0.01)).reshape(())}, values


STATIC = FP8 | {"weight_block_size": None, "activation_scheme": "static"}


def test_fp8_of_transformers(tmp_path: Path) -> None:
    """Inputs of q, k and v have scales of their own: they become products of their own."""
    write_quantized(tmp_path / "model", STATIC, pack_static, "float32")
    checkpoint = Checkpoint.open(tmp_path / "model")
    model = LlamaForCausalLM(checkpoint.config).float().eval()
    weights = {name: read(checkpoint.weight(name)).astype(np.float32) for name in checkpoint.names}
    model.load_state_dict({name: torch.from_numpy(np.array(values)) for name, values in weights.items()})

    def rounded(scale: float) -> Any:
        cut = torch.tensor(scale)
        return lambda _, given: (((given[0] / cut).clamp(-448, 448).to(torch.float8_e4m3fn).float() * cut),)

    from safetensors import safe_open

    with safe_open(tmp_path / "model/model.safetensors", "np") as file:
        for name, module in model.named_modules():
            if name.endswith("proj"):
                module.register_forward_pre_hook(rounded(float(file.get_tensor(f"{name}.activation_scale"))))
    with torch.no_grad():
        logits = model(torch.tensor([IDS])).logits[0].numpy()
    build_engine(tmp_path / "model", tmp_path / "e", BuildConfig(dtype="float32", kv_dtype="float32"))
    engine = load_engine(tmp_path / "e")
    products = [step for step in engine.plan.steps if step.op == "quantized_linear"]
    assert len(products) == 2 * 7 and {step.attributes["compute"] for step in products} == {"fp8"}
    assert np.abs(run(engine) - logits).max() < 0.05 * np.abs(logits).max()


@pytest.mark.parametrize("scale", [0.0, np.nan, None])
def test_scales_that_are_none(tmp_path: Path, scale: float | None) -> None:
    def broken(weight: NDArray[np.float32], random: np.random.Generator) -> Any:
        tensors, values = pack_fp8(weight, random, None)
        return tensors | ({} if scale is None else {"activation_scale": np.float32(scale).reshape(())}), values

    write_quantized(tmp_path, STATIC, broken, "float32")
    with pytest.raises(CheckpointError, match=r"activation_scale'.*(must be one positive number|is missing)"):
        Checkpoint.open(tmp_path)
