"""What a quantized build refuses: it says which option or weight, and leaves nothing behind."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from checkpoints import llama_arrays, write_llama, write_model
from quantizable import Notes, token_file

from llmc.compiler import estimate
from llmc.compiler.api import build_engine, compile_model, open_checkpoint
from llmc.compiler.config import BuildConfig
from llmc.compiler.quantize.work import work_path
from llmc.errors import CheckpointError, ResourceError, UsageError

SIZES = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"quantization": "awk"}, r"--quant awk: unknown method; known: none, awq"),
        ({"quantization": "awq:groups=64"}, r"unknown option groups; known: "),
        ({"quantization": "awq:group=7"}, r"group=7: expected a multiple of 16"),
        ({"quantization": "rtn:bits=3"}, r"bits=3: expected one of 4, 8"),
        ({"quant_lm_head": True}, r"--quant-lm-head: nothing is quantized; say how with --quant"),
        ({"calib_samples": 3}, r"--calib-samples: nothing is quantized"),
        ({"quantization": "awq", "budget": "4"}, r"--budget 4: expected bits per weight, such as 4.3bpw"),
        ({"quantization": "awq", "max_ppl_increase": "2"}, r"--max-ppl-increase 2: expected a share .*, such as 2%"),
        ({"max_ppl_increase": "2%"}, r"--max-ppl-increase: nothing is quantized"),
        ({"quantization": "awq", "budget": "5bpw", "max_ppl_increase": "2%"}, r"exclude each other"),
    ],
)
def test_options_that_make_no_sense(options: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        BuildConfig(**options)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("model"), **SIZES)


def refused(model: Path, folder: Path, error: type[Exception], message: str, **options: object) -> None:
    with pytest.raises(error, match=message):
        build_engine(model, folder / "engine", BuildConfig(**options))  # type: ignore[arg-type]
    assert not list(folder.glob(".engine*")) and not (folder / "engine").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"quantization": "smoothquant:inputs=token", "compute": "float32"},
            r"--compute float32: smoothquant:inputs=token rounds",
        ),
        ({"quantization": "rtn", "compute": "fp8"}, r"--compute fp8: not for the weights of rtn"),
        ({"quantization": "fp8", "compute": "int8"}, r"--compute int8: not for the weights of fp8"),
        ({"quantization": "rtn", "compute": "int3"}, r"--compute int3: unknown; known: auto, int8"),
        ({"quantization": "awq"}, r"the model has no tokenizer; give token ids"),
        ({"quantization": "awq", "calib": "missing.txt"}, r"--calib missing.txt: No such file"),
        ({"quantization": "rtn:group=32", "budget": "4.4bpw"}, r"--budget 4.4bpw: is too small, .* a weight takes 4.5"),
        ({"quantization": "rtn", "reuse": Path("missing")}, r"--reuse missing: there is no engine"),
        ({"dequantize": True}, r"--dequantize: the weights of .* are not quantized; leave the option away"),
        ({"quantization": "w8a8", "budget": "9bpw"}, r"not for smoothquant.*, whose inputs are rounded"),
    ],
)
def test_options_that_do_not_fit(model: Path, tmp_path: Path, options: dict[str, object], message: str) -> None:
    refused(model, tmp_path, UsageError, message, **options)


def test_calibration_that_is_too_short(model: Path, tmp_path: Path) -> None:
    calib = token_file(tmp_path / "calib.jsonl", 1, 20, vocabulary=48)
    refused(model, tmp_path, UsageError, "has 20 tokens", quantization="awq", calib=str(calib), calib_length=32)
    message = "--calib-length 999: the engine takes sequences of up to 64"
    refused(model, tmp_path, UsageError, message, quantization="awq", calib=str(calib), calib_length=999)


def test_rules_that_fit_nothing(model: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("method: rtn\nrules: [{match: '.*v_prj.*', method: none}]\n")
    refused(model, tmp_path, UsageError, r"rule 1 \(match .* decides for no weight", recipe=recipe)
    recipe.write_text("methode: rtn\n")
    refused_config = pytest.raises(UsageError, match="unknown key methode; known: method")
    with refused_config:
        BuildConfig(recipe=recipe)
    recipe.write_text("rules: [{match: '.*', method: none}, {role: head, method: rtn}]\n")
    refused(model, tmp_path, UsageError, "decides for no weight", recipe=recipe)
    recipe.write_text("rules: [{match: '.*', method: rtn}]\n")
    refused(model, tmp_path, UsageError, "--budget: rules name the method of every", recipe=recipe, budget="5bpw")


def test_options_that_decide_for_nothing(model: Path, tmp_path: Path) -> None:
    """Rules decide for the head, or no method is left for the embedding."""
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("method: rtn\nrules: [{role: head, method: none}]\n")
    refused(model, tmp_path, UsageError, "--quant-lm-head .*: no effect: rule 1", recipe=recipe, quant_lm_head=True)
    recipe.write_text("rules: [{role: mlp, method: rtn}]\n")
    message = "--quant-embedding .*: no effect: no rule names it"
    refused(model, tmp_path, UsageError, message, recipe=recipe, quant_embedding=True)


def test_what_a_locked_build_has_no_use_for(model: Path, tmp_path: Path) -> None:
    build_engine(model, tmp_path / "plain")
    build_engine(model, tmp_path / "rounded", BuildConfig(quantization="rtn"))
    for name, given, message in (
        ("plain", {"reuse": tmp_path / "plain"}, "--reuse: the build of .* quantized nothing"),
        ("plain", {"calib": "x.txt"}, "--calib: the build of .* quantized nothing"),
        ("rounded", {"calib": "x.txt"}, "--calib: the build of .* needed no calibration"),
    ):
        with pytest.raises(UsageError, match=message):
            BuildConfig(locked=tmp_path / name / "recipe.json", **given)  # type: ignore[arg-type]


def test_disk_for_the_work_folder_too(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused before anything is written where the engine alone would fit; what is left there already counts."""
    calib = token_file(tmp_path / "calib.jsonl", vocabulary=48)
    given = {"quantization": "awq:group=32", "calib": str(calib), "calib_length": 32}
    config = BuildConfig(**given)  # type: ignore[arg-type]
    compiled = compile_model(open_checkpoint(model, config, Notes()), config, Notes())
    sizes = compiled.estimate
    codes = sum(t.nbytes for name, t in compiled.lowered.weights.items() if t.dtype == "uint8")
    assert sizes.work_bytes > codes and sizes.disk_bytes > sizes.weight_bytes
    free = sizes.disk_bytes + sizes.work_bytes - 1
    monkeypatch.setattr(estimate.shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
    message = rf"needs {free + 1} bytes of disk, {sizes.work_bytes} of them while"
    refused(model, tmp_path, ResourceError, message, **given)
    work = work_path(tmp_path / "engine")
    work.mkdir()
    (work / "1.bin").write_bytes(b"x")
    assert build_engine(model, tmp_path / "engine", config).engine_bytes < sizes.disk_bytes
    assert ResourceError.exit_code == 5


def test_text_that_nothing_looks_at(model: Path) -> None:
    notes = Notes()
    config = BuildConfig(quantization="rtn", calib="missing.txt")
    compile_model(open_checkpoint(model, config, notes), config, notes)
    assert any("the text for calibration is not looked at" in note for note in notes.notes)


@pytest.mark.parametrize("quantization", ["rtn", "awq:group=32", "gptq:group=32", "smoothquant", "fp8"])
def test_weights_that_are_not_finite(tmp_path: Path, quantization: str) -> None:
    arrays = llama_arrays(**SIZES)
    name = "model.layers.1.mlp.down_proj.weight"
    arrays[name] = arrays[name].copy()
    arrays[name][3, 5] = np.nan
    model = write_model(tmp_path / "model", arrays, **SIZES)
    calib = token_file(tmp_path / "calib.jsonl", vocabulary=48)
    with pytest.raises(CheckpointError, match=rf"{name}.*not finite, the first at \[3, 5\]"):
        build_engine(
            model, tmp_path / "engine", BuildConfig(quantization=quantization, calib=str(calib), calib_length=32)
        )
    assert not (tmp_path / "engine").exists()


def test_the_manifest_tells_of_every_weight(model: Path, tmp_path: Path) -> None:
    result = build_engine(model, tmp_path / "engine", BuildConfig(quantization="rtn:group=32"))
    report = json.loads((tmp_path / "engine/report.json").read_text())["quantization"]
    assert report["weights"] == result.report["quantization"]["weights"]
    kept = {entry["name"]: entry["kept"] for entry in report["weights"] if "kept" in entry}
    assert kept["model.norm.weight"] == "weight of add_norm"
    assert kept["lm_head.weight"] == "head: only with --quant-lm-head"
    assert kept["model.embed_tokens.weight"] == "embedding: only with --quant-embedding"
    quantized = [entry for entry in report["weights"] if "format" in entry]
    assert len(quantized) == report["summary"]["quantized"] == 8
    assert all(0 < entry["error"] < 0.2 and entry["source_dtype"] == "float32" for entry in quantized)
    recipe = json.loads((tmp_path / "engine/recipe.json").read_text())["quantization"]
    assert recipe["method"]["name"] == "rtn" and recipe["calibration"] is None and len(recipe["key"]) == 64
    assert str(tmp_path) not in (tmp_path / "engine/recipe.json").read_text()
