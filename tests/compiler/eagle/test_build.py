"""`llmc build --eagle`: what is read, what is refused, and that the same engine comes out again."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import engines
import numpy as np
import pytest
import torch
from checkpoints import safetensors_bytes
from click.testing import CliRunner
from eagle_layers import Arrays, Reference, config_of, random_layer, write_layer
from packed import random_model

from llmc.compiler.api import build_engine
from llmc.compiler.cli import build, inspect
from llmc.compiler.config import BuildConfig
from llmc.compiler.eagle.checkpoint import read_eagle
from llmc.compiler.features import _of_layer
from llmc.compiler.inspect_engine import describe
from llmc.errors import CheckpointError, CompileError, EngineError, UsageError
from llmc.runtime.engine import load_engine
from llmc.runtime.kv_cache import BlockTable
from llmc.runtime.speculative.eagle import EagleProposer, EagleRunner, _Part

IDS = "eagle_aux_hidden_state_layer_ids"
Change = Callable[[Arrays, dict[str, Any]], None]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    random_model(engines.small_llama(), "eager").save_pretrained(folder / "model")
    return folder / "model"


def tensors(model: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(model / "model.safetensors")


def test_layers_of_other_widths_with_tables_of_their_own(model: Path, tmp_path: Path) -> None:
    """EAGLE-3, narrower than its model, biased, normed before the residual, with scaled ropes; int8 weights."""
    config = config_of("eagle3", hidden_size=40, target_hidden_size=60, norm_before_residual=True, hidden_act="silu")
    config |= {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}
    config["eagle_config"] = {IDS: [0, 0, 0]}
    arrays = random_layer("eagle3", config)
    arrays["embed_tokens.weight"] = np.random.default_rng(7).normal(size=(131, 40)).astype(np.float32)
    for name, size in (("q", 64), ("k", 32), ("v", 32)):
        arrays[f"midlayer.self_attn.{name}_proj.bias"] = np.linspace(-1, 1, size, dtype=np.float32)
    layer = write_layer(tmp_path / "layer", arrays, config)
    options: dict[str, Any] = {"max_seq_len": 96, "quantization": "rtn:bits=8,group=16", "compute": "float32"}
    result = build_engine(model, tmp_path / "engine", BuildConfig(eagle=layer, dtype="float32", **options))
    assert result.report["eagle"]["layers"] == [1, 1, 1]
    assert result.report["eagle"]["shares_embedding"] is False
    engine = load_engine(tmp_path / "engine")
    runner = EagleRunner(engine, num_blocks=2, threads=1)
    blocks = BlockTable()
    blocks.extend([1])
    random = np.random.default_rng(2)
    given, tokens = random.normal(size=(9, 180)).astype(np.float32), random.integers(0, 131, 9).tolist()
    ((features, logits),) = runner.run([_Part(blocks, 0, tokens, list(range(9)), given, list(range(9)))], of_model=True)
    table = torch.tensor(arrays["embed_tokens.weight"])
    reference = Reference("eagle3", arrays, config, table, table)
    places = torch.arange(9) / 2  # linear scaling
    mask = torch.ones(9, 9, dtype=torch.bool).tril()
    expected = reference.rows(reference.join(torch.tensor(given)), torch.tensor(tokens), places, mask)
    for found, wanted in zip((features, logits), expected, strict=True):
        assert np.abs(found - wanted.numpy()).max() < 0.05 * wanted.abs().max()


def test_the_same_table_is_shared_and_builds_repeat(model: Path, tmp_path: Path) -> None:
    config = config_of("eagle")
    arrays = random_layer("eagle", config)
    arrays["embed_tokens.weight"] = tensors(model)["model.embed_tokens.weight"].numpy()
    arrays["layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(8, np.float32)
    layer = write_layer(tmp_path / "layer", {f"model.{n}": a for n, a in arrays.items()}, config)
    options: dict[str, Any] = {"eagle": layer, "dtype": "bfloat16", "max_seq_len": 96}
    first = build_engine(model, tmp_path / "first", BuildConfig(**options))
    locked = tmp_path / "first/recipe.json"
    again = build_engine(model, tmp_path / "again", BuildConfig(**options, locked=locked))
    assert first.digest == again.digest
    assert first.report["eagle"]["shares_embedding"] is True
    assert {"eagle/config.json", "eagle/model.safetensors"} <= set(
        json.loads((tmp_path / "first/recipe.json").read_text())["inputs"]
    )
    shown = CliRunner().invoke(inspect, [str(tmp_path / "first")])
    assert "EAGLE-1, goes on with the last" in shown.output
    with pytest.raises(UsageError, match="that engine has an EAGLE layer; give it with --eagle DIR"):
        build_engine(model, tmp_path / "third", BuildConfig(locked=locked))
    (tmp_path / "first/eagle/eagle.json").unlink()
    with pytest.raises(EngineError, match=r"eagle\.json"):
        load_engine(tmp_path / "first")


def without(name: str) -> Change:
    return lambda arrays, config: arrays.__delitem__(name)


def changed(**values: Any) -> Change:
    return lambda arrays, config: config.update(values)


def put(name: str, array: Any) -> Change:
    return lambda arrays, config: arrays.__setitem__(name, array)


def reshaped(name: str, *shape: int) -> Change:
    return put(name, np.zeros(shape, np.float32))


BAD: list[tuple[str, Change, str]] = [
    ("eagle", without("fc.weight"), r"model.safetensors: fc.weight is missing, which eagle has"),
    ("eagle3", without("norm.weight"), "norm.weight is missing, which eagle3 has"),
    ("eagle", put("norm.weight", np.ones(60, np.float32)), "norm.weight is left over; eagle has none"),
    ("eagle", put("layers.1.mlp.up_proj.weight", np.ones(2, np.float32)), r"tensor 'layers.1.* is none of an EAGLE"),
    ("eagle", put("embedding_layernorm.weight", np.ones(2, np.float32)), "is none of an EAGLE layer"),
    ("eagle", reshaped("fc.weight", 60, 60), r"fc.weight has shape \[60, 60\], expected \[60, 120\] by config.json"),
    ("eagle3", reshaped("midlayer.self_attn.q_proj.weight", 64, 60), r"expected \[64, 120\] by config.json \(eagle3\)"),
    ("eagle", put("fc.weight", np.ones((60, 120), np.int32)), "fc.weight is int32; expected float32, float16"),
    ("eagle", changed(num_hidden_layers=2), "num_hidden_layers is 2; only drafts of one layer are supported"),
    ("eagle", changed(hidden_act="tanh"), "hidden_act 'tanh'; known: silu"),
    ("eagle", changed(hidden_size=None), "config.json: hidden_size is null, expected a positive number"),
    ("eagle", changed(rope_scaling={"type": "dynamic"}), "rope 'dynamic' of a draft layer is not supported"),
    ("eagle", changed(rms_norm_eps=2), "rms_norm_eps is 2, expected a small number"),
    ("eagle", changed(num_key_value_heads=3), "4 heads of 16 share 3 keys"),
    ("eagle3", without("d2t"), "50 of 131 tokens are drafted, but there is no d2t of integers that says which"),
    ("eagle3", put("d2t", np.full(50, 100)), "d2t names no 50 different tokens of 131"),
    ("eagle3", changed(**{IDS: [1, 2]}), r"ids is \[1, 2\], expected three numbers of layers"),
]


@pytest.mark.parametrize(("kind", "change", "message"), BAD, ids=[f"{kind}-{m[:24]}" for kind, _, m in BAD])
def test_a_checkpoint_that_makes_no_sense_is_refused(kind: str, change: Change, message: str, tmp_path: Path) -> None:
    config = config_of(kind)
    arrays = random_layer(kind, config)
    change(arrays, config)
    with pytest.raises(CheckpointError, match=message):
        read_eagle(write_layer(tmp_path / "layer", arrays, config))


def test_files_that_are_none_are_refused(tmp_path: Path) -> None:
    layer = write_layer(tmp_path / "layer", random_layer("eagle", config_of("eagle")), config_of("eagle"))
    (layer / "model.safetensors").rename(layer / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pytorch_model.bin: a pickle.*safetensors\.torch\.save_file"):
        read_eagle(layer)
    (layer / "pytorch_model.bin").unlink()
    with pytest.raises(CheckpointError, match=r"there is no model.safetensors; is this an EAGLE layer\?"):
        read_eagle(layer)
    (layer / "model.safetensors").write_bytes(safetensors_bytes({}))
    (layer / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match=r"config\.json: expected an object"):
        read_eagle(layer)


def test_a_layer_of_another_model_is_refused(model: Path, tmp_path: Path) -> None:
    def refused(
        error: type[Exception], match: str, kind: str, drop: str = "", target: str = "cpu", **more: Any
    ) -> None:
        config = config_of(kind, **more)
        arrays = random_layer(kind, config)
        arrays.pop(drop, None)
        layer = write_layer(tmp_path / "layer", arrays, config)
        with pytest.raises(error, match=match):
            build_engine(model, tmp_path / "engine", BuildConfig(eagle=layer, max_seq_len=96, target=target))
        assert not (tmp_path / "engine").exists()

    refused(
        CheckpointError,
        "of another model: it goes on with rows of 64 numbers, the model's have 60",
        "eagle",
        hidden_size=64,
    )
    refused(CheckpointError, "it has 140 tokens, the model 131", "eagle", vocab_size=140)
    refused(CompileError, "the model has 2 layers, too few for the usual three", "eagle3")
    with pytest.raises(CompileError, match="it looks at layer 5, but the model has 2 layers"):
        _of_layer({0: None, 1: None}, 5)  # type: ignore[dict-item]
    sizes: dict[str, Any] = {"hidden_size": 40, "target_hidden_size": 60, IDS: [0, 1, 1]}
    refused(CheckpointError, "has no embed_tokens.weight, and can't use the model's", "eagle3", **sizes)


@pytest.mark.parametrize(("kind", "options"), [("eagle", []), ("eagle", ["--quant", "int8"]), ("eagle3", [])])
def test_a_dry_run_tells_its_size(model: Path, tmp_path: Path, kind: str, options: list[str]) -> None:
    config = config_of(kind, eagle_aux_hidden_state_layer_ids=[0, 1, 1])
    layer = write_layer(tmp_path / "layer", random_layer(kind, config), config)
    common = [str(model), "--dtype", "bfloat16", "--max-seq-len", "96", *options, "--json", "--quiet"]
    layered = [*common, "--eagle", str(layer)]
    plain, dry, made = (
        json.loads(CliRunner().invoke(build, arguments, catch_exceptions=False).stdout)
        for arguments in ([*common, "--dry-run"], [*layered, "--dry-run"], [*layered, "-o", str(tmp_path / "engine")])
    )
    assert dry["heads_bytes"] == made["heads_bytes"] > 0
    assert plain["heads_bytes"] is plain["eagle_kv_bytes_per_token"] is None
    engine = load_engine(tmp_path / "engine")
    kept = EagleProposer.kv_bytes_per_token(engine, None)
    assert kept == dry["eagle_kv_bytes_per_token"] == made["eagle_kv_bytes_per_token"] > 0
    assert describe(engine)["eagle_kv_bytes_per_token"] == kept
    assert dry["disk_bytes"] == plain["disk_bytes"] + dry["heads_bytes"]


def test_the_command_line_takes_it(model: Path, tmp_path: Path) -> None:
    layer = write_layer(tmp_path / "layer", random_layer("eagle", config_of("eagle")), config_of("eagle"))
    (layer / "config.json").unlink()
    result = CliRunner().invoke(build, [str(model), "--dry-run", "--eagle", str(layer)])
    assert isinstance(result.exception, CheckpointError)
    assert "config.json: there is no such file" in str(result.exception)
