"""Quantization that was interrupted goes on where it was, and ends with the same bytes."""

from __future__ import annotations

import filecmp
import os
import random
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from checkpoints import write_llama
from quantizable import Notes, compiled, quantize, save_model, token_file
from test_interrupted_builds import Builder

from llmc.compiler.api import Compiled, build_engine
from llmc.compiler.config import BuildConfig
from llmc.compiler.quantize import apply, pack
from llmc.errors import CompileError, ResourceError, UsageError

SIZES = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}

LEFT = (".e.llmc-build", ".e.llmc-lock", ".e.llmc-quant")


@pytest.fixture(scope="module")
def builder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Builder]:
    folder = tmp_path_factory.mktemp("builds")
    builder = Builder(folder)
    builder.model = write_llama(folder / "small", num_hidden_layers=3, **SIZES)
    yield builder
    with builder.server as server:
        server.kill()


def same(a: Path, b: Path) -> bool:
    names = sorted(str(path.relative_to(a)) for path in a.rglob("*") if path.is_file())
    assert names == sorted(str(path.relative_to(b)) for path in b.rglob("*") if path.is_file())
    return all(filecmp.cmp(a / name, b / name, shallow=False) for name in names)


@pytest.mark.parametrize(
    ("method", "goal", "kills"),
    [
        ("gptq:group=32", (), 5),
        ("awq:group=32", (), 5),
        ("rtn", (), 10),
        ("rtn:group=64", ("--budget", "6bpw"), 5),
        ("awq:group=64", ("--max-ppl-increase", "10%"), 5),
    ],
)
def test_killed_builds_end_with_the_same_bytes(
    builder: Builder, tmp_path: Path, method: str, goal: tuple[str, ...], kills: int
) -> None:
    """Killed at moments from the first step of quantization to the last of all."""
    calib = token_file(tmp_path / "calib.jsonl", 16, 64, vocabulary=48)
    options = ("--quant", method, "--calib-length", 32, *goal)
    options += () if method == "rtn" else ("--calib", calib)
    whole = builder.start(tmp_path / "whole", *options)
    assert whole.wait() == 0, whole.printed()
    steps = whole.printed().count("\n")
    chance = random.Random(7)
    ended = False
    for number in range(kills):
        run = builder.start(tmp_path / "e", *options)
        step = 4 + number * (steps - 4) // (kills - 1)
        ended = run.signal(signal.SIGKILL, step, chance.uniform(0, 0.03)) == 0
        assert set(os.listdir(tmp_path)) <= {"whole", "calib.jsonl", "e", *LEFT}
        if ended:
            shutil.rmtree(tmp_path / "e")
    last = builder.start(tmp_path / "e", *options)
    assert last.wait() == 0, last.printed()
    assert same(tmp_path / "whole", tmp_path / "e")
    assert set(os.listdir(tmp_path)) == {"whole", "calib.jsonl", "e"}


@pytest.fixture(scope="module", params=["llama", "mixtral"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    folder = tmp_path_factory.mktemp(request.param)
    return compiled(save_model(request.param, folder / "model"), dtype="float32")


@pytest.mark.parametrize("method", ["gptq:group=32", "awq:group=32"])
def test_the_state_of_a_run_is_taken_up(
    model: Compiled, method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interrupted at each third result, with the state saved at every stop, and not at all."""
    expected = contents(model, method, tmp_path / "whole")
    monkeypatch.setattr(apply, "SAVE_SHARE", 0)
    for seconds in (0.0, 1e9):
        monkeypatch.setattr(apply, "SAVE_SECONDS", seconds)
        folder = tmp_path / f"pieces{seconds}"
        for stop in range(1, 40, 3):
            with monkeypatch.context() as patch:
                interrupt_after(stop, patch)
                try:
                    assert contents(model, method, folder) == expected
                    break
                except KeyboardInterrupt:
                    assert (folder / ".engine.llmc-quant").exists()
        else:
            raise AssertionError("it never ended")
        assert stop > 1


def interrupt_after(count: int, patch: pytest.MonkeyPatch) -> None:
    """Ctrl-C when so many results have been written."""
    left = [count]
    record = pack.Work.record

    def counted(self: Any, name: str, facts: dict[str, Any]) -> Any:
        if not left[0]:
            raise KeyboardInterrupt
        left[0] -= 1
        return record(self, name, facts)

    patch.setattr(pack.Work, "record", counted)


def contents(model: Compiled, method: str, folder: Path) -> dict[str, bytes]:
    folder.mkdir(exist_ok=True)
    lowered, report = quantize(model, method, folder)
    found = {name: b"".join(chunk.tobytes() for chunk in t.chunks()) for name, t in lowered.weights.items()}
    return found | {"report": repr(report).encode()}


@pytest.mark.parametrize("method", ["gptq:group=32", "awq:group=32", "smoothquant"])
def test_threads_change_no_bit(model: Compiled, method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from llmc.compiler.quantize import build

    found = []
    for threads in (1, 2):
        monkeypatch.setattr(build, "thread_count", lambda threads=threads: threads)
        found.append(contents(model, method, tmp_path / str(threads)))
    assert found[0] == found[1]


def test_reuse_and_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If only the type of the KV cache changes, weights are taken over. A recipe repeats the build, or says why not."""
    model = write_llama(tmp_path / "model", "bfloat16", hidden_size=64, intermediate_size=96, head_dim=16)
    calib = token_file(tmp_path / "calib.jsonl", vocabulary=48)
    options = {"quantization": "awq:group=32", "calib": str(calib), "calib_length": 32}
    first = build_engine(model, tmp_path / "e", BuildConfig(**options))
    with monkeypatch.context() as patch:
        patch.setattr(apply.Interpreter, "run", None)  # calibration would fail
        notes = Notes()
        config = BuildConfig(**options, kv_dtype="float32", reuse=tmp_path / "e")
        second = build_engine(model, tmp_path / "kv", config, progress=notes)
        assert any("taking over the quantized weights" in note for note in notes.notes)
        again = build_engine(model, tmp_path / "kv", BuildConfig(**options), force=True)
    assert filecmp.cmp(tmp_path / "e/weights.safetensors", tmp_path / "kv/weights.safetensors", shallow=False)
    assert first.digest == again.digest != second.digest, "the same from scratch and taken over"
    other = Notes()
    build_engine(model, tmp_path / "rtn", BuildConfig(quantization="rtn", reuse=tmp_path / "e"), progress=other)
    assert any("nothing is taken over" in note for note in other.notes)

    from llmc.compiler.quantize import locked

    recipe = tmp_path / "e/recipe.json"
    config = BuildConfig(**locked.options_of(recipe), locked=recipe, calib=str(calib))
    assert build_engine(model, tmp_path / "again", config).digest == first.digest
    short = token_file(tmp_path / "other.jsonl", count=4, vocabulary=48)
    with pytest.raises((CompileError, UsageError), match="calib"):
        build_engine(model, tmp_path / "x", BuildConfig(**locked.options_of(recipe), locked=recipe, calib=str(short)))
    write_llama(tmp_path / "model", "bfloat16", hidden_size=64, intermediate_size=128, head_dim=16)
    with pytest.raises(CompileError, match=r"config.json of the model has SHA-256"):
        build_engine(model, tmp_path / "x", config)
    assert not (tmp_path / "x").exists()


def test_a_full_disk_keeps_what_is_done(model: Compiled, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writes = [0]
    write = pack.Writer._write

    def failing(self: Any, data: Any) -> None:
        writes[0] += 1
        if writes[0] > 30:
            raise OSError(28, "No space left on device")
        write(self, data)

    with monkeypatch.context() as patch:
        patch.setattr(pack.Writer, "_write", failing)
        with pytest.raises(ResourceError, match=r"the disk is full .*what was quantized so far is kept"):
            quantize(model, "rtn", tmp_path)
    assert not list((tmp_path / ".engine.llmc-quant").glob("*.part"))
    quantize(model, "rtn", tmp_path)
    assert not (tmp_path / ".engine.llmc-quant").exists()


@pytest.mark.parametrize("damage", ["", "{}", "[1]", "cut"])
def test_damaged_work_is_done_again(
    model: Compiled, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    """A record that can't be read, or whose tensors were cut."""
    work = tmp_path / ".engine.llmc-quant"
    with monkeypatch.context() as patch:
        patch.setattr(pack.Writer, "finish", full_after(2, pack.Writer.finish))
        with pytest.raises(ResourceError, match="kept"):
            quantize(model, "rtn", tmp_path)
    records = [file for file in sorted(work.glob("*.json")) if file.name != "key.json"]
    assert len(records) == 2
    if damage == "cut":
        os.truncate(records[0].with_suffix(".bin"), 10)
    else:
        records[0].write_text(damage)
    quantize(model, "rtn", tmp_path)
    assert not work.exists()


def full_after(count: int, finish: Any) -> Any:
    """A disk that is full after so many records."""
    done = [0]

    def failing(self: Any) -> Any:
        done[0] += 1
        if done[0] > count:
            raise OSError(28, "No space left on device")
        return finish(self)

    return failing
