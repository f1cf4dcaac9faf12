"""LoRA adapters of PEFT beside an engine, and merged into one: as PEFT computes them, the same bits in any batch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import engines
import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.numpy import save_file
from transformers import AutoModelForCausalLM

from llmc import LLM, SamplingParams
from llmc.errors import CheckpointError, EngineError, RequestError, UsageError
from llmc.runtime.adapter_file import CONFIG, WEIGHTS, read_adapter

PROMPTS = [np.random.default_rng(i).integers(3, 131, 11 + 5 * i).tolist() for i in range(4)]
PARAMS = SamplingParams(max_tokens=12, ignore_eos=True, logprobs=3)
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
ADAPTERS: dict[str, dict[str, Any]] = {
    "all": {"r": 4, "lora_alpha": 16, "target_modules": ALL},
    "some": {"r": 7, "lora_alpha": 9, "target_modules": ["v_proj", "up_proj", "lm_head"], "use_rslora": True},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, two adapters of it and an engine: model, all, some, engine."""
    path = tmp_path_factory.mktemp("lora")
    engines.build(engines.small_llama(), path, dtype="float32")
    for seed, (name, options) in enumerate(ADAPTERS.items()):
        model = get_peft_model(base(path), LoraConfig(**options, alpha_pattern={"v_proj": 20}))
        torch.manual_seed(seed)
        for parameter in (p for n, p in model.named_parameters() if "lora_B" in n):
            torch.nn.init.normal_(parameter, std=0.05)
        model.save_pretrained(path / name, save_embedding_layers=False)
    return path


def base(path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(path / "model", dtype=torch.float32).eval()


def generated(llm: LLM, adapters: list[str | None], together: bool = True) -> list[Any]:
    """Tokens and log-probabilities of each prompt with its adapter."""
    results: list[Any] = []
    groups = [range(4)] if together else [[i] for i in range(4)]
    for group in groups:
        requests = [llm.request(llm.add_request(PROMPTS[i], PARAMS, adapter=adapters[i])) for i in group]
        while llm.has_unfinished:
            llm.step()
        assert all(r.sequences[0].error is None for r in requests)
        results += [(r.sequences[0].tokens, r.sequences[0].logprobs) for r in requests]
    return results


def peft_logprobs(path: Path, name: str, tokens: list[int]) -> np.ndarray:
    model = PeftModel.from_pretrained(base(path), path / name).eval()
    with torch.no_grad():
        return torch.log_softmax(model(torch.tensor([tokens])).logits[0].double(), -1).numpy()


def assert_as_peft(path: Path, name: str, result: Any, prompt: list[int], atol: float) -> None:
    tokens, entries = result
    expected = peft_logprobs(path, name, tokens)
    for i, entry in enumerate(entries, start=len(prompt) - 1):
        for token, logprob in (*entry.top, (entry.token, entry.logprob)):
            assert logprob == pytest.approx(expected[i, token], abs=atol)


ADAPTED = "base_model.model.model.layers.0.mlp.experts.3.w1"
MIXED: list[str | None] = ["all", None, "some", "all"]


def test_as_peft_and_the_same_bits_in_any_batch(folder: Path) -> None:
    lora = {name: folder / name for name in ADAPTERS}
    together = generated(LLM(folder / "engine", lora=lora, threads=2, check=True), MIXED)
    for i, name in enumerate(MIXED):
        if name is not None:
            assert_as_peft(folder, name, together[i], PROMPTS[i], 1e-4)
    alone = LLM(folder / "engine", lora=lora, threads=1, prefix_cache=False)
    assert generated(alone, MIXED, together=False) == together
    chunked = LLM(folder / "engine", lora=lora, threads=2, max_batch_tokens=5, max_sequences=3, num_blocks=8)
    assert generated(chunked, MIXED) == together
    plain = generated(LLM(folder / "engine", threads=1), [None] * 4)
    assert together[1] == plain[1]
    assert together[0] != plain[0]


def test_the_prefix_cache_keeps_adapters_apart(folder: Path) -> None:
    llm = LLM(folder / "engine", lora={name: folder / name for name in ADAPTERS}, threads=1, check=True)
    prompt = (PROMPTS[3] * 3)[:48]
    first = {}
    for _ in range(2):
        for name in (None, *ADAPTERS):
            request = llm.request(llm.add_request(prompt, PARAMS, adapter=name))
            while llm.has_unfinished:
                llm.step()
            result = (request.sequences[0].tokens, request.sequences[0].logprobs)
            assert first.setdefault(name, result) == result
            assert request.num_cached_tokens in (0, 32)
    assert llm.counts["prefix_hits"] == 3 * 32


@pytest.mark.parametrize("method", ["rtn:bits=8,group=32", "awq:bits=8,group=32"])
def test_over_quantized_weights(folder: Path, tmp_path: Path, method: str) -> None:
    """Factors that awq has folded into the producers of inputs are undone."""
    from llmc.compiler.api import build_engine
    from llmc.compiler.config import BuildConfig

    text = tmp_path / "calibration.jsonl"
    rows = [np.random.default_rng(i).integers(3, 131, 64).tolist() for i in range(8)]
    text.write_text("".join(json.dumps({"tokens": row}) + "\n" for row in rows))
    config = BuildConfig(
        dtype="float32", quantization=method, compute="float32", **({"calib": str(text)} if "awq" in method else {})
    )
    build_engine(folder / "model", tmp_path / "engine", config)
    linears = json.loads((tmp_path / "engine/linears.json").read_text())["weights"].values()
    assert any("columns" in linear for linear in linears) == ("awq" in method)
    llm = LLM(tmp_path / "engine", lora={name: folder / name for name in ADAPTERS}, threads=1)
    found = generated(llm, MIXED)
    for i, name in enumerate(MIXED):
        if name is not None:
            assert_as_peft(folder, name, found[i], PROMPTS[i], 0.15)  # 0.25 to 0.44 if they are left away
    assert generated(llm, MIXED, together=False) == found


def test_merged_at_build(folder: Path, tmp_path: Path) -> None:
    from llmc.compiler.api import build_engine
    from llmc.compiler.config import BuildConfig

    build_engine(folder / "model", tmp_path / "merged", BuildConfig(dtype="float32", lora=folder / "all"))
    found = generated(LLM(tmp_path / "merged", threads=1), [None] * 4)
    for i, result in enumerate(found):
        assert_as_peft(folder, "all", result, PROMPTS[i], 1e-4)
    recipe = json.loads((tmp_path / "merged/recipe.json").read_text())
    assert recipe["inputs"][f"lora/{WEIGHTS}"]["sha256"] == read_adapter(folder / "all").files[WEIGHTS]["sha256"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type 'IA3' is not supported"),
        ({"use_dora": True}, "use_dora True is not supported"),
        ({"bias": "all"}, "bias 'all' is not supported"),
        ({"init_lora_weights": "pissa_niter_4"}, "changes the base model"),
        ({"new_trick": 3}, "new_trick 3 is not supported"),
        ({"target_parameters": "experts"}, "must be a list of names such as experts.down_proj"),
        ({"target_parameters": ["experts.down_proj"], "rank_pattern": {"x": 2}}, "one rank r, .* and no rank_pattern"),
        ({"trainable_token_indices": [3]}, r"trainable_token_indices \[3\] is not supported"),
        ({"lora_alpha": None}, "must be numbers"),
        ({"alpha_pattern": {"(a+)+$": 3}}, "not the name of a module"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    folder: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    config = json.loads((folder / "all" / CONFIG).read_text())
    (tmp_path / CONFIG).write_text(json.dumps(config | changes))
    (tmp_path / WEIGHTS).write_bytes((folder / "all" / WEIGHTS).read_bytes())
    with pytest.raises(CheckpointError, match=message):
        read_adapter(tmp_path)


def test_what_is_no_linear_is_named(folder: Path, tmp_path: Path) -> None:
    """An embedding; and a linear of an expert, as older versions of transformers had them."""
    model = get_peft_model(base(folder), LoraConfig(r=2, target_modules=["embed_tokens"]))
    model.save_pretrained(tmp_path, save_embedding_layers=False)
    with pytest.raises(UsageError, match=r"lora x: model.embed_tokens: only linears .* llmc build MODEL --lora"):
        LLM(folder / "engine", lora={"x": tmp_path})
    model = get_peft_model(base(folder), LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"]))
    model.save_pretrained(tmp_path)
    with pytest.raises(UsageError, match=r"lora x: lm_head.weight: only linears"):
        LLM(folder / "engine", lora={"x": tmp_path})
    zeros = {
        f"{ADAPTED}.lora_{half}.weight": np.zeros(shape, np.float32)
        for half, shape in (("A", (2, 60)), ("B", (172, 2)))
    }
    save_file(zeros, tmp_path / WEIGHTS)
    with pytest.raises(UsageError, match=r"lora x: the engine has no product 'model.layers.0.mlp.experts.3.w1' that"):
        LLM(folder / "engine", lora={"x": tmp_path})


def test_other_mistakes(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="can't be read"):
        read_adapter(tmp_path)
    (tmp_path / CONFIG).write_bytes((folder / "all" / CONFIG).read_bytes())
    (tmp_path / WEIGHTS).write_bytes((folder / "all" / WEIGHTS).read_bytes()[:-4])
    with pytest.raises(CheckpointError, match="truncated"):
        read_adapter(tmp_path)
    llm = LLM(folder / "engine", lora={"x": folder / "all"}, threads=1)
    with pytest.raises(RequestError, match="adapter: there is no adapter 'y'; known: x"):
        llm.add_request(PROMPTS[0], adapter="y")
    engines.build(engines.small_llama(intermediate_size=64), tmp_path, dtype="float32")
    with pytest.raises(UsageError, match=r"adapts a weight \[172, 60\], but that of the model is \[64, 60\]"):
        LLM(tmp_path / "engine", lora={"x": folder / "all"})
    manifest = json.loads((tmp_path / "engine/engine.json").read_text())
    del manifest["files"]["linears.json"]
    (tmp_path / "engine/engine.json").write_text(json.dumps(manifest))
    with pytest.raises(EngineError, match=r"has no linears.json, as of an older version; build the engine anew"):
        LLM(tmp_path / "engine", lora={"x": folder / "all"})
