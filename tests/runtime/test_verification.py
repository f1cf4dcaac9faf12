"""llmc verify: what counts as equal, and what a damaged or changed engine gives."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import engines
import numpy as np
import pytest
from click.testing import CliRunner

from llmc.__main__ import cli
from llmc.errors import EngineError, GateError
from llmc.plugins import kernels
from llmc.runtime import selftest
from llmc.runtime.devices.cpu import CpuExecutor
from llmc.runtime.engine import load_engine
from llmc.runtime.selftest import Golden
from llmc.runtime.verification import compare, verify_engine


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    _, path = engines.build(engines.small_llama(), tmp_path_factory.mktemp("verify"))
    return path


def test_a_good_engine(engine: Path) -> None:
    report = verify_engine(engine, threads=1)
    assert report.passed
    assert [r.isa for r in report.replays] == list(dict.fromkeys(["scalar", kernels.best_isa()]))
    assert report.replays[0].error == 0
    result = CliRunner().invoke(
        cli, ["verify", str(engine), "--json", "--expect-digest", f"sha256:{report.engine.digest}"]
    )
    assert result.exit_code == 0
    assert json.loads(result.stdout) == report.to_json()
    text = CliRunner().invoke(cli, ["verify", str(engine)]).stdout
    assert "prompts on scalar: bit-equal" in text
    assert f"sha256:{report.engine.digest}" in text


def test_numbers_that_differ(engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step = CpuExecutor.step
    monkeypatch.setattr(CpuExecutor, "step", lambda self, batch: step(self, batch) * np.float32(1.0000001))
    report = verify_engine(engine, threads=1)
    assert not report.replays[0].passed
    result = CliRunner().invoke(cli, ["verify", str(engine)])
    assert isinstance(result.exception, GateError)
    assert result.exception.exit_code == 3
    assert "WRONG" in result.stdout


def test_damaged_files(engine: Path, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="expected digest sha256:0, found sha256:"):
        verify_engine(engine, expect_digest="sha256:0")
    for name in load_engine(engine).manifest.files:
        copy = tmp_path / name.replace("/", "-")
        shutil.copytree(engine, copy)
        content = bytearray((copy / name).read_bytes())
        content[len(content) // 2] ^= 1
        (copy / name).write_bytes(content)
        with pytest.raises(EngineError, match=name):
            verify_engine(copy)


def golden(logits: Any, continuation: tuple[int, ...] = (1, 2)) -> Golden:
    return Golden((1,), np.array(logits, np.float32), continuation)


def test_compare() -> None:
    a = golden([0.0, 1.0, 2.0])
    assert compare("x", [a], [a], 0.0).passed
    near = golden([0.0, 1.0, 2.00001], (1, 3))
    assert not compare("x", [a], [near], 0.0).passed
    replay = compare("x", [a, a], [a, near], 1e-3)
    assert (replay.passed, replay.equal_tokens, replay.tokens) == (True, 3, 4)
    for bad in ([0.0, np.nan, 2.0], [0.0, np.inf, 2.0], [2.0, 1.0, 0.0]):
        assert not compare("x", [a], [golden(bad)], 5e-2).passed


def test_self_tests_that_do_not_suit(engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good = load_engine(engine).read(selftest.NAME)
    assert good is not None
    for change, message in (
        ({"prompt.0": "prompt.9"}, "there is no tensor 'prompt.0'"),
        ({'"I32"': '"U32"'}, ""),
    ):
        text = good
        for old, new in change.items():
            text = text.replace(old.encode(), new.encode())
        monkeypatch.setattr("llmc.runtime.engine.Engine.read", lambda self, name, text=text: text)
        if message:
            with pytest.raises(EngineError, match=message):
                verify_engine(engine)
