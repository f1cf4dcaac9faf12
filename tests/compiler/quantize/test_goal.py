"""--budget and --max-ppl-increase: formats are chosen by what they do to the model, and the result is measured."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import write_llama
from quantizable import compiled, distance, logits, quantize, samples, save_model, token_file

from llmc.compiler.api import Compiled, build_engine
from llmc.compiler.config import BuildConfig
from llmc.compiler.evaluation.scores import compare
from llmc.compiler.quantize import goal, locked, spend
from llmc.compiler.quantize.activations import Activations
from llmc.compiler.quantize.heldout import hold_out
from llmc.compiler.quantize.interpreter import Interpreter
from llmc.compiler.quantize.loader import Loader, Rounded
from llmc.compiler.quantize.sensitivity import Layer, measure, trial_batch
from llmc.compiler.quantize.sites import find_sites
from llmc.compiler.quantize.work import Work
from llmc.compiler.summary import built, rows_for_people
from llmc.errors import GateError, UsageError
from llmc.quantization.base import parse_method


@pytest.fixture(scope="module", params=["llama_tied_bias", "qwen3_moe"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    folder = tmp_path_factory.mktemp(request.param)
    return compiled(save_model(request.param, folder / "model"), dtype="float32")


def test_forks_measure_what_separate_runs_do(model: Compiled, tmp_path: Path) -> None:
    """Each layer rounded alone, in a run of its own."""
    graph = model.steps
    parameters = {name: model.checkpoint.weight(name) for name in model.checkpoint.names}
    method = parse_method("rtn:group=32")
    sites = [site for site in find_sites(graph, parameters) if site.columns >= 32 and not site.is_router]
    layers = {site.name: Layer([(site, method)]) for site in sites}
    tokens = np.stack(samples(3, 32, seed=2))
    batch = trial_batch(tokens)
    found = measure(graph, layers, tokens, "float32", Work(tmp_path), 1, lambda _: None)
    assert set(found) == set(layers) and min(found.values()) > 0

    def run(weights: Any) -> np.ndarray:
        return next(Interpreter(graph, [batch], weights, Activations(tmp_path, 1), 1).logits(0)).copy()

    reference = run(Loader(graph, {}, Work(tmp_path), "float32"))
    targets = np.zeros(len(reference), np.int64)
    for name, layer in layers.items():
        rounded = run(Rounded(graph, layer.weights, Work(tmp_path), "float32"))
        wanted = compare(rounded, reference, targets).divergence.mean()
        assert found[name] == pytest.approx(wanted, rel=1e-6), name


def test_a_budget_is_spent_where_it_helps(model: Compiled, tmp_path: Path) -> None:
    (ids,) = samples(1, 40, seed=9)
    wanted = logits(model.lowered, ids)
    found = []
    for budget in ("5.2bpw", "14bpw"):
        lowered, report = quantize(model, "rtn:group=64", tmp_path, budget=budget, compute="float32")
        spent = report["goal"]
        assert spent["budget"] == budget and spent["bits_per_weight"] <= float(budget[:-3])
        kl = [row["kl"] for row in spent["table"]]
        assert kl == sorted(kl, reverse=True) and len(kl) > 3
        assert sum("chosen" in row for row in spent["table"]) == 1
        entries = {e["tensor"]: e for e in report["weights"] if e.get("role")}
        assert all(entries[name]["chosen_by"] == "budget" for name in spent["layers"] if "format" in entries[name])
        forms = {layer["chosen"] for layer in spent["layers"].values()}
        assert len(forms) > 1
        assert forms <= {"int4 in groups of 64", "int4 in groups of 32", "int8 in groups of 32", "float32"}
        assert spent["held_out"]["tokens"] == 62
        found.append(distance(logits(lowered, ids), wanted))
    assert found[1] < found[0]
    with pytest.raises(UsageError, match=r"--budget: .* bits are too few"):
        quantize(model, "rtn:group=32", tmp_path, budget="4.1bpw")


@pytest.mark.parametrize("method", ["awq:group=64", "gptq:group=32,sym=false"])
def test_the_perplexity_stays_within_its_bound(model: Compiled, tmp_path: Path, method: str) -> None:
    sizes = []
    for bound in ("1%", "10%"):
        _, report = quantize(model, method, tmp_path, max_ppl_increase=bound)
        chosen = report["goal"]
        limit = float(bound[:-1]) / 100
        assert chosen["max_ppl_increase"] == pytest.approx(limit)
        assert chosen["held_out"]["increase"] <= limit and chosen["held_out"]["estimated"] <= limit * (1 + 1e-9)
        (row,) = (row for row in chosen["table"] if "chosen" in row)
        assert row["ppl_increase"] == pytest.approx(chosen["held_out"]["estimated"], rel=1e-3)
        sizes.append(chosen["bits_per_weight"])
    assert sizes[0] > sizes[1]


def test_a_choice_that_does_too_much_is_made_again(
    model: Compiled, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first measurement is made to fail: the second choice is larger, and of the same bytes as without a first."""
    measured = goal.Chooser._measure
    calls: list[float] = []

    def fake(self: Any, made: Any, estimated: float) -> dict[str, Any]:
        found = measured(self, made, estimated)
        calls.append(found["increase"])
        return found | ({"increase": 0.04} if len(calls) == 1 else {"increase": 0.001})

    with monkeypatch.context() as patch:
        patch.setattr(goal.Chooser, "_measure", fake)
        _, report = quantize(model, "rtn:group=64", tmp_path, max_ppl_increase="2%")
    (tried,) = report["goal"]["tries"]
    assert tried["increase"] == 0.04 and tried["next"] == pytest.approx(0.9 * np.log(1.02) / np.log(1.04), rel=1e-4)
    assert report["goal"]["held_out"]["estimated"] <= np.expm1(np.log(1.02) * tried["next"]) * (1 + 1e-9)
    with monkeypatch.context() as patch:
        patch.setattr(goal.Chooser, "_measure", lambda *given: measured(*given) | {"increase": 0.5})
        with pytest.raises(GateError, match=r"2%: on held-out text the perplexity grew by 50 % "):
            quantize(model, "rtn:group=64", tmp_path, max_ppl_increase="2%")


def test_an_engine_keeps_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Built once more with another KV cache, nothing is measured or quantized; --locked gives the same bytes."""
    path = write_llama(tmp_path / "model", hidden_size=64, intermediate_size=96, head_dim=16)
    calib = token_file(tmp_path / "calib.jsonl", vocabulary=48)
    config = BuildConfig(quantization="awq:group=64", calib=str(calib), calib_length=32, budget="6bpw")
    first = build_engine(path, tmp_path / "e", config)
    recipe = tmp_path / "e/recipe.json"
    again = BuildConfig(**locked.options_of(recipe), locked=recipe, calib=str(calib))
    assert build_engine(path, tmp_path / "again", again).digest == first.digest
    for name in ("measure", "perplexity"):
        monkeypatch.setattr(goal, name, None)
    other = build_engine(path, tmp_path / "f", replace(config, kv_dtype="float16", reuse=tmp_path / "e"))
    assert other.report["quantization"]["goal"] == first.report["quantization"]["goal"]
    assert (tmp_path / "f/weights.safetensors").read_bytes() == (tmp_path / "e/weights.safetensors").read_bytes()
    page = (tmp_path / "e/report.html").read_text()
    assert "Formats of the layers" in page and "int8 in groups of 32" in page
    shown = dict(rows_for_people(built(first)))
    assert shown["target"] == "cpu"
    assert shown["formats chosen"].count("\n") == len(first.report["quantization"]["goal"]["table"]) + 1


def test_what_can_be_chosen() -> None:
    def texts(method: str) -> list[str]:
        return [spend.label_of(found, "") for found in spend.formats_of(parse_method(method))]

    assert texts("awq") == [f"int4 in groups of {g}" for g in (128, 64, 32)] + ["int8 in groups of 32"]
    assert texts("gptq:group=0")[0] == "int4 in rows" and len(texts("gptq:group=0")) == 5
    assert texts("rtn:group=16") == ["int4 in groups of 16", "int8 in groups of 16"]
    assert texts("int8") == ["int8 in groups of 32"]
    assert texts("fp8") == ["fp8 in rows"]
    with pytest.raises(UsageError, match=r"not for smoothquant.*, whose inputs"):
        texts("w8a8")


def test_held_out_windows_are_not_calibrated_on() -> None:
    for count in (2, 3, 8, 20, 200):
        tokens = np.arange(count, dtype=np.int32)[:, None]
        kept, held = hold_out(tokens)
        assert sorted(np.concatenate([kept, held])[:, 0].tolist()) == list(range(count))
        assert len(held) == min(16, max(1, count // 8))
    with pytest.raises(UsageError, match="2 at least"):
        hold_out(tokens[:1])
