"""The gate: its grammar, its verdicts, and that a build that fails it leaves nothing behind."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import engines
import numpy as np
import pytest
from click.testing import CliRunner

from llmc.__main__ import cli
from llmc.compiler.api import build_engine
from llmc.compiler.config import BuildConfig
from llmc.compiler.evaluation.evaluate import Evaluation
from llmc.compiler.evaluation.figures import Comparison, Figures, Generation
from llmc.compiler.gate import METRICS, Condition, QualityRequest, parse_gate
from llmc.errors import CompileError, GateError, ResourceError, UsageError
from llmc.runtime.engine import load_engine

COMPARISON = Comparison("model", 20.0, 1.05, 0.01, 0.02, 0.01, 0.2, 1.5, 0.97)
GENERATION = Generation(256, 0.2, 0.4, (), 0.1, 40.0, 0.25)
FIGURES = Figures("t", "0", 8, False, 1, 1, 7, 21.0, (21.0,), (), COMPARISON, (20.0,), GENERATION)


def test_grammar() -> None:
    gate = parse_gate(" ppl <= +2% , top1>=0.95,kl<=5e-2,repetition<=+.1,divergence>=32,kl_p99<=1")
    assert gate.conditions == (
        Condition("ppl", 2.0, "%"),
        Condition("top1", 0.95),
        Condition("kl", 0.05),
        Condition("repetition", 0.1, "+"),
        Condition("divergence", 32.0),
        Condition("kl_p99", 1.0),
    )
    assert gate.text == "ppl<=+2%,top1>=0.95,kl<=0.05,repetition<=+0.1,divergence>=32,kl_p99<=1"
    assert parse_gate(gate.text) == gate
    long = parse_gate("ppl<=12345678.25,kl<=0.0512345678,kl_max<=3e20")
    assert parse_gate(long.text) == long, "a build that is repeated has the same limits"
    assert parse_gate("ppl<=-1%").conditions == (Condition("ppl", -1.0, "%"),)
    assert parse_gate("ppl<=20").needs_source is False and parse_gate("ppl<=+20").needs_source is True


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "'' is not understood; write FIGURE<=NUMBER"),
        ("ppl<=+2%,", "'' is not understood"),
        ("ppl<+2%", "not understood"),
        ("ppl=2", "not understood"),
        ("ppl<=two", "not understood"),
        ("ppl<=nan", "not understood"),
        ("ppl<=1e999", "met by everything"),
        ("accuracy>=0.9", "unknown figure 'accuracy'; known: ppl, kl, kl_p99, kl_max, top1, repetition"),
        ("top1<=0.9", "top1 is the better the larger it is; use top1>=0.9"),
        ("ppl>=2", "ppl is the better the smaller it is; use ppl<=2"),
        ("ppl<=2%", "relative to the source model; write [+]2%"),
        ("kl<=+2%", "kl has no relative limits"),
        ("top1>=95", "a share from 0 to 1, not 95"),
        ("ppl<=2,ppl<=3", "ppl is there twice"),
    ],
)
def test_what_is_no_gate(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_gate(text)


@pytest.mark.parametrize(
    ("text", "found", "passed"),
    [
        ("ppl<=21", 21.0, True),
        ("ppl<=20.9", 21.0, False),
        ("ppl<=+5.1%", 5.0, True),
        ("ppl<=+4.9%", 5.0, False),
        ("ppl<=+0.9", 1.0, False),
        ("kl<=0.02", 0.02, True),
        ("kl_p99<=0.1", 0.2, False),
        ("kl_max<=2", 1.5, True),
        ("top1>=0.97", 0.97, True),
        ("top1>=0.98", 0.97, False),
        ("repetition<=0.2", 0.2, True),
        ("repetition<=+0.05", 0.1, False),
        ("repetition<=+110%", 100.0, True),
        ("divergence>=41", 40.0, False),
        ("prefix>=0.25", 0.25, True),
    ],
)
def test_verdicts(text: str, found: float, passed: bool) -> None:
    [result] = parse_gate(text).check(FIGURES)
    assert result.found == pytest.approx(found) and result.passed is passed


def test_every_figure_can_be_read_and_what_is_no_number_fails() -> None:
    for name, metric in METRICS.items():
        assert np.isfinite(metric.read(FIGURES)) and metric.what
        bad = replace(FIGURES, perplexity=float("nan"))
        assert not parse_gate("ppl<=1000").check(bad)[0].passed, name


def test_the_message_is_a_table_with_the_failing_ones_marked() -> None:
    with pytest.raises(GateError) as failure:
        parse_gate("ppl<=+2%,top1>=0.95").require(FIGURES, "no engine was published")
    assert str(failure.value).splitlines() == [
        "1 of 2 conditions of the gate failed:",
        "          figure  wanted  found",
        "  FAILED  ppl     <=+2%   +5%",
        "  ok      top1    >=0.95  0.97",
        "no engine was published",
    ]
    assert failure.value.figures is not None
    assert [c["passed"] for c in failure.value.figures["gate"]["conditions"]] == [False, True]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gate")
    engines.build(engines.small_llama(), folder)
    ids = np.random.default_rng(0).integers(3, 131, 100).tolist()
    (folder / "text.json").write_text(json.dumps(ids))
    return folder


def request(folder: Path, gate: str | None) -> QualityRequest:
    evaluation = Evaluation(folder / "text.json", context=32, tokens=8)
    return QualityRequest(evaluation, None if gate is None else parse_gate(gate))


def test_an_engine_that_passes_says_so(folder: Path, tmp_path: Path) -> None:
    config = BuildConfig(dtype="bfloat16")
    result = build_engine(folder / "model", tmp_path / "e", config, quality=request(folder, "ppl<=+2%,kl<=0.05"))
    report = json.loads((tmp_path / "e/report.json").read_text())
    assert report == json.loads(json.dumps(result.report))
    assert report["gate"]["text"] == "ppl<=+2%,kl<=0.05" and all(c["passed"] for c in report["gate"]["conditions"])
    assert 0 < report["quality"]["comparison"]["kl"] < 0.05 and report["quality"]["windows"] == 3
    recipe = json.loads((tmp_path / "e/recipe.json").read_text())["quality"]
    assert recipe["gate"] == report["gate"]["text"] and recipe["text_sha256"] == report["quality"]["text_sha256"]
    assert str(folder) not in json.dumps(recipe) + json.dumps(report)
    assert {"report.json", "report.html"} <= set(load_engine(tmp_path / "e").manifest.files)
    again = build_engine(folder / "model", tmp_path / "f", config, quality=request(folder, "ppl<=+2%,kl<=0.05"))
    assert again.digest == result.digest


def test_a_gated_build_can_be_repeated(folder: Path, tmp_path: Path) -> None:
    first = build_engine(folder / "model", tmp_path / "e", quality=request(folder, "ppl<=+2%"))
    renamed = tmp_path / "renamed.json"
    renamed.write_bytes((folder / "text.json").read_bytes())

    def repeat(*options: object) -> Any:
        command = ["build", folder / "model", "-o", tmp_path / "f", "--locked", tmp_path / "e/recipe.json", *options]
        return CliRunner().invoke(cli, [str(word) for word in [*command, "--quiet", "--json"]])

    done = repeat("--eval", renamed)
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["digest"] == f"sha256:{first.digest}"
    other = repeat()
    assert isinstance(other.exception, CompileError) and "text.json) with --eval" in str(other.exception)
    refused = repeat("--gate", "ppl<=1")
    assert isinstance(refused.exception, UsageError) and "leave the option away" in str(refused.exception)


def test_figures_without_a_gate(folder: Path, tmp_path: Path) -> None:
    report = build_engine(folder / "model", tmp_path / "e", quality=request(folder, None)).report
    assert report["quality"]["comparison"]["kl"] < 1e-6 and "gate" not in report


@pytest.mark.parametrize("force", [False, True])
def test_an_engine_that_fails_is_not_published(folder: Path, tmp_path: Path, force: bool) -> None:
    target = tmp_path / "e"
    before = b""
    if force:  # the one that is there stays
        build_engine(folder / "model", target)
        before = (target / "engine.json").read_bytes()
    command = ["build", folder / "model", "-o", target, "--gate", "kl<=0.000000001,top1>=0.1", "--quiet", "--force"]
    command += ["--dtype", "bfloat16", "--eval", folder / "text.json", "--eval-context", 32, "--eval-tokens", 0]
    done = CliRunner().invoke(cli, [str(word) for word in command])
    assert isinstance(done.exception, GateError) and done.exception.exit_code == 3
    assert "FAILED  kl" in str(done.exception) and "ok      top1" in str(done.exception)
    assert os.listdir(tmp_path) == (["e"] if force else [])
    assert not force or (target / "engine.json").read_bytes() == before


def test_a_failed_build_tells_programs_why(folder: Path, tmp_path: Path) -> None:
    command = ["build", folder / "model", "-o", tmp_path / "e", "--gate", "top1>=0.5,ppl<=1", "--quiet", "--json"]
    command += ["--eval", folder / "text.json", "--eval-context", 32, "--eval-tokens", 0]
    done = CliRunner().invoke(cli, [str(word) for word in command])
    found = json.loads(done.stdout)
    assert isinstance(done.exception, GateError) and found["engine"] is None
    assert [c["passed"] for c in found["gate"]["conditions"]] == [True, False]
    assert found["quality"]["comparison"]["top1"] == 1


def test_what_can_not_be_measured_is_refused_at_once(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluation = Evaluation(tmp_path / "no.txt")
    with pytest.raises(UsageError, match=r"no\.txt"):
        build_engine(folder / "model", tmp_path / "e", quality=QualityRequest(evaluation))
    monkeypatch.setattr("llmc.runtime.resources.available_memory", lambda: 1000)
    with pytest.raises(ResourceError, match="only 1000 are free"):
        build_engine(folder / "model", tmp_path / "e", quality=request(folder, None))
    done = CliRunner().invoke(cli, ["build", str(folder / "model"), "-o", str(tmp_path / "e"), "--eval-windows", "2"])
    assert isinstance(done.exception, UsageError) and "--eval-windows belongs to --eval or --gate" in str(
        done.exception
    )
    assert os.listdir(tmp_path) == []
