"""llmc bench: the workloads are what they are said to be. No test looks at a clock."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from llmc.__main__ import cli
from llmc.errors import UsageError
from llmc.plugins import kernels
from llmc.runtime import bench, llm


def test_the_mix() -> None:
    assert len(bench.BATCH16) == 16
    assert sum(a for a, _ in bench.BATCH16) == 3940
    assert sum(b for _, b in bench.BATCH16) == 1830


@pytest.mark.parametrize(("vocabulary", "length"), [(384, 2048), (49152, 512), (131, 17)])
def test_prompts_are_token_ids(vocabulary: int, length: int) -> None:
    ids = bench.prompt(length, vocabulary)
    assert len(ids) == length
    assert 3 <= min(ids) <= max(ids) < vocabulary
    assert ids != bench.prompt(length, vocabulary, seed=1)


def test_contexts() -> None:
    assert [bench.longest(w) for w in bench.WORKLOADS] == [513, 2049, 256, 2176, 734, 17]


def test_report(kit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made = kit.llm(lambda history: kit.one_hot(5), max_seq_len=1024, num_blocks=512, prefix_cache=False)
    made.executor.isa = "fake"
    asked: dict[str, Any] = {}
    monkeypatch.setattr(llm, "LLM", lambda *_, **values: asked.update(values) or made)
    monkeypatch.setattr(bench, "measure_ceilings", lambda threads: {"read_bandwidth": 50.0, "fp32": 100.0})
    arguments = ["bench", "engine", "--rounds", "2", "--ceilings"]
    for name in ("decode128", "batch16", "decode2048"):
        arguments += ["--workload", name]
    result = CliRunner().invoke(cli, [*arguments, "--json"])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert set(report["figures"]) == {"decode128", "batch16"}
    assert report["figures"]["batch16"]["unit"] == "tokens/s"
    assert report["ceilings"]["fp32"] == {"median": 100.0, "min": 100.0, "max": 100.0, "unit": "GFLOP/s"}
    assert report["skipped"] == {"decode2048": "needs a context of 2176 tokens"}
    tokens = 16 + 1 + 2 * (3940 + 1830 - 16 + 128 + 127)  # the last token of each request is not computed
    assert made.scheduler.statistics.tokens == tokens
    assert asked["prefix_cache"] is False  # rounds repeat their prompts
    table = CliRunner().invoke(cli, arguments).stdout
    assert "decode128" in table
    assert "GB/s" in table


def test_nothing_fits(kit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm, "LLM", lambda *_, **__: kit.llm(max_seq_len=64))
    result = CliRunner().invoke(cli, ["bench", "engine", "--workload", "prefill512"])
    assert isinstance(result.exception, UsageError)


def test_ceilings() -> None:
    found = kernels.ceilings(1, 1 << 24)
    assert {"read_bandwidth", "fp32"} <= set(found)
    assert all(value > 0 for value in found.values())
    assert Path(bench.__file__).exists()
