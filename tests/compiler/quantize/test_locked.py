"""A recipe.json repeats a build byte for byte, is refused where that can't be, and may be damaged in any way."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from checkpoints import write_llama
from quantizable import token_file
from quantized_files import GPTQ, pack_gptq, write_quantized

from llmc.compiler.api import BuildResult, build_engine
from llmc.compiler.config import BuildConfig
from llmc.compiler.quantize import build, locked
from llmc.errors import CompileError, LlmcError


def repeat(model: Path, recipe: Path, engine: Path, **options: Any) -> BuildResult:
    return build_engine(model, engine, BuildConfig(**locked.options_of(recipe), locked=recipe, **options))


def test_a_calibrated_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = write_llama(tmp_path / "model", hidden_size=64, intermediate_size=96, head_dim=16)
    calib = token_file(tmp_path / "calib.jsonl", vocabulary=48)
    config = BuildConfig(quantization="awq:group=32", calib=str(calib), calib_length=32)
    first = build_engine(model, tmp_path / "e", config)
    moved = str(calib.rename(tmp_path / "moved.jsonl"))
    recipe = tmp_path / "e/recipe.json"
    assert repeat(model, recipe, tmp_path / "again", calib=moved).digest == first.digest
    with monkeypatch.context() as patch:
        patch.setattr(build.kernels, "best_isa", lambda: "other")
        with pytest.raises(CompileError, match=r"calibrated with the kernels for .*, this machine has other"):
            repeat(model, recipe, tmp_path / "x", calib=moved)
    assert not (tmp_path / "x").exists()
    for number, value in enumerate(damaged(json.loads(recipe.read_text()))):
        path = tmp_path / f"{number}.json"
        path.write_text(json.dumps(value))
        with suppress(LlmcError):  # nothing else is raised
            BuildConfig(**locked.options_of(path), locked=path)
            locked.check(path, {}, {})


def test_codes_of_the_checkpoint_compute_as_before(tmp_path: Path) -> None:
    write_quantized(tmp_path / "model", GPTQ, pack_gptq)
    first = build_engine(tmp_path / "model", tmp_path / "e", BuildConfig(compute="float32"))
    assert repeat(tmp_path / "model", tmp_path / "e/recipe.json", tmp_path / "again").digest == first.digest


def damaged(recipe: dict[str, Any]) -> Iterator[Any]:
    """With each value replaced by one of another type, or left away."""
    for place in places(recipe, ()):
        for value in (None, 3, "x", [], {}, True, [{}], {"name": "rtn"}, ...):
            copied = copy.deepcopy(recipe)
            inner = copied
            for key in place[:-1]:
                inner = inner[key]
            if value is ...:
                del inner[place[-1]]
            else:
                inner[place[-1]] = value
            yield copied


def places(value: Any, place: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield (*place, key)
            yield from places(inner, (*place, key))
