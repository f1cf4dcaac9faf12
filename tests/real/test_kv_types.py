"""What a smaller KV cache costs a real model: perplexity against the cache in bfloat16."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest

from llmc import LLM, SamplingParams
from llmc.compiler.api import build_engine
from llmc.compiler.config import BuildConfig
from llmc.plugins.paged_attention.storage import bytes_per_position

pytestmark = pytest.mark.real_model

MODEL, WINDOW, WINDOWS = "SmolLM2-135M-Instruct-bfloat16", 512, 8
PERPLEXITY = 30.6467
"""Of transformers in float32 on these windows."""
LARGEST_RISE = {"int8": 0.001, "fp8": 0.005, "int4": 0.02}
"""Of the perplexity."""

KV_HEADS, LAYERS, DIM = 3, 30, 64


def perplexity(path: Path, text: str) -> float:
    """Of the first windows, each alone."""
    llm = LLM(path)
    assert llm.tokenizer is not None
    ids = llm.tokenizer.encode(text)
    windows = [ids[start : start + WINDOW] for start in range(0, WINDOWS * WINDOW, WINDOW)]
    results = llm.generate(windows, SamplingParams(max_tokens=0, prompt_logprobs=0))
    scores = [entry.logprob for r in results for entry in (r.prompt_logprobs or ()) if entry is not None]
    assert len(scores) == WINDOWS * (WINDOW - 1)
    return math.exp(-sum(scores) / len(scores))


@pytest.fixture(scope="module")
def measured(shared: Path, real_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> dict:  # type: ignore[type-arg]
    """Perplexity by type of the cache; each engine is also asked how large its cache is."""
    from llmc.runtime.engine import load_engine

    with (shared / "data/wikitext2_test.txt").open(encoding="utf-8", newline="") as file:
        text = file.read()
    found = {}
    for dtype in ("bfloat16", *LARGEST_RISE):
        path = tmp_path_factory.mktemp("engines") / dtype
        build_engine(real_model(MODEL), path, BuildConfig(kv_dtype=dtype, max_seq_len=2048))
        engine = load_engine(path)
        stored = bytes_per_position(engine.kv_cache.dtype, DIM, DIM)
        assert engine.kv_bytes_per_token == LAYERS * KV_HEADS * stored
        found[dtype] = perplexity(path, text)
        print(f"KV {dtype}: perplexity {found[dtype]:.4f} ({found[dtype] / found['bfloat16'] - 1:+.3%})")
    return found


@pytest.mark.parametrize("dtype", LARGEST_RISE)
def test_perplexity_stays(measured: dict[str, float], dtype: str) -> None:
    assert measured["bfloat16"] == pytest.approx(PERPLEXITY, abs=0.01)
    assert measured[dtype] <= measured["bfloat16"] * (1 + LARGEST_RISE[dtype])
