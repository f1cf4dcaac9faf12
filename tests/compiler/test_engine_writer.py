"""What is in an engine, and that the same input always gives the same bytes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from checkpoints import llama_arrays, write_llama, write_model, write_sharded
from numpy.typing import NDArray

from llmc.compiler import safetensors_writer
from llmc.compiler.api import build_engine
from llmc.compiler.config import BuildConfig
from llmc.compiler.engine_writer import ArrayTensor
from llmc.compiler.progress import Progress
from llmc.errors import CheckpointError, CompileError, ResourceError, UsageError
from llmc.plugins.linear import packing
from llmc.plugins.paged_attention.storage import bytes_per_position
from llmc.runtime import selftest
from llmc.runtime.devices.cpu import CpuExecutor
from llmc.runtime.engine import load_engine


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("engine")
    build_engine(write_llama(folder / "model", "bfloat16"), folder / "engine", BuildConfig(max_seq_len=32))
    return folder / "engine"


# Files of tensors ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Streamed:
    """A tensor that comes in pieces."""

    name: str
    array: NDArray[Any]
    pieces: int = 3
    lost: int = 0

    @property
    def dtype(self) -> str:
        return self.array.dtype.name

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    @property
    def nbytes(self) -> int:
        return self.array.nbytes + self.lost

    def chunks(self) -> Iterator[NDArray[Any]]:
        yield from np.array_split(self.array, self.pieces)


def file_of(tensors: list[Any]) -> bytes:
    return b"".join(bytes(piece) for piece in safetensors_writer.pieces(safetensors_writer.order(tensors)))


def test_files_are_what_the_safetensors_library_reads() -> None:
    random = np.random.default_rng(0)
    arrays = {
        "small": random.normal(size=3).astype(np.float32),
        "large": random.normal(size=(8, 16)).astype(np.float32),
        "half": random.normal(size=(4, 32)).astype(np.float16),
        "ints": np.arange(5, dtype=np.int32),
        "empty": np.zeros((0, 4), np.float32),
        "flags": np.array([True, False]),
    }
    data = file_of([Streamed(name, array) for name, array in arrays.items()])
    found = safetensors.numpy.load(data)
    assert all(found[name].tobytes() == array.tobytes() for name, array in arrays.items())
    header = 8 + int.from_bytes(data[:8], "little")
    assert header % 64 == 0
    offsets = {n: e["data_offsets"][0] for n, e in json.loads(data[8:header]).items()}
    assert all(offsets[name] % 64 == 0 for name in ("large", "half"))


def test_a_tensor_that_breaks_its_promise_is_an_error() -> None:
    with pytest.raises(CompileError, match="'x' gives 16 bytes instead of 20"):
        file_of([Streamed("x", np.zeros(4, np.float32), lost=4)])
    with pytest.raises(CompileError, match="complex64"):
        file_of([ArrayTensor("x", np.zeros(4, np.complex64))])


# Engines -------------------------------------------------------------------------------------------------------------


def test_packed_weights_hold_the_checkpoints_numbers(built: Path) -> None:
    engine = load_engine(built)
    arrays = llama_arrays("bfloat16")
    down = engine.weights["model.layers.0.mlp.down_proj.weight"]
    found = packing.unpack(down.array, 16, 24).view(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(found, arrays["model.layers.0.mlp.down_proj.weight"])
    assert engine.model.dtype == engine.kv_cache.dtype == "bfloat16"
    norms = [w for w in engine.weights.values() if w.shape == (16,)]
    assert norms and all(w.dtype == "float32" for w in norms)


def test_the_recipe_tells_how_to_build_it_again(built: Path) -> None:
    recipe = json.loads((built / "recipe.json").read_text())
    assert set(recipe["inputs"]) == {"config.json", "model.safetensors"}
    assert recipe["options"]["max_seq_len"] == 32 and recipe["options"]["dtype"] == "auto"
    assert {"llmc", "torch", "transformers"} <= set(recipe["versions"])


def test_the_report_covers_every_weight(built: Path) -> None:
    report, engine = json.loads((built / "report.json").read_text()), load_engine(built)
    assert set(report["weights"]) == set(engine.weights)
    assert sum(weight["bytes"] for weight in report["weights"].values()) == engine.weight_bytes
    assert report["sizes"]["weight_bytes"] == engine.weight_bytes
    assert report["stored_in_checkpoint"] == {"bfloat16": sum(a.nbytes for a in llama_arrays("bfloat16").values())}


def test_the_graph_has_no_weights_and_is_proper_onnx(built: Path) -> None:
    onnx = pytest.importorskip("onnx")
    model = onnx.load(built / "graph.onnx")
    onnx.checker.check_model(model)
    assert {"input_ids", "position_ids", "logit_rows", "model.norm.weight"} <= {i.name for i in model.graph.input}
    assert not set(llama_arrays()) & {i.name for i in model.graph.initializer}


def test_golden_prompts_replay_with_the_portable_kernels(built: Path) -> None:
    engine = load_engine(built)
    goldens = selftest.from_arrays(safetensors.numpy.load((built / "selftest.safetensors").read_bytes()))
    assert len(goldens) == 3
    executor = CpuExecutor(engine, num_blocks=4, threads=1, isa="scalar")
    for golden in goldens:
        again = selftest.record(executor, golden.prompt, 16, len(golden.continuation))
        assert again.continuation == golden.continuation and again.logits.tobytes() == golden.logits.tobytes()
        assert golden.continuation[0] == golden.logits.argmax() and np.isfinite(golden.logits).all()


def test_tokenizer_template_and_defaults_are_frozen_in(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    folder = write_llama(tmp_path / "model", eos_token_id=[2, 3], pad_token_id=...)
    words = {"<s>": 1, "</s>": 2, "a": 3, "b": 4, "<unk>": 0}
    library = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    library.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    library.add_special_tokens(["<s>", "</s>"])
    library.enable_truncation(4)
    library.post_processor = tokenizers.processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    library.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    settings |= {"unk_token": "<unk>", "chat_template": "{{ bos_token }}{{ messages }}"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 4], "temperature": 0.5}))
    build_engine(folder, tmp_path / "engine")
    engine = load_engine(tmp_path / "engine")
    assert engine.model.eos_token_ids == (2, 4) and engine.model.pad_token_id == 2
    assert engine.model.bos_token_id == 1 and engine.model.add_bos and not engine.model.add_eos
    assert engine.generation_config == {"temperature": 0.5}
    assert engine.chat_template == "{{ bos_token }}{{ messages }}"
    assert engine.special_tokens == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    frozen = tokenizers.Tokenizer.from_str(engine.tokenizer_json)
    assert frozen.truncation is None and frozen.encode("a b a b a b").ids == [1, 3, 4, 3, 4, 3, 4]


def test_the_same_input_gives_the_same_bytes(tmp_path: Path) -> None:
    """Other threads, places, time zones, locales, hash seeds; one file or shards make no difference to the weights."""
    script = "import sys; from llmc.compiler.api import build_engine; build_engine(sys.argv[1], sys.argv[2])"
    write_llama(tmp_path / "a/model")
    write_llama(tmp_path / "elsewhere/b/model")
    write_sharded(tmp_path / "sharded", llama_arrays())
    environments = (
        {"PYTHONHASHSEED": "1", "OMP_NUM_THREADS": "1", "TZ": "UTC", "LC_ALL": "C"},
        {"PYTHONHASHSEED": "2", "OMP_NUM_THREADS": "2", "TZ": "Asia/Tokyo", "LC_ALL": "C.UTF-8"},
    )
    for model, environment in zip(("a/model", "elsewhere/b/model"), environments, strict=True):
        command = [sys.executable, "-P", "-c", script, str(tmp_path / model), str(tmp_path / model) + ".engine"]
        subprocess.run(command, check=True, env=os.environ | environment, cwd=tmp_path)
    first, second = tmp_path / "a/model.engine", tmp_path / "elsewhere/b/model.engine"
    names = sorted(str(p.relative_to(first)) for p in first.rglob("*") if p.is_file())
    assert names == sorted(str(p.relative_to(second)) for p in second.rglob("*") if p.is_file())
    for name in names:
        assert (first / name).read_bytes() == (second / name).read_bytes(), name
    build_engine(tmp_path / "sharded", tmp_path / "third")
    assert (tmp_path / "third/weights.safetensors").read_bytes() == (first / "weights.safetensors").read_bytes()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_weights_are_stored_as_asked(tmp_path: Path, dtype: str) -> None:
    result = build_engine(write_llama(tmp_path / "model"), tmp_path / "engine", BuildConfig(dtype=dtype))
    engine = load_engine(tmp_path / "engine")
    assert engine.weights["model.layers.0.mlp.down_proj.weight"].dtype == dtype == engine.kv_cache.dtype
    assert result.engine_bytes == sum(p.stat().st_size for p in (tmp_path / "engine").rglob("*") if p.is_file())
    assert result.digest == engine.digest


def test_mth_04_a_stale_head_does_not_reach_the_engine(tmp_path: Path) -> None:
    """The warning is printed and kept; the weights are those of a checkpoint without it."""
    notes: list[str] = []

    class Told(Progress):
        def note(self, text: str) -> None:
            notes.append(text)

    arrays = llama_arrays(num_hidden_layers=1)
    stale = write_model(tmp_path / "stale", arrays, num_hidden_layers=1, tie_word_embeddings=True)
    clean = write_llama(tmp_path / "clean", num_hidden_layers=1, tie_word_embeddings=True)
    build_engine(stale, tmp_path / "a", progress=Told())
    build_engine(clean, tmp_path / "b")
    first, second = ((tmp_path / name / "weights.safetensors").read_bytes() for name in "ab")
    assert first == second
    assert [note for note in notes if "lm_head.weight" in note]
    assert "lm_head.weight" in json.loads((tmp_path / "a/report.json").read_text())["warnings"][0]


def test_numbers_beyond_float16_are_refused(tmp_path: Path) -> None:
    arrays = llama_arrays()
    arrays["lm_head.weight"][3, 3] = 1e6
    folder = write_model(tmp_path / "model", arrays)
    with pytest.raises(CompileError, match="float16"):
        build_engine(folder, tmp_path / "engine", BuildConfig(dtype="float16"))
    build_engine(folder, tmp_path / "engine", BuildConfig(dtype="bfloat16"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_weights_that_are_not_finite_are_refused(tmp_path: Path, dtype: str, number: float) -> None:
    arrays = llama_arrays()
    arrays["model.layers.0.mlp.up_proj.weight"][3, 3] = number
    folder = write_model(tmp_path / "model", arrays)
    with pytest.raises(CheckpointError, match=r"layers\.0\.mlp\.up_proj\.weight are not finite, the first at \[3, 3\]"):
        build_engine(folder, tmp_path / "engine", BuildConfig(dtype=dtype))
    assert not (tmp_path / "engine").exists()


def test_the_kv_cache_has_a_dtype_of_its_own(tmp_path: Path) -> None:
    model = write_llama(tmp_path / "model")
    for given, stored in (("float16", "float16"), ("fp8", "float8_e4m3"), ("int8", "int8"), ("int4", "int4")):
        build_engine(model, tmp_path / given, BuildConfig(kv_dtype=given))
        engine = load_engine(tmp_path / given)
        assert engine.kv_cache.dtype == stored
        assert engine.kv_bytes_per_token == sum(
            slot.kv_heads * bytes_per_position(stored, slot.key_dim, slot.value_dim) for slot in engine.plan.kv_slots
        )
    with pytest.raises(UsageError, match=r"int3: unknown; known: auto, float32, .*, float8_e4m3, int8, int4"):
        BuildConfig(kv_dtype="int3")


def test_a_disk_that_is_too_small_is_found_before_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from llmc.compiler import estimate

    monkeypatch.setattr(estimate.shutil, "disk_usage", lambda folder: type("Usage", (), {"free": 1000}))
    with pytest.raises(ResourceError, match="only 1000 are free"):
        build_engine(write_llama(tmp_path / "model"), tmp_path / "engine")
    assert os.listdir(tmp_path) == ["model"]


def test_a_shard_that_fails_while_it_is_copied_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from llmc.compiler import facts

    folder = write_llama(tmp_path / "model")
    monkeypatch.setattr(facts.InputHashes, "_hash_all", lambda self: {})
    original = facts.recipe

    def cut(*arguments: Any) -> dict[str, Any]:
        os.truncate(folder / "model.safetensors", 5000)
        return original(*arguments)

    monkeypatch.setattr(facts, "recipe", cut)
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        build_engine(folder, tmp_path / "engine")
    assert os.listdir(tmp_path) == ["model"]


def test_limits_of_the_model(tmp_path: Path) -> None:
    from configs import CONFIGS

    from llmc.compiler.facts import limits
    from llmc.compiler.model_config import make_config

    llama = make_config(json.loads((write_llama(tmp_path / "m") / "config.json").read_text()), "x")
    assert limits(llama, BuildConfig()).max_seq_len == 64
    assert limits(llama, BuildConfig(max_seq_len=100)).max_seq_len == 100  # a rope goes on
    llama.max_position_embeddings = 1 << 20
    assert limits(llama, BuildConfig()).max_seq_len == 32768
    gpt2 = CONFIGS["gpt2"].make()
    with pytest.raises(UsageError, match="table of 256 positions"):
        limits(gpt2, BuildConfig(max_seq_len=257))
    assert limits(CONFIGS["bloom"].make(), BuildConfig(max_seq_len=5000)).max_seq_len == 5000


def test_what_is_not_a_number_of_this_version(tmp_path: Path) -> None:
    for values in ({"dtype": "int8"}, {"kv_dtype": "fp4"}, {"max_sequences": 0}):
        with pytest.raises(UsageError, match="--"):
            BuildConfig(**values)
    with pytest.raises(UsageError, match="cuda"):
        build_engine(write_model(tmp_path / "m", llama_arrays()), tmp_path / "e", BuildConfig(target="cuda"))
