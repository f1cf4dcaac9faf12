"""Engines are loaded only if every byte is what engine.json says, and the plan makes sense."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import write_llama

from llmc.errors import EngineError
from llmc.runtime import plan_file
from llmc.runtime.engine import load_engine, read_manifest
from llmc.runtime.manifest import Limits, Manifest
from llmc.runtime.plan import Dim


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from llmc.compiler.api import build_engine

    folder = tmp_path_factory.mktemp("engine")
    build_engine(write_llama(folder / "model"), folder / "engine")
    return folder / "engine"


@pytest.fixture
def engine(built: Path, tmp_path: Path) -> Path:
    """A copy that a test may break."""
    return Path(shutil.copytree(built, tmp_path / "engine"))


def edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change engine.json."""
    value = json.loads((path / "engine.json").read_text())
    change(value)
    (path / "engine.json").write_text(json.dumps(value))


def replace(path: Path, name: str, content: bytes) -> None:
    """Replace a file, and what engine.json says about it: a hostile engine with right checksums."""
    (path / name).write_bytes(content)
    entry = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    edit(path, lambda value: value["files"].update({name: entry}))


def refused(path: Path, *words: str, **options: Any) -> str:
    with pytest.raises(EngineError) as caught:
        load_engine(path, **options)
    assert caught.value.exit_code == 4
    for word in words:
        assert word in str(caught.value), str(caught.value)
    return str(caught.value)


def test_what_is_loaded(built: Path) -> None:
    engine = load_engine(built)
    assert engine.model.architecture == "LlamaForCausalLM" and engine.model.vocab_size == 48
    assert engine.model.eos_token_ids == (2,) and engine.model.pad_token_id == 2 and not engine.model.add_bos
    assert engine.limits == Limits(64, 512, 64)
    assert engine.kv_bytes_per_token == 2 * 2 * 2 * 4 * 4
    assert engine.weight_bytes == sum(w.data.nbytes for w in engine.weights.values())
    weight = next(w for w in engine.weights.values() if w.dtype == "float32" and len(w.shape) == 1)
    assert weight.array.dtype == np.float32 and weight.array.shape == weight.shape
    assert not weight.array.flags.writeable
    with pytest.raises(EngineError, match="no tokenizer"):
        _ = engine.tokenizer_json
    assert engine.chat_template is None and engine.generation_config == {} and engine.special_tokens == {}
    engine.release_pages()
    assert np.isfinite(weight.array).all()


def test_weights_begin_at_multiples_of_64_bytes(built: Path) -> None:
    engine = load_engine(built)
    assert all(w.data.ctypes.data % 64 == 0 for w in engine.weights.values() if len(w.shape) > 2)


def test_an_engine_may_be_moved_and_even_removed(engine: Path) -> None:
    moved = engine.rename(engine.with_name("elsewhere"))
    loaded = load_engine(moved)
    shutil.rmtree(moved)
    assert all(w.data.sum() >= 0 for w in loaded.weights.values())


def test_nothing_in_an_engine_names_a_place(built: Path) -> None:
    for path in built.rglob("*"):
        if path.is_file():
            assert str(built.parent).encode() not in path.read_bytes(), path


def test_loading_needs_nothing_of_the_compiler(built: Path) -> None:
    script = (
        "import sys; from llmc.runtime.engine import load_engine; load_engine(sys.argv[1])\n"
        "print([m for m in ('torch', 'transformers', 'onnx', 'onnx_ir', 'ml_dtypes') if m in sys.modules])"
    )
    output = subprocess.check_output([sys.executable, "-P", "-c", script, str(built)], text=True)
    assert output.strip() == "[]"


def file_names() -> list[str]:
    names = ["weights.safetensors", "plan.json", "graph.onnx", "recipe.json", "selftest.safetensors"]
    return [*names, "report.json", "report.html", "linears.json", "tokenizer/generation_config.json"]


def test_the_list_of_files_is_complete(built: Path) -> None:
    assert set(read_manifest(built).files) == set(file_names())


@pytest.mark.parametrize("name", file_names())
def test_a_flipped_byte_a_missing_byte_and_a_missing_file(engine: Path, name: str) -> None:
    data = bytearray((engine / name).read_bytes())
    data[len(data) // 2] ^= 1
    (engine / name).write_bytes(data)
    refused(engine, name, "SHA-256")
    (engine / name).write_bytes(data[:-1])
    refused(engine, name, str(len(data)), str(len(data) - 1))
    (engine / name).unlink()
    refused(engine, name, "missing")


def test_a_flipped_byte_anywhere_in_the_weights(engine: Path) -> None:
    data = (engine / "weights.safetensors").read_bytes()
    for position in (0, 8, 9, 500, len(data) - 1):
        broken = bytearray(data)
        broken[position] ^= 0x10
        (engine / "weights.safetensors").write_bytes(broken)
        refused(engine, "weights.safetensors")


def test_art_10_files_are_verified_by_path_even_if_two_have_the_same_digest(engine: Path) -> None:
    for name in ("a.json", "b.json"):
        replace(engine, name, b"{}")
    load_engine(engine)
    (engine / "b.json").write_bytes(b"[]")
    refused(engine, "b.json")


def test_sec_12_links_are_not_followed(engine: Path) -> None:
    target = engine.parent / "outside"
    (engine / "recipe.json").rename(target)
    (engine / "recipe.json").symlink_to(target)
    refused(engine, "recipe.json", "links")
    (engine / "recipe.json").unlink()
    os.mkfifo(engine / "recipe.json")
    refused(engine, "recipe.json", "regular")
    (engine / "recipe.json").unlink()
    target.rename(engine / "recipe.json")
    shutil.move(engine / "tokenizer", engine.parent / "tokenizer")
    (engine / "tokenizer").symlink_to(engine.parent / "tokenizer")
    refused(engine, "tokenizer/")


def test_art_03_another_format_or_target_is_refused_first(engine: Path) -> None:
    (engine / "weights.safetensors").unlink()  # nothing else is looked at
    edit(engine, lambda value: value.update(format=7, llmc="9.1", surprise=1))
    refused(engine, "format 7", "llmc 9.1", "format 1", "llmc build MODEL -o ENGINE --force --max-seq-len 64")
    edit(engine, lambda value: value.update(format=1, target="tpu:v5"))
    refused(engine, "'tpu:v5'", "cpu", "llmc build", "--target cpu")


def test_the_digest_can_be_pinned(built: Path) -> None:
    digest = "sha256:" + hashlib.sha256((built / "engine.json").read_bytes()).hexdigest()
    assert "sha256:" + load_engine(built, expect_digest=digest).digest == digest
    refused(built, digest, expect_digest="sha256:" + "0" * 64)


def test_places_without_an_engine(tmp_path: Path) -> None:
    refused(tmp_path / "nothing", "llmc build")
    refused(tmp_path, "no engine")
    (tmp_path / "file").write_text("x")
    refused(tmp_path / "file")


MANIFESTS: dict[str, Callable[[dict[str, Any]], object]] = {
    "unknown key": lambda v: v.update(more=1),
    "missing key": lambda v: v.pop("limits"),
    "unknown limit": lambda v: v["limits"].update(more=1),
    "limit of 0": lambda v: v["limits"].update(max_seq_len=0),
    "limit of 2^31": lambda v: v["limits"].update(max_seq_len=1 << 31),
    "limit is a text": lambda v: v["limits"].update(max_seq_len="64"),
    "limit is a float": lambda v: v["limits"].update(max_seq_len=64.0),
    "limit is true": lambda v: v["limits"].update(max_seq_len=True),
    "format is true": lambda v: v.update(format=True),
    "format is a text": lambda v: v.update(format="1"),
    "no format": lambda v: v.pop("format"),
    "files is a list": lambda v: v.update(files=[]),
    "no plan": lambda v: v["files"].pop("plan.json"),
    "no weights": lambda v: v["files"].pop("weights.safetensors"),
    "negative size": lambda v: v["files"]["plan.json"].update(size=-1),
    "short digest": lambda v: v["files"]["plan.json"].update(sha256="ab"),
    "digest in capitals": lambda v: v["files"]["plan.json"].update(sha256="A" * 64),
    "path upwards": lambda v: v["files"].update({"../x": v["files"]["plan.json"]}),
    "absolute path": lambda v: v["files"].update({"/etc/passwd": v["files"]["plan.json"]}),
    "path with a NUL": lambda v: v["files"].update({"a\0b": v["files"]["plan.json"]}),
    "path with a backslash": lambda v: v["files"].update({"a\\b": v["files"]["plan.json"]}),
    "vocabulary of 0": lambda v: v["model"].update(vocab_size=0),
    "negative end token": lambda v: v["model"].update(eos_token_ids=[-1]),
    "end tokens are no list": lambda v: v["model"].update(eos_token_ids=2),
    "KV dtype": lambda v: v["kv_cache"].update(dtype="int3"),
    "block of 15": lambda v: v["kv_cache"].update(block_size=15),
    "block of 2^20": lambda v: v["kv_cache"].update(block_size=1 << 20),
}


@pytest.mark.parametrize("case", MANIFESTS)
def test_a_manifest_that_is_wrong(engine: Path, case: str) -> None:
    """SEC-12, of names that lead elsewhere, and the rest of the schema."""
    edit(engine, MANIFESTS[case])
    refused(engine, "engine.json")


@pytest.mark.parametrize(
    "text", [b"", b"{", b"[]", b"null", b'{"a": 1, "a": 2}', b'{"a": NaN}', b"\xff", b'{"a":' * 50_000]
)
def test_a_manifest_that_is_no_json(engine: Path, text: bytes) -> None:
    (engine / "engine.json").write_bytes(text)
    refused(engine, "engine.json")


def test_art_09_a_broken_engine_does_not_hide_others(built: Path, tmp_path: Path) -> None:
    """Listings read one manifest at a time, and name the bad one."""
    for name in "abc":
        shutil.copytree(built, tmp_path / name)
    (tmp_path / "b/engine.json").write_text("{")
    problems = {}
    for path in sorted(tmp_path.iterdir()):
        try:
            assert read_manifest(path) == load_engine(path).manifest
        except EngineError as problem:
            problems[path.name] = str(problem)
    assert list(problems) == ["b"]
    assert problems["b"].startswith(str(tmp_path / "b/engine.json"))


def test_a_manifest_is_written_as_it_is_read(built: Path) -> None:
    text = (built / "engine.json").read_bytes()
    assert Manifest.from_bytes(text, "x").to_bytes() == text


def test_a_plan_is_written_as_it_is_read(built: Path) -> None:
    engine = load_engine(built)
    assert plan_file.to_bytes(engine.plan) == (built / "plan.json").read_bytes()


Plan = dict[str, Any]


def first(plan: Plan, storage: str) -> dict[str, Any]:
    return next(value for value in plan["values"] if value["storage"] == storage)


def step(plan: Plan, op: str) -> dict[str, Any]:
    return next(step for step in plan["steps"] if step["op"] == op)


PLANS: dict[str, Callable[[Plan], object]] = {
    "unknown key": lambda p: p.update(more=1),
    "missing key": lambda p: p.pop("steps"),
    "unknown op": lambda p: p["steps"][0].update(op="launch"),
    "unknown value": lambda p: p["steps"][0].update(inputs=["ghost", "ghost"]),
    "too few inputs": lambda p: step(p, "linear").update(inputs=[]),
    "too many inputs": lambda p: step(p, "linear").update(inputs=["input_ids"] * 9),
    "required input absent": lambda p: step(p, "linear")["inputs"].__setitem__(0, None),
    "no output": lambda p: step(p, "linear").update(outputs=[]),
    "writes to a weight": lambda p: step(p, "linear").update(outputs=[first(p, "weight")["name"]]),
    "writes to the batch": lambda p: step(p, "linear").update(outputs=["input_ids"]),
    "unknown attribute": lambda p: step(p, "norm")["attributes"].update(more=1),
    "missing attribute": lambda p: step(p, "norm")["attributes"].pop("epsilon"),
    "attribute of another type": lambda p: step(p, "norm")["attributes"].update(epsilon=1),
    "slot too high": lambda p: step(p, "paged_attention")["attributes"].update(slot=2),
    "slot negative": lambda p: step(p, "paged_attention")["attributes"].update(slot=-1),
    "slot without heads": lambda p: p["kv_slots"][0].update(kv_heads=0),
    "slot of 2^40 heads": lambda p: p["kv_slots"][0].update(kv_heads=1 << 40),
    "value twice": lambda p: p["values"].append(copy.deepcopy(p["values"][0])),
    "unknown storage": lambda p: first(p, "arena").update(storage="disk"),
    "unknown dtype": lambda p: first(p, "arena").update(dtype="float7"),
    "dtype of the weight": lambda p: first(p, "weight").update(dtype="int64"),
    "weight that is not there": lambda p: first(p, "weight").update(base="ghost"),
    "weight by number": lambda p: first(p, "weight").update(base=0),
    "batch input that is not there": lambda p: first(p, "batch").update(base="secrets"),
    "batch input as float": lambda p: first(p, "batch").update(dtype="float32"),
    "arena by name": lambda p: first(p, "arena").update(base="x"),
    "negative base": lambda p: first(p, "arena").update(base=-64),
    "odd base": lambda p: first(p, "arena").update(base=2),
    "base beyond the arena": lambda p: first(p, "arena").update(base=1 << 40),
    "arena too small": lambda p: p.update(arena_bytes=64),
    "arena of 2^60": lambda p: p.update(arena_bytes=1 << 60),
    "negative arena": lambda p: p.update(arena_bytes=-1),
    "shape too large": lambda p: first(p, "weight").update(shape=[1 << 40], strides=[1]),
    "shape of 2^64": lambda p: first(p, "weight").update(shape=[1 << 64], strides=[0]),
    "negative size": lambda p: first(p, "arena")["shape"].__setitem__(0, -1),
    "negative size at one token": lambda p: first(p, "arena")["shape"].__setitem__(0, {"T": 1, "1": -2}),
    "size that shrinks": lambda p: first(p, "arena")["shape"].__setitem__(0, {"T": -1, "1": 600}),
    "size is a text": lambda p: first(p, "arena")["shape"].__setitem__(0, "T"),
    "size of another symbol": lambda p: first(p, "arena")["shape"].__setitem__(0, {"Q": 1}),
    "size is a float": lambda p: first(p, "arena")["shape"].__setitem__(0, 1.5),
    "negative stride": lambda p: first(p, "weight")["strides"].__setitem__(0, -1),
    "offset beyond": lambda p: first(p, "weight").update(offset=1 << 30),
    "strides missing": lambda p: first(p, "weight").update(strides=[]),
    "9 dimensions": lambda p: first(p, "weight").update(shape=[1] * 9, strides=[1] * 9),
    "logits unknown": lambda p: p.update(logits="ghost"),
    "logits that are no floats": lambda p: p.update(logits="input_ids"),
    "state of no size": lambda p: p.update(state_slots=[{"shape": [0], "dtype": "float32"}]),
}


@pytest.mark.parametrize("case", PLANS)
def test_a_plan_that_is_wrong_in_an_engine_with_right_checksums(engine: Path, case: str) -> None:
    plan = json.loads((engine / "plan.json").read_text())
    PLANS[case](plan)
    replace(engine, "plan.json", json.dumps(plan).encode())
    refused(engine, "plan.json")


def test_sec_03_weights_with_a_hostile_header_in_an_engine_with_right_checksums(engine: Path) -> None:
    from checkpoints import with_header

    header = {"a": {"dtype": "U8", "shape": [1 << 40], "data_offsets": [0, 1 << 40]}}
    replace(engine, "weights.safetensors", with_header(json.dumps(header).encode(), b"x"))
    refused(engine, "weights.safetensors")


def test_sec_03_weights_out_of_line(engine: Path) -> None:
    """Kernels take it that numbers begin at multiples of their size."""
    data = (engine / "weights.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    longer = (length + 2).to_bytes(8, "little") + data[8 : 8 + length] + b"  " + data[8 + length :]
    replace(engine, "weights.safetensors", longer)
    refused(engine, "weights.safetensors", "no multiple of 64")


def test_sizes_in_json() -> None:
    for dim in (Dim(3), Dim(1, 2, 3), Dim(tokens=64), Dim(rows=1)):
        assert Dim.from_json(json.loads(json.dumps(dim.to_json()))) == dim
