"""Scores of prompts with a large vocabulary, in pieces."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import engines
import numpy as np

from llmc import LLM, SamplingParams
from llmc.runtime.kv_budget import MAX_LOGIT_BYTES

VOCABULARY = 150_000


def test_lif_06_scores_take_bounded_memory(tmp_path: Path) -> None:
    """Logits of a step take 64 MiB at most, however long the prompt is."""
    config = engines.small_llama(vocab_size=VOCABULARY, hidden_size=12, intermediate_size=16, num_hidden_layers=1)
    _, path = engines.build(config, tmp_path, dtype="bfloat16", max_seq_len=512)
    llm = LLM(path, threads=1)
    step, rows = llm.executor.step, []

    def watched(batch: Any) -> Any:
        rows.append(len(batch.logit_rows))
        return step(batch)

    llm.executor.step = watched  # type: ignore[method-assign]
    prompt = np.random.default_rng(0).integers(3, VOCABULARY, 230).tolist()
    (result,) = llm.generate([prompt], SamplingParams(max_tokens=1, prompt_logprobs=20))
    assert len(rows) > 2
    assert max(rows) * VOCABULARY * 4 <= MAX_LOGIT_BYTES == 64 << 20
    assert result.prompt_logprobs is not None
    assert [entry and len(entry.top) for entry in result.prompt_logprobs] == [None] + [20] * 229
