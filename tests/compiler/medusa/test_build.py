"""`llmc build --medusa`: the heads of an engine give the numbers of their formula, and the same bytes each time."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import safetensors_bytes
from engines import build, small_llama
from numpy.typing import NDArray
from safetensors.numpy import load_file

from llmc.compiler.api import build_engine, compile_model, open_checkpoint
from llmc.compiler.config import BuildConfig
from llmc.compiler.inspect_engine import describe
from llmc.compiler.medusa.build import _tokens, open_heads
from llmc.compiler.medusa.heads import read_heads
from llmc.compiler.medusa.output_layer import output_layer
from llmc.compiler.medusa.tree import given_tree
from llmc.compiler.progress import Progress
from llmc.compiler.quantize import locked as locked_recipe
from llmc.compiler.summary import built, planned
from llmc.errors import CheckpointError, CompileError, EngineError, UsageError
from llmc.runtime.engine import load_engine
from llmc.runtime.speculative.medusa import HeadRunner

HIDDEN, VOCABULARY, HEADS = 60, 131, 3
Array = NDArray[np.float32]


def write(folder: Path, tensors: dict[str, Array], heads: int, layers: int = 1) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "medusa_lm_head.safetensors").write_bytes(safetensors_bytes(tensors))
    (folder / "config.json").write_text(json.dumps({"medusa_num_heads": heads, "medusa_num_layers": layers}))


TOKENS = np.random.default_rng(3).permutation(VOCABULARY)[:50].astype(np.int32)
"""The most frequent first."""

FEW: dict[str, Any] = {"medusa_vocab": "37"}


def write_heads(folder: Path, layers: int, output: bool, token: bool = False) -> dict[str, Array]:
    random = np.random.default_rng(layers)
    tensors: dict[str, Array] = {}
    for head in range(HEADS):
        for layer in range(layers):
            tensors[f"{head}.{layer}.linear.weight"] = random.normal(0, 0.2, (HIDDEN, HIDDEN)).astype(np.float32)
            tensors[f"{head}.{layer}.linear.bias"] = random.normal(0, 0.2, HIDDEN).astype(np.float32)
        if token:
            tensors[f"{head}.token.weight"] = random.normal(0, 1, (HIDDEN, HIDDEN)).astype(np.float32)
        if output:
            tensors[f"{head}.{layers}.weight"] = random.normal(0, 1, (VOCABULARY, HIDDEN)).astype(np.float32)
    write(folder, tensors, HEADS, layers)
    return tensors


def formula(tensors: dict[str, Array], rows: Array, seen: Array, head: int, layers: int, output: Array) -> Array:
    x = rows
    if f"{head}.token.weight" in tensors:
        x = x + seen @ tensors[f"{head}.token.weight"].T
    for layer in range(layers):
        y = x @ tensors[f"{head}.{layer}.linear.weight"].T + tensors[f"{head}.{layer}.linear.bias"]
        x = x + y / (1 + np.exp(-y))
    result: Array = x @ output.T
    return result


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    build(small_llama(), folder, dtype="float32", max_seq_len=96)
    return folder / "model"


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("texts") / "texts.jsonl"
    random = np.random.default_rng(0)
    path.write_text("".join(json.dumps({"tokens": random.integers(3, 131, 40).tolist()}) + "\n" for _ in range(8)))
    return path


@pytest.mark.parametrize(
    ("layers", "output", "token", "options", "tolerance"),
    [
        (1, False, False, {}, 1e-4),
        (1, False, True, {}, 1e-4),
        (2, True, True, FEW, 1e-4),
        (
            1,
            False,
            True,
            {**FEW, "quantization": "awq:bits=8,group=32", "quant_lm_head": True, "compute": "float32"},
            0.02,
        ),
    ],
)
def test_logits_are_those_of_the_formula(
    model: Path,
    texts: Path,
    tmp_path: Path,
    layers: int,
    output: bool,
    token: bool,
    options: dict[str, Any],
    tolerance: float,
) -> None:
    """The last one also shares an output layer whose inputs are scaled, and rounds the heads; two choose from few."""
    tensors = write_heads(tmp_path / "heads", layers, output, token)
    (tmp_path / "heads/tokens.safetensors").write_bytes(safetensors_bytes({"token_ids": TOKENS}))
    calib = {"calib": str(texts), "calib_samples": 4, "calib_length": 40} if "quantization" in options else {}
    ids = np.sort(TOKENS[: int(options["medusa_vocab"])]) if options else np.arange(VOCABULARY)
    config = BuildConfig(medusa=tmp_path / "heads", medusa_tree="chain:2", max_seq_len=96, **options, **calib)
    build_engine(model, tmp_path / "engine", config)
    engine = load_engine(tmp_path / "engine")
    runner = HeadRunner(engine, threads=1)
    rows = np.random.default_rng(1).normal(size=(5, HIDDEN)).astype(np.float32)
    tokens = np.array([5, 130, 0, 77, 5], np.int32)
    seen = load_file(model / "model.safetensors")["model.embed_tokens.weight"].astype(np.float32)[tokens]
    found = runner._run(rows, tokens)
    for head in range(HEADS):
        own = tensors[f"{head}.{layers}.weight"] if output else output_layer(engine).weight
        expected = formula(tensors, rows, seen, head, layers, own)[:, ids]
        assert np.abs(found[head] - expected).max() < tolerance * np.abs(expected).max()
    alone = np.concatenate([runner._run(rows[i : i + 1], tokens[i : i + 1]).copy() for i in range(5)], axis=1)
    assert np.array_equal(alone, runner._run(rows, tokens))
    assert np.array_equal(runner.best(rows, tokens, 3)[..., 0], ids[runner._run(rows, tokens).argmax(-1)])
    assert engine.heads is not None
    shared = set(engine.heads.weights) & set(engine.weights)
    assert bool(shared) is (token or not options)
    report = json.loads((tmp_path / "engine/report.json").read_text())["medusa"]
    assert report["shown"].endswith(f"3 heads of {len(ids)} tokens")
    assert describe(engine)["medusa"] == report["shown"]


def test_auto_measures_and_repeats(model: Path, texts: Path, tmp_path: Path) -> None:
    write_heads(tmp_path / "heads", 1, False, True)
    options: dict[str, Any] = {"calib": str(texts), "calib_samples": 4, "calib_length": 40, "max_seq_len": 96}
    config = BuildConfig(medusa=tmp_path / "heads", **options)
    notes: list[str] = []
    progress = Progress()
    progress.note = notes.append  # type: ignore[method-assign]
    first = build_engine(model, tmp_path / "first", config, progress=progress)
    again = build_engine(model, tmp_path / "again", config)
    assert first.digest == again.digest
    section = json.loads((tmp_path / "first/recipe.json").read_text())["medusa"]
    assert (section["asked"], section["cost_source"]) == ("auto", "default")
    gains_nothing = any("so --spec medusa will gain nothing" in note for note in notes)
    assert gains_nothing == (section["expected"]["speedup"] <= 1)
    assert gains_nothing, "heads of random numbers"
    assert section["tree"] == json.loads((tmp_path / "first/medusa/tree.json").read_text())
    assert len(section["tree"]["accuracy"]) == HEADS
    page = (tmp_path / "first/report.html").read_text()
    expected = section["expected"]
    assert f"{expected['tokens_per_step']:.2f} tokens a step of {expected['nodes']} nodes; measured at" in page
    assert all(f"head {number} right" in page for number in range(1, HEADS + 1))
    assert built(first)["heads_bytes"] == first.report["medusa"]["own_bytes"]
    checkpoint = open_checkpoint(model, config, progress)
    compiled = compile_model(checkpoint, config, progress)
    plan = planned(compiled, open_heads(config, compiled.steps, "cpu"))
    assert plan["heads_bytes"] == first.report["medusa"]["own_bytes"]
    assert plan["disk_bytes"] == compiled.estimate.disk_bytes + plan["heads_bytes"]
    shown = describe(load_engine(tmp_path / "first"))
    assert shown["medusa"].endswith("3 heads of 131 tokens") and shown["medusa_expected"]["tokens_per_step"] > 1
    locked = BuildConfig(medusa=tmp_path / "heads", locked=tmp_path / "first/recipe.json", max_seq_len=96)
    assert build_engine(model, tmp_path / "locked", locked).digest == first.digest
    with pytest.raises(UsageError, match="that engine has Medusa heads; give them with --medusa"):
        build_engine(model, tmp_path / "other", BuildConfig(locked=tmp_path / "first/recipe.json", max_seq_len=96))
    recipe = json.loads((tmp_path / "first/recipe.json").read_text())
    for damaged in ("37", 1.5, None):
        (tmp_path / "recipe.json").write_text(json.dumps(recipe | {"medusa": section | {"vocabulary": damaged}}))
        with pytest.raises(UsageError, match=r"--locked .*recipe\.json: medusa: its vocabulary is damaged"):
            open_heads(replace(locked, locked=tmp_path / "recipe.json"), compiled.steps, "cpu")
        locked_recipe.read.cache_clear()
    write_heads(tmp_path / "heads", 2, False)
    with pytest.raises(CompileError, match=r"medusa/config\.json of the model has SHA-256"):
        build_engine(model, tmp_path / "other", locked)


def test_what_can_not_be_built_is_refused(model: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="belong to --medusa HEADS"):
        BuildConfig(medusa_tree="chain:1")
    with pytest.raises(UsageError, match="--medusa-cost guess: unknown"):
        BuildConfig(medusa=tmp_path, medusa_cost="guess")
    for heads, tree, error in (
        ("none", "auto", r"none: not a directory|there is no|can't be"),
        ("whole", "chain:9", r"--medusa-tree chain:9: expected a number from 1 to 3"),
    ):
        write_heads(tmp_path / "whole", 1, False)
        with pytest.raises((CheckpointError, UsageError), match=error):  # before the model is looked at
            build_engine(
                tmp_path / "no-model", tmp_path / "engine", BuildConfig(medusa=tmp_path / heads, medusa_tree=tree)
            )
    with pytest.raises(UsageError, match=r"--medusa-vocab 9: expected 1 or more, of heads that have a tokens\.safet"):
        build_engine(model, tmp_path / "engine", BuildConfig(medusa=tmp_path / "whole", medusa_vocab="9"))
    for asked in ("many", "0", "-1", "1.5", "9" * 5000):
        with pytest.raises(UsageError, match=f"--medusa-vocab {asked}: expected auto, all or a number"):
            BuildConfig(medusa=tmp_path, medusa_vocab=asked)
    with pytest.raises(UsageError, match="expected a number from 1 to 3"):
        given_tree("chain:" + "9" * 5000, 3)
    (tmp_path / "whole/tokens.safetensors").write_bytes(safetensors_bytes({"token_ids": TOKENS}))
    heads = read_heads(tmp_path / "whole", HIDDEN, VOCABULARY)
    with pytest.raises(UsageError, match=r"--medusa-vocab 51: tokens\.safetensors of the heads has 50 tokens; ask for"):
        _tokens("51", heads, VOCABULARY)
    write_heads(tmp_path / "seeing", 1, False, True)
    with pytest.raises(CheckpointError, match="these heads see tokens, but the model has no table of embeddings"):
        read_heads(tmp_path / "seeing", HIDDEN, VOCABULARY)
    with pytest.raises(CheckpointError, match=r"0\.token\.weight has shape \[60, 60\], expected \[60, 7\]"):
        read_heads(tmp_path / "seeing", HIDDEN, VOCABULARY, embedding=7)
    write(tmp_path / "heads", {"0.0.linear.weight": np.zeros((8, 8), np.float32)}, 1)
    with pytest.raises(CheckpointError, match=r"expected \[60, 60\]; these heads are of a model with another"):
        build_engine(model, tmp_path / "engine", BuildConfig(medusa=tmp_path / "heads"))


def test_damaged_heads_are_refused(model: Path, tmp_path: Path) -> None:
    write_heads(tmp_path / "heads", 1, False)
    config = BuildConfig(medusa=tmp_path / "heads", medusa_tree="chain:3", medusa_cost="measure", max_seq_len=96)
    build_engine(model, tmp_path / "engine", config)
    section = json.loads((tmp_path / "engine/recipe.json").read_text())["medusa"]
    assert section["cost_source"] == "measured" and section["cost"][0] == [1, 1.0]
    engine = shutil.copytree(tmp_path / "engine", tmp_path / "damaged")
    content = bytearray((engine / "medusa/weights.safetensors").read_bytes())
    content[-1] ^= 1
    (engine / "medusa/weights.safetensors").write_bytes(content)
    with pytest.raises(EngineError, match=r"medusa/weights\.safetensors: expected SHA-256"):
        load_engine(engine)
    manifest = json.loads((tmp_path / "engine/engine.json").read_text())
    del manifest["files"]["medusa/tree.json"]
    (tmp_path / "engine/engine.json").write_text(json.dumps(manifest))
    with pytest.raises(EngineError, match=r"has Medusa heads, but no medusa/tree\.json"):
        load_engine(tmp_path / "engine")
