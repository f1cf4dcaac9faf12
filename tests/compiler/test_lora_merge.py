"""Adapters merged into a model: each weight as PEFT merges it; embeddings, whole modules, experts of any form."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import engines
import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.numpy import load_file, save_file
from transformers import AutoModelForCausalLM, GptOssConfig, Qwen2MoeConfig

from llmc import LLM, SamplingParams
from llmc.compiler.api import build_engine
from llmc.compiler.checkpoint import Checkpoint
from llmc.compiler.config import BuildConfig
from llmc.compiler.lora import merge
from llmc.compiler.weights import read
from llmc.errors import CheckpointError
from llmc.runtime.adapter_file import WEIGHTS, read_adapter

EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
SMALL = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "pad_token_id": 0}
SMALL |= {"num_key_value_heads": 2, "max_position_embeddings": 128, "tie_word_embeddings": False}
MOE = Qwen2MoeConfig(
    **SMALL,
    intermediate_size=40,
    moe_intermediate_size=24,
    shared_expert_intermediate_size=40,
    num_experts=4,
    num_experts_per_tok=2,
)


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(MOE, tmp_path_factory.mktemp("moe"))


def saved(config: Any, path: Path) -> Path:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return path


def base(path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def trained(model: Path, path: Path, **options: Any) -> Path:
    """An adapter in which nothing is zero; what it saves whole differs from the model."""
    torch.manual_seed(1)
    adapted = get_peft_model(base(model), LoraConfig(**{"r": 3, "lora_alpha": 7, **options}))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name or "modules_to_save" in name:
                parameter += 0.1 * torch.randn_like(parameter)
    adapted.save_pretrained(path)
    return path


def assert_as_peft(model: Path, adapter: Path) -> None:
    expected = PeftModel.from_pretrained(base(model), adapter).merge_and_unload().state_dict()
    assert_weights(merge(Checkpoint.open(model), read_adapter(adapter)), expected, Checkpoint.open(model))


def assert_weights(merged: Checkpoint, expected: dict[str, Any], before: Checkpoint) -> None:
    changed = 0
    for name in merged.names:
        np.testing.assert_allclose(read(merged.weight(name)).astype(np.float32), expected[name], rtol=2e-6, atol=2e-6)
        changed += not np.array_equal(read(merged.weight(name)), read(before.weight(name)))
    assert changed


@pytest.mark.parametrize(
    "options",
    [
        {"target_modules": ["embed_tokens", "q_proj", "lm_head"], "use_rslora": True},
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "norm"]},
        {"target_modules": ["embed_tokens"], "modules_to_save": ["lm_head"]},
    ],
    ids=str,
)
def test_embeddings_and_whole_modules(tmp_path: Path, options: dict[str, Any]) -> None:
    model = saved(engines.small_llama(), tmp_path / "model")
    assert_as_peft(model, trained(model, tmp_path / "adapter", **options))


@pytest.mark.parametrize("targets", [EXPERTS, EXPERTS[:1], ["experts.down_proj", "mlp.gate.weight"]], ids=str)
def test_stacked_experts(moe: Path, tmp_path: Path, targets: list[str]) -> None:
    options = {"target_parameters": targets, "target_modules": ["q_proj"]}
    assert_as_peft(moe, trained(moe, tmp_path, **options))


def test_experts_that_are_stored_the_other_way_round(tmp_path: Path) -> None:
    config = GptOssConfig(
        **SMALL, intermediate_size=24, num_local_experts=4, head_dim=8, layer_types=["full_attention"]
    )
    model = saved(config, tmp_path / "model")
    assert_as_peft(model, trained(model, tmp_path / "adapter", target_parameters=EXPERTS, target_modules=["q_proj"]))


def per_expert(path: Path) -> dict[str, Any]:
    """Make an adapter one of the linears of single experts; what it adds, by name."""
    tensors, random = load_file(path / WEIGHTS), np.random.default_rng(0)
    added = {}
    for expert, name, n, k in [(0, "gate_proj", 24, 32), (3, "up_proj", 24, 32), (3, "down_proj", 32, 24)]:
        module = f"model.layers.0.mlp.experts.{expert}.{name}"
        a, b = (random.normal(size=shape).astype(np.float32) for shape in ((3, k), (n, 3)))
        tensors |= {f"base_model.model.{module}.lora_{h}.weight": value for h, value in (("A", a), ("B", b))}
        added[module] = b @ a * np.float32(7 / 3)
    save_file(tensors, path / WEIGHTS)
    return added


def test_linears_of_single_experts(moe: Path, tmp_path: Path) -> None:
    """As adapters of transformers 4 have them: the tensors that stacks are made of."""
    adapter = trained(moe, tmp_path, target_modules=["q_proj"])
    expected = PeftModel.from_pretrained(base(moe), adapter).merge_and_unload().state_dict()
    added = per_expert(adapter)
    stacks = {name: expected[f"model.layers.0.{name}"].numpy() for name in EXPERTS}
    stacks[EXPERTS[0]][0, :24] += added["model.layers.0.mlp.experts.0.gate_proj"]
    stacks[EXPERTS[0]][3, 24:] += added["model.layers.0.mlp.experts.3.up_proj"]
    stacks[EXPERTS[1]][3] += added["model.layers.0.mlp.experts.3.down_proj"]
    assert_weights(merge(Checkpoint.open(moe), read_adapter(adapter)), expected, Checkpoint.open(moe))


def test_an_engine_of_it(moe: Path, tmp_path: Path) -> None:
    options = {
        "target_parameters": EXPERTS,
        "target_modules": ["embed_tokens", "v_proj"],
        "modules_to_save": ["lm_head"],
    }
    adapter = trained(moe, tmp_path / "adapter", **options)
    build_engine(moe, tmp_path / "engine", BuildConfig(dtype="float32", lora=adapter))
    prompt = np.random.default_rng(2).integers(3, 97, 20).tolist()
    llm = LLM(tmp_path / "engine", threads=1)
    (result,) = llm.generate([prompt], SamplingParams(max_tokens=8, ignore_eos=True, logprobs=0))
    llm.close()
    with torch.no_grad():
        logits = (
            PeftModel.from_pretrained(base(moe), adapter).eval()(torch.tensor([[*prompt, *result.token_ids]])).logits
        )
    expected = torch.log_softmax(logits[0, len(prompt) - 1 : -1].double(), -1)
    assert list(result.token_ids) == expected.argmax(-1).tolist()
    np.testing.assert_allclose([e.logprob for e in result.logprobs or ()], expected.max(-1).values, atol=1e-4)


def test_what_does_not_fit_is_refused(moe: Path, tmp_path: Path) -> None:
    other = saved(engines.small_llama(tie_word_embeddings=True), tmp_path / "tied")
    for number, (model, options, message) in enumerate(
        [
            (other, {"target_modules": ["embed_tokens"]}, "embed_tokens.weight is tied to another weight"),
            (moe, {"target_parameters": EXPERTS}, r"lora_A .* fit one of the parameters .* has none"),
            (moe, {"modules_to_save": ["lm_head"], "target_modules": ["q_proj"]}, r"lm_head.weight \[97, 32\], but"),
        ]
    ):
        adapter = trained(model, tmp_path / str(number), **options)
        wanted = other if model is other else saved(engines.small_llama(), tmp_path / "other")
        with pytest.raises(CheckpointError, match=message):
            merge(Checkpoint.open(wanted), read_adapter(adapter))
    adapter = trained(moe, tmp_path / "q", target_modules=["q_proj"])
    per_expert(adapter)
    with pytest.raises(CheckpointError, match=r"the model has no linear 'model.layers.0.mlp.experts.0.gate_proj'"):
        merge(Checkpoint.open(tmp_path / "other"), read_adapter(adapter))
    read = read_adapter(trained(moe, tmp_path / "norm", target_parameters=EXPERTS))
    pairs = tuple(replace(pair, module="model.norm", parameters=("weight",)) for pair in read.parameters)
    with pytest.raises(CheckpointError, match=r"the model has model.norm.weight \[32\]"):
        merge(Checkpoint.open(moe), replace(read, parameters=pairs))
