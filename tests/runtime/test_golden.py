"""Engines of earlier formats, made by build_scripts/golden_engine.py, load and generate what they did (R21)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from llmc import LLM, SamplingParams
from llmc.runtime import manifest

GOLDEN = Path(__file__).parents[1] / "golden"
ENGINES = sorted(GOLDEN.iterdir())


@pytest.mark.parametrize("folder", ENGINES, ids=lambda folder: folder.name)
def test_a_golden_engine_generates_what_it_did(folder: Path) -> None:
    expected = json.loads((folder / "generated.json").read_text())
    llm = LLM(folder / "engine", isa="scalar")  # the others may round otherwise in a later release
    results = llm.generate(expected["prompts"], SamplingParams(max_tokens=16, ignore_eos=True))
    assert [list(result.token_ids) for result in results] == expected["tokens"]
    assert sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) < (100 << 10)


def test_there_is_one_for_each_format_that_is_read() -> None:
    assert {folder.name for folder in ENGINES} >= {f"format-{number}" for number in manifest.READABLE_FORMATS}
