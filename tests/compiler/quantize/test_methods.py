"""Every method on decoders of all kinds: the logits stay near those of the float engine, and nothing is skipped."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from configs import CONFIGS
from packed import random_model
from quantizable import compiled, distance, logits, quantize, samples, save_model

from llmc.compiler.api import Compiled
from llmc.compiler.quantize.sites import find_sites
from llmc.compiler.weights import WeightSource
from llmc.quantization.base import parse_method
from llmc.quantization.statistics import InputCollector

METHODS = {
    "rtn:bits=8,group=32": 0.06,
    "rtn:bits=4,group=32": 0.55,
    "rtn:bits=4,group=16,sym=false": 0.45,
    "rtn:bits=8,group=0,sym=false": 0.06,
    "gptq:group=32": 0.5,
    "awq:group=32": 0.5,
    "smoothquant": 0.07,
    "smoothquant:inputs=static": 0.13,
    "smoothquant:inputs=token": 0.07,
    "fp8": 0.17,
    "fp8:scale=block,inputs=fp8": 0.25,
    "fp8:scale=tensor,inputs=fp8": 0.25,
}
"""Largest relative distance of the logits of random models, whose weights have no structure that would help."""

ROUTED = 0.25
"""Added where experts are chosen: a token that changes its expert changes its logits."""

NAMES = ["llama", "llama_tied_bias", "gemma3_text", "qwen3_moe", "gpt2", "falcon_new", "mpt", "deepseek_v3", "gpt_oss"]
"""Merged linears, tied heads, experts (with biases), Conv1D, parallel blocks, ALiBi, and widths no group divides."""


@pytest.fixture(scope="module", params=NAMES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    folder = tmp_path_factory.mktemp(request.param)
    return compiled(save_model(request.param, folder / "model"), dtype="float32")


def test_logits_stay_near(model: Compiled, tmp_path: Path) -> None:
    (ids,) = samples(1, 40, seed=9)
    wanted = logits(model.lowered, ids)
    failed: list[str] = []
    routed = any(step.op == "moe" for step in model.steps.steps)
    for method, bound in METHODS.items():
        lowered, report = quantize(model, method, tmp_path, quant_lm_head=True, quant_embedding="sym=false" in method)
        found = distance(logits(lowered, ids), wanted)
        failed += [] if found < bound + ROUTED * routed else [f"{method}: {found:.3f}"]
        entries = report["weights"]
        assert sum(entry["bytes"] for entry in entries) == sum(t.nbytes for t in lowered.weights.values())
        assert all(("format" in entry) != ("kept" in entry) for entry in entries)
        ops = Counter(step.op for step in lowered.plan.steps)
        left = [entry["kept"] for entry in entries if "kept" in entry and entry.get("role")]
        assert all(reason.startswith(("router", "too small", "embedding")) for reason in left)
        assert ops["linear"] == sum(reason.startswith(("router", "too small")) for reason in left)
        assert not (tmp_path / ".engine.llmc-quant").exists()
    assert not failed


OTHERS = ["opt", "gpt_bigcode", "phi3", "apertus", "cohere", "lfm2", "dbrx", "qwen3_next"]
"""Scales that fold nowhere or elsewhere, merged projections, activations without a gate, and steps of other kinds."""

ERRORS = {"rtn": 0.13, "gptq": 0.3, "awq": 0.2, "smoothquant": 0.02, "fp8": 0.04}
"""The largest relative error of a weight; gptq and awq care for outputs instead."""

CYCLE = ["gptq:group=32", "awq:group=32", "smoothquant", "rtn:bits=4,group=32", "fp8", "gptq:bits=8,group=0"]


@pytest.mark.parametrize("name", OTHERS)
def test_mixed_methods_on_other_families(name: str, tmp_path: Path) -> None:
    """Each role has another method, in two turns; every weight is near what it was, and the head stays a float."""
    model = compiled(save_model(name, tmp_path / "model"), dtype="float32")
    (ids,) = samples(1, 40, seed=9)
    wanted = logits(model.lowered, ids)
    turn = OTHERS.index(name)
    for number in (turn, turn + 3):
        methods = [CYCLE[(number + i) % len(CYCLE)] for i in range(4)]
        roles = ("attention", "mlp", "experts", "other")
        found = {site.role for site in find_sites(model.steps, parameters_of(model)) if not site.is_router}
        rules = [f"- {{role: {role}, method: '{m}'}}" for role, m in zip(roles, methods, strict=True) if role in found]
        (tmp_path / "recipe.yaml").write_text("\n".join(["method: fp8", "rules:", *rules]))
        lowered, report = quantize(model, "none", tmp_path, recipe=tmp_path / "recipe.yaml", calib_samples=4)
        done = [entry for entry in report["weights"] if "format" in entry and entry.get("role")]
        assert done and {entry["role"] for entry in done} >= found - {"head", "embedding"}
        wrong = [
            f"{e['name']}: {e['method']} {e['error']}" for e in done if e["error"] > ERRORS[e["method"].split(":")[0]]
        ]
        assert not wrong
        routed = any(step.op == "moe" for step in model.steps.steps)
        assert distance(logits(lowered, ids), wanted) < 0.5 + ROUTED * routed


def parameters_of(model: Compiled) -> dict[str, WeightSource]:
    return {name: model.checkpoint.weight(name) for name in model.checkpoint.names}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("rows", "columns"), [(1, 1056), (3, 40), (130, 200)])
def test_matrices_of_odd_sizes(method: str, rows: int, columns: int) -> None:
    """One row, fewer columns than a group, and columns that no group divides."""
    random = np.random.default_rng(rows)
    weight = random.standard_normal((rows, columns), np.float32)
    quantizer = parse_method(method)
    collector = InputCollector(columns, quantizer.needs, name="x", threads=1)
    collector.add(random.standard_normal((96, columns), np.float32))
    quantized, _ = quantizer.quantize(weight, collector.finish())
    assert quantized.codes.shape == weight.shape
    assert quantized.scale.shape == (rows, quantizer.weights.groups(columns))
    assert distance(quantized.dequantize(), weight) < 2 * ERRORS[quantizer.name]


def test_without_rounded_inputs_only_the_weights_err(tmp_path: Path) -> None:
    """Products in float32 with int8 weights: an error as small as theirs; and bit-equal products on every machine."""
    model = compiled(save_model("llama", tmp_path / "model"), dtype="float32")
    (ids,) = samples(1, 40, seed=9)
    wanted = logits(model.lowered, ids)
    lowered, report = quantize(model, "int8", tmp_path, compute="float32")
    assert distance(logits(lowered, ids), wanted) < 0.05
    assert report["compute"] == "float32"
    errors = [entry["error"] for entry in report["weights"] if "error" in entry]
    assert 0 < max(errors) < 0.01


@pytest.mark.parametrize("method", ["gptq:group=32", "awq:group=32"])
def test_calibrated_methods_do_better_than_rounding(method: str, tmp_path: Path) -> None:
    """The error of the outputs on tokens like those of the calibration."""
    model = compiled(save_model("llama", tmp_path / "model"), dtype="float32")
    errors = {}
    for name in (method, "rtn:group=32"):
        lowered, _ = quantize(model, name, tmp_path, compute="float32")
        (ids,) = samples(1, 60, seed=5)
        errors[name] = distance(logits(lowered, ids), logits(model.lowered, ids))
    assert errors[method] < errors["rtn:group=32"]


def test_experts_that_saw_few_tokens_are_reported(tmp_path: Path) -> None:
    model = compiled(save_model("qwen3_moe", tmp_path / "model"), dtype="float32")
    _, report = quantize(model, "gptq:group=32", tmp_path)
    experts = [entry for entry in report["weights"] if entry.get("role") == "experts"]
    assert experts and all("sample of all tokens" in entry["few_tokens"] for entry in experts)
    assert all(set(entry["experts_with_few_tokens"]) <= set(map(str, range(4))) for entry in experts)


@pytest.mark.parametrize("method", ["rtn:group=32", "gptq:group=32", "awq:group=32", "smoothquant", "fp8"])
def test_experts_whose_matrices_are_tiny(method: str, tmp_path: Path) -> None:
    """A matrix has fewer numbers than are worth it, and down fewer columns than a group; all experts together count."""
    config = CONFIGS["qwen3_moe"].make()
    config.moe_intermediate_size = 8
    random_model(config, CONFIGS["qwen3_moe"].reference).save_pretrained(tmp_path / "model")
    model = compiled(tmp_path / "model", dtype="float32")
    lowered, report = quantize(model, method, tmp_path)
    experts = [entry for entry in report["weights"] if entry.get("role") == "experts"]
    assert len(experts) == 6 and all("format" in entry and entry["error"] < 0.2 for entry in experts)
    (ids,) = samples(1, 40, seed=9)
    assert distance(logits(lowered, ids), logits(model.lowered, ids)) < 0.7


def test_rules_decide_for_parts_of_merged_weights(tmp_path: Path) -> None:
    """Merged q, k, v whose parts differ are split."""
    model = compiled(save_model("llama", tmp_path / "model"), dtype="float32")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "method: rtn:bits=4,group=32\n"
        "rules:\n"
        "- {match: '.*v_proj.*', method: 'rtn:bits=8,group=0'}\n"
        "- {match: '.*layers.1.*', method: none}\n"
        "- {role: mlp, method: fp8}\n"
    )
    lowered, report = quantize(model, "none", tmp_path, recipe=recipe)
    (ids,) = samples(1, 40, seed=9)
    assert distance(logits(lowered, ids), logits(model.lowered, ids)) < 0.45
    by_name = {entry["name"]: entry for entry in report["weights"]}
    first = "model.layers.0.self_attn."
    assert by_name[f"{first}q_proj.weight + {first}k_proj.weight"]["format"] == "int4"
    assert by_name[f"{first}v_proj.weight"]["bits"] == 8
    assert by_name["model.layers.0.mlp.down_proj.weight"]["format"] == "fp8"
    assert by_name["model.layers.1.mlp.down_proj.weight"]["kept"] == "rule 2"
    assert by_name["lm_head.weight"]["kept"].startswith("head: only with --quant-lm-head")
    assert np.isfinite(report["summary"]["bits_per_weight"])
