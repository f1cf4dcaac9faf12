"""build_scripts/bench_spec.py: one line for each proposer, and one clear error for a wrong one."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from script_models import write_script_model

from llmc.compiler.api import build_engine

ROOT = Path(__file__).parents[3]
ENGINE = str(ROOT / "tests/golden/format-1/engine")


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "abab"}\n')
    return str(tmp_path / "prompts.jsonl")


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str, script: str = "bench_spec") -> int:
    monkeypatch.syspath_prepend(str(ROOT / "build_scripts"))
    monkeypatch.setattr(sys, "argv", [f"{script}.py", *arguments])
    try:
        return int(importlib.import_module(script).main())
    except SystemExit as left:
        return int(left.code or 0)


def test_a_row_for_each(
    monkeypatch: pytest.MonkeyPatch, prompts: str, capsys: pytest.CaptureFixture[str], kit: Any, tmp_path: Path
) -> None:
    spec = kit.byte_level_spec()
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    model = write_script_model(tmp_path / "model", [kit.ids("bcd")], spec, template)
    build_engine(model, tmp_path / "engine")
    assert run(monkeypatch, prompts, str(tmp_path / "engine"), "--new", "4", "--batch", "1", "2") == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(row["batch"], row["different"], row["tokens"] > 0) for row in rows] == [(1, [], True), (2, [], True)]

    results = tmp_path / "results.jsonl"
    asked = prompts, str(tmp_path / "engine"), "--results", str(results), "--new", "4"
    for count in (3, 0):  # without drafts, and with them alone and in a batch; then all is there
        assert run(monkeypatch, *asked, script="spec_identity") == 0
        assert len(capsys.readouterr().out.splitlines()) == count
    first, *others = results.read_text().splitlines()
    wrong = json.loads(first)
    wrong["answers"][0][-1] += 1
    results.write_text("\n".join([json.dumps(wrong), *others[:1], others[1][:9]]))  # the last one was cut off
    assert run(monkeypatch, *asked, script="spec_identity") == 1
    assert json.loads(capsys.readouterr().out)["different"] == [0]
    assert run(monkeypatch, *asked, script="spec_identity") == 1
    assert not capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--spec", "nonsense"], 2, "error: --spec nonsense: there is no such proposer; known: off, draft"),
        (["--spec", "off"], 2, "--spec off is what every proposer is compared with"),
        (["--spec", "draft=/nowhere"], 4, "error: /nowhere: there is no such directory"),
        (["--tokens", "0"], 2, "error: spec-tokens: 0 is less than 1"),
    ],
)
def test_mistakes(
    monkeypatch: pytest.MonkeyPatch,
    prompts: str,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    code: int,
    message: str,
) -> None:
    assert run(monkeypatch, prompts, ENGINE, *arguments) == code
    assert message in capsys.readouterr().err
    assert run(monkeypatch, "/nowhere", ENGINE) == 2 and "/nowhere: not a file of prompts" in capsys.readouterr().err
