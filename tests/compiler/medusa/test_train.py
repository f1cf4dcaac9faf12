"""`llmc medusa train` on a model whose text is known: heads learn it, the same again, also after a kill."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from safetensors.torch import load_file
from script_models import T0, next_tokens, write_script_model

from llmc.__main__ import cli
from llmc.compiler.api import build_engine
from llmc.compiler.config import BuildConfig
from llmc.compiler.medusa import train as training
from llmc.compiler.medusa.collect import Features, make_prompts, read_pieces
from llmc.compiler.medusa.distill import train_medusa
from llmc.compiler.medusa.prompts import built_in
from llmc.compiler.medusa.settings import HeadTraining
from llmc.compiler.progress import Progress
from llmc.errors import UsageError

SETTINGS: dict[str, Any] = {"heads": 2, "texts": 40, "length": 12, "epochs": 20, "batch": 64, "temperature": 0.0}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_script_model(tmp_path_factory.mktemp("script") / "model", [])


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    path.write_text("".join(json.dumps({"token_ids": [3 * i + 10]}) + "\n" for i in range(40)))
    return path


@pytest.fixture(scope="module")
def trained(model: Path, prompts: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, Path]:
    folder = tmp_path_factory.mktemp("heads")
    settings = HeadTraining(**SETTINGS, prompts=prompts, learning_rate=0.01)
    result = train_medusa(model, folder / "heads", settings, work=folder / "work", threads=1)
    return folder / "heads", result, folder / "work"


class Stop(Progress):
    """Ends the work in the middle of a step."""

    def __init__(self, name: str, count: int) -> None:
        super().__init__()
        self.name, self.left = name, count

    def advance(self, count: int) -> None:
        if self._name == self.name:
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt


def test_features_are_those_of_the_text(trained: tuple[Path, Any, Path]) -> None:
    features = read_pieces(trained[2])
    following = next_tokens([], T0["vocab_size"])
    same = features.texts[1:] == features.texts[:-1]
    assert len(features.rows) == len(features.tokens) == trained[1].tokens
    assert all(following[a] == b for a, b in zip(features.tokens[:-1][same], features.tokens[1:][same], strict=True))
    targets = features.targets(2)
    assert np.array_equal(targets[:-1, 0], np.where(same, features.tokens[1:], -1))
    assert targets[-1].tolist() == [-1, -1]


def test_targets_end_with_their_text() -> None:
    features = Features(np.zeros((5, 1)), np.array([7, 8, 9, 5, 6], np.int32), np.array([0, 0, 0, 1, 1], np.int32))
    assert features.targets(2).tolist() == [[8, 9], [9, -1], [-1, -1], [6, -1], [-1, -1]]


def test_heads_that_see_the_token_learn_what_follows_it(model: Path, prompts: Path, tmp_path: Path) -> None:
    """What a token is followed by depends on nothing else here, so that others have to learn to tell it first."""
    found = {}
    for token in (True, False):
        settings = HeadTraining(**SETTINGS | {"heads": 1, "epochs": 4}, prompts=prompts, token=token)
        result = train_medusa(model, tmp_path / f"{token}", settings, work=tmp_path / "work", threads=1)
        names = load_file(tmp_path / f"{token}/medusa_lm_head.safetensors")
        assert ("0.token.weight" in names) is token
        found[token] = result.loss
    assert found[True] < found[False]


def test_heads_learn(trained: tuple[Path, Any, Path]) -> None:
    folder, result, _ = trained
    assert result.loss < 5  # ln 384 * (1 + 0.8) = 10.7 at the start
    assert all(head["top5"] >= head["top1"] for head in result.accuracy)
    files = sorted(path.name for path in folder.iterdir())
    assert files == ["config.json", "medusa_lm_head.safetensors", "tokens.safetensors"]


def test_the_same_again_after_a_kill(
    model: Path, prompts: Path, trained: tuple[Path, Any, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every file of the work folder is whole or not there, so an exception leaves what a kill leaves."""
    monkeypatch.setattr(training, "SAVE_SECONDS", 0.0)
    settings = HeadTraining(**SETTINGS, prompts=prompts, learning_rate=0.01)
    for step, count in (("the model writes text", 1), ("training heads", 5), ("training heads", 9)):
        with pytest.raises(KeyboardInterrupt):
            train_medusa(model, tmp_path / "heads", settings, threads=1, progress=Stop(step, count))
        assert not (tmp_path / "heads").exists()
    result = train_medusa(model, tmp_path / "heads", settings, threads=1)
    assert (result.loss, result.accuracy) == (trained[1].loss, trained[1].accuracy)
    for name in ("config.json", "medusa_lm_head.safetensors"):
        assert (tmp_path / "heads" / name).read_bytes() == (trained[0] / name).read_bytes()
    assert [path.name for path in tmp_path.iterdir()] == ["heads"]


KILLED = """
import os, signal, sys
from llmc.compiler.medusa import train
from llmc.compiler.progress import Progress

train.SAVE_SECONDS = 0.0
name, left = sys.argv[1], int(sys.argv[2])

def advance(self, count):
    global left
    left -= self._name == name
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)

Progress.advance = advance
"""


def test_a_killed_process_is_gone_on_with(
    model: Path, prompts: Path, trained: tuple[Path, Any, Path], tmp_path: Path
) -> None:
    code = f"""{KILLED}
from pathlib import Path
from llmc.compiler.medusa.distill import train_medusa
from llmc.compiler.medusa.settings import HeadTraining

settings = HeadTraining(**{SETTINGS!r}, prompts=Path({str(prompts)!r}), learning_rate=0.01)
train_medusa({str(model)!r}, {str(tmp_path / "heads")!r}, settings, threads=1)
"""
    command = [sys.executable, "-P", "-c", code, "training heads", "7"]
    dead = subprocess.run(command, capture_output=True, timeout=600)
    assert dead.returncode == -signal.SIGKILL, dead.stderr.decode()
    assert not (tmp_path / "heads").exists()
    assert (tmp_path / ".heads.llmc-train/engine/engine.json").exists()
    settings = HeadTraining(**SETTINGS, prompts=prompts, learning_rate=0.01)
    result = train_medusa(model, tmp_path / "heads", settings, threads=1)
    assert (result.loss, result.accuracy) == (trained[1].loss, trained[1].accuracy)
    name = "medusa_lm_head.safetensors"
    assert (tmp_path / "heads" / name).read_bytes() == (trained[0] / name).read_bytes()
    assert [path.name for path in tmp_path.iterdir()] == ["heads"]


def test_a_killed_build_leaves_nothing_in_the_way(model: Path, trained: tuple[Path, Any, Path], tmp_path: Path) -> None:
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"tokens": [i + 9] * 40}) + "\n" for i in range(4)))
    options: dict[str, Any] = {
        "calib": str(tmp_path / "text.jsonl"),
        "calib_samples": 4,
        "calib_length": 40,
        "max_seq_len": 96,
    }
    code = f"""{KILLED}
from pathlib import Path
from llmc.compiler.api import build_engine
from llmc.compiler.config import BuildConfig

config = BuildConfig(medusa=Path({str(trained[0])!r}), **{options!r})
build_engine({str(model)!r}, {str(tmp_path / "engine")!r}, config, progress=Progress())
"""
    command = [sys.executable, "-P", "-c", code, "measuring Medusa heads", "2"]
    dead = subprocess.run(command, capture_output=True, timeout=600)
    assert dead.returncode == -signal.SIGKILL, dead.stderr.decode()
    assert not (tmp_path / "engine").exists()
    config = BuildConfig(medusa=trained[0], **options)
    again = build_engine(model, tmp_path / "engine", config)
    assert again.digest == build_engine(model, tmp_path / "other", config).digest
    assert sorted(path.name for path in tmp_path.iterdir()) == ["engine", "other", "text.jsonl"]


def test_other_heads_from_the_same_texts(
    model: Path, prompts: Path, trained: tuple[Path, Any, Path], tmp_path: Path
) -> None:
    work = shutil.copytree(trained[2], tmp_path / "work")
    stamp = (work / "texts-00000.npz").stat().st_mtime_ns
    arguments = ["medusa", "train", model, "-o", tmp_path / "heads", "--prompts", prompts, "--work", work]
    options = {**SETTINGS, "epochs": 1, "heads": 1, "layers": 2, "candidates": 0}
    given = ["--no-token", *(text for name, value in options.items() for text in (f"--{name}", value))]
    result = CliRunner().invoke(cli, [str(a) for a in (*arguments, *given, "--threads", 1, "--json", "--quiet")])
    assert result.exit_code == 0, result.output
    assert len(json.loads(result.stdout)["accuracy"]) == 1
    assert (work / "texts-00000.npz").stat().st_mtime_ns == stamp
    assert json.loads((tmp_path / "heads/config.json").read_text())["medusa_num_layers"] == 2
    assert "0.token.weight" not in load_file(tmp_path / "heads/medusa_lm_head.safetensors")


def test_what_makes_no_sense_is_refused(model: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--heads 0: expected a number from 1 to 16"):
        HeadTraining(heads=0)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/file").write_text("")
    with pytest.raises(UsageError, match="holds something else than the work"):
        train_medusa(model, tmp_path / "heads", work=tmp_path / "mine")
    llm: Any = SimpleNamespace(tokenizer=None, vocab_size=384)
    with pytest.raises(UsageError, match="no tokenizer; give --prompts"):
        make_prompts(HeadTraining(texts=2, length=8), llm, tmp_path, Progress())
    (tmp_path / "long.jsonl").write_text(json.dumps({"token_ids": [5] * 50}))
    with pytest.raises(UsageError, match="prompt 1 has 50 tokens; texts have 8, use --length"):
        make_prompts(HeadTraining(texts=2, length=8, prompts=tmp_path / "long.jsonl"), llm, tmp_path, Progress())


def test_our_prompts_differ_and_depend_on_the_seed() -> None:
    first = built_in(1000, 0)
    assert len(set(first)) > 850
    assert first == built_in(1000, 0) != built_in(1000, 1)
    assert first[:100] == built_in(100, 0)
