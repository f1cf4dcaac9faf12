"""Real GGUF files: their codes stand for the numbers of the directories made of them, and engines keep them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from llmc import LLM, SamplingParams
from llmc.compiler.api import build_engine
from llmc.compiler.checkpoint import Checkpoint
from llmc.compiler.config import BuildConfig
from llmc.compiler.quantized_views import find_quantized

pytestmark = pytest.mark.real_model

SMOLLM2 = "SmolLM2-135M-Instruct"
FILES = {
    f"{SMOLLM2}.Q4_1.gguf": f"{SMOLLM2}-float32",
    "Qwen2.5-Coder-0.5B-Instruct.Q4_K_M.gguf": "Qwen2.5-Coder-0.5B-Instruct-bfloat16",
    "gemma-3-270m.Q4_K_M.gguf": "gemma-3-270m-bfloat16",
}
PIECE = 8 << 20


def row_ranges(shape: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    step = max(1, PIECE // int(np.prod(shape[1:])))
    for start in range(0, shape[0], step):
        yield start, min(shape[0], start + step)


@pytest.mark.parametrize("name", FILES)
def test_codes_stand_for_the_numbers_of_the_directory(real_model: Callable[[str], Path], name: str) -> None:
    found = Checkpoint.open(real_model(name))
    expected = Checkpoint.open(real_model(FILES[name]), allow_hard_links=True)
    assert sorted(found.names) == sorted(expected.names)
    quantized = 0
    for parameter in found.names:
        source, other = found.weight(parameter), expected.weight(parameter)
        codes = find_quantized(source)
        quantized += codes is not None
        for start, stop in row_ranges(source.shape):
            rows = source.rows(start, stop) if codes is None else codes.quantized_rows(start, stop).dequantize()
            wanted = other.rows(start, stop)
            np.testing.assert_array_equal(rows.astype(wanted.dtype), wanted, parameter)
    assert quantized > len(found.names) / 2


def test_an_engine_of_codes(real_model: Callable[[str], Path], tmp_path: Path) -> None:
    """Less than half the size of bfloat16, and in float32 the same text as the floats."""
    name = f"{SMOLLM2}.Q4_1.gguf"
    options = {"max_seq_len": 512, "dtype": "float32", "kv_dtype": "float32"}
    kept = build_engine(real_model(name), tmp_path / "kept", BuildConfig(compute="float32", **options))
    assert kept.estimate.weight_bytes < 110e6
    build_engine(real_model(name), tmp_path / "floats", BuildConfig(dequantize=True, **options))
    texts = []
    for engine in ("kept", "floats"):
        llm = LLM(tmp_path / engine)
        texts.append(llm.generate(["The capital of France is"], SamplingParams(max_tokens=24, temperature=0))[0].text)
    assert texts[0] == texts[1]
