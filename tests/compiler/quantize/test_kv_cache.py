"""Keys with a large constant part, as a bias of k makes them, survive few bits; and what a build records of that."""

import filecmp
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from packed import random_model
from quantizable import Notes, token_file
from transformers import Gemma2Config, GptOssConfig, Qwen2Config

from llmc.compiler.api import build_engine, compile_model, open_checkpoint
from llmc.compiler.config import BuildConfig
from llmc.compiler.inspect_engine import describe
from llmc.compiler.quantize import locked
from llmc.errors import CompileError
from llmc.runtime.batch import Batch
from llmc.runtime.devices.cpu import CpuExecutor
from llmc.runtime.engine import load_engine

VOCABULARY, ROWS = 128, 48
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
}


def biased(folder: Path, config: Any) -> Path:
    """A random model whose keys have a constant that is many times what the tokens make of them."""
    model = random_model(config, "eager")
    with torch.no_grad():
        for layer in model.model.layers:
            bias = layer.self_attn.k_proj.bias
            slow = torch.arange(len(bias)) % 8 >= 5  # pairs of dims that hardly turn over so few positions
            bias.copy_(30 * slow * torch.randn(bias.shape, generator=torch.Generator().manual_seed(1)))
    model.save_pretrained(folder)
    return folder


def logits(engine: Path) -> NDArray[np.float32]:
    loaded = load_engine(engine)
    executor = CpuExecutor(loaded, num_blocks=4)
    rows = np.arange(ROWS, dtype=np.int32)
    ids = np.random.default_rng(5).integers(3, VOCABULARY, ROWS, np.int32)
    zero = np.zeros(1, np.int32)
    return executor.step(Batch(ids, rows, rows, np.array([0, ROWS], np.int32), zero, rows[None, :4])).copy()


def built(model: Path, engine: Path, kv_dtype: str, **options: Any) -> NDArray[np.float32]:
    build_engine(model, engine, BuildConfig(dtype="float32", kv_dtype=kv_dtype, **options))
    return logits(engine)


def error(found: NDArray[np.float32], expected: NDArray[np.float32]) -> float:
    return float(np.sqrt(((found - expected) ** 2).mean() / expected.var()))


def test_a_constant_part_of_the_keys_costs_nothing(tmp_path: Path) -> None:
    """Low-frequency dims hold most of it, as the rope's base is large."""
    rope = {"rope_type": "default", "rope_theta": 1e6}
    model = biased(tmp_path / "model", Qwen2Config(**SIZES, rope_parameters=rope))
    calib = str(token_file(tmp_path / "calib.jsonl", vocabulary=VOCABULARY))
    expected = built(model, tmp_path / "float", "float32")
    for kv_dtype, least in (("int4", 3), ("float8_e4m3", 3)):
        plain = error(built(model, tmp_path / f"{kv_dtype}-plain", kv_dtype), expected)
        centred = error(built(model, tmp_path / kv_dtype, kv_dtype, calib=calib, calib_length=64), expected)
        assert centred * least < plain, f"{kv_dtype}: {centred} is not much below {plain}"
    for name, found in (("int4-plain", False), ("int4", True)):
        report = json.loads((tmp_path / name / "report.json").read_text())
        assert report["kv_cache"]["dtype"] == "int4" and report["kv_cache"]["centred"] is found
        assert ("int4, less means" in (tmp_path / name / "report.html").read_text()) is found
        seen = describe(load_engine(tmp_path / name))
        assert (seen["kv_dtype"], seen["kv_centred"]) == ("int4", "yes" if found else "no")
    for name, fed_back in (("int4", False), ("float8_e4m3", True)):
        weights = describe(load_engine(tmp_path / name))["weights"]
        assert weights["kv_cache.1.key_scale"]["shape"] == [2, 16]
        assert ("kv_cache.1.key_feedback" in weights) is fed_back
    feedback = load_engine(tmp_path / "float8_e4m3").weights["kv_cache.1.key_feedback"].array
    assert (np.triu(feedback) == feedback).all() and (np.diagonal(feedback, axis1=1, axis2=2) == 1).all()
    assert report["kv_cache"]["tokens"] >= 256
    assert all(slot["key_mean_share"] > 0.5 for slot in report["kv_cache"]["slots"])


def test_feedback_has_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two slots of two heads of 16 dims: 4096 bytes. Without it keys are centred all the same, and it is said."""
    model = biased(tmp_path / "model", Qwen2Config(**SIZES))
    calib = str(token_file(tmp_path / "calib.jsonl", vocabulary=VOCABULARY))
    expected = built(model, tmp_path / "float", "float32")
    plain = error(built(model, tmp_path / "plain", "float8_e4m3"), expected)
    memory = []
    for bound, fed_back in ((4096, True), (4095, False)):
        monkeypatch.setattr("llmc.compiler.quantize.kv_cache.FEEDBACK_BYTES", bound)
        config = BuildConfig(dtype="float32", kv_dtype="float8_e4m3", calib=calib, calib_length=64)
        notes, engine = Notes(), tmp_path / str(bound)
        memory.append(compile_model(open_checkpoint(model, config, notes), config, notes).room.memory)
        build_engine(model, engine, config, progress=notes)
        assert any("keys are rounded to nearest" in note for note in notes.notes) is not fed_back
        assert ("kv_cache.1.key_feedback" in describe(load_engine(engine))["weights"]) is fed_back
        assert json.loads((engine / "report.json").read_text())["kv_cache"]["fed_back"] is fed_back
        assert error(logits(engine), expected) < plain
    assert memory[0] - memory[1] == 3 * 4096


def test_a_rebuild_measures_the_same_or_is_refused(tmp_path: Path) -> None:
    model = biased(tmp_path / "model", Qwen2Config(**SIZES))
    calib = token_file(tmp_path / "calib.jsonl", vocabulary=VOCABULARY)
    config = BuildConfig(kv_dtype="int8", calib=str(calib), calib_length=32, quantization="rtn")
    first = build_engine(model, tmp_path / "e", config)
    recipe = tmp_path / "e/recipe.json"
    assert json.loads(recipe.read_text())["quantization"]["calibration"] is None
    again = BuildConfig(**locked.options_of(recipe), locked=recipe, calib=str(calib))
    assert build_engine(model, tmp_path / "again", again).digest == first.digest
    other = token_file(tmp_path / "other.jsonl", vocabulary=VOCABULARY // 2)
    with pytest.raises(CompileError, match="calibration tokens have SHA-256"):
        build_engine(model, tmp_path / "x", replace(again, calib=str(other)))
    config = BuildConfig(kv_dtype="int4", calib=str(calib), calib_length=32, quantization="rtn", reuse=tmp_path / "e")
    reused = build_engine(model, tmp_path / "four", config)
    assert reused.kv_dtype == "int4"
    assert filecmp.cmp(tmp_path / "e/weights.safetensors", tmp_path / "four/weights.safetensors", shallow=False)


@pytest.mark.parametrize("config", [GptOssConfig, Gemma2Config], ids=["sinks", "softcap"])
def test_what_the_softmax_does_not_hide_is_made_up_for(config: Any, tmp_path: Path) -> None:
    """Sinks and softcaps see the whole logit; then int8 is still near the floats. No expert is left to flip."""
    sizes = {**SIZES, "attention_bias": True}
    sizes |= {"num_local_experts": 2, "num_experts_per_tok": 2} if config is GptOssConfig else {}
    sizes |= {"attn_logit_softcapping": 5.0, "query_pre_attn_scalar": 16} if config is Gemma2Config else {}
    model = biased(tmp_path / "model", config(**sizes))
    calib = str(token_file(tmp_path / "calib.jsonl", vocabulary=VOCABULARY))
    expected = built(model, tmp_path / "float", "float32")
    assert error(built(model, tmp_path / "e", "int8", calib=calib, calib_length=64), expected) < 0.05
