"""Embeddings are the last hidden state of transformers, with the same bits whatever else runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import engines
import numpy as np
import pytest
import torch

from llmc import LLM, SamplingParams

PROMPTS = [np.random.default_rng(i).integers(3, 131, n).tolist() for i, n in enumerate([1, 16, 37, 90])]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    return engines.build(engines.small_llama(), tmp_path_factory.mktemp("embedding"), dtype="float32")


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_as_transformers(built: tuple[Any, Path], pooling: str) -> None:
    model, engine = built
    llm = LLM(engine, threads=1, check=True)
    for prompt, found in zip(PROMPTS, llm.embed(PROMPTS, pooling), strict=True):
        with torch.no_grad():
            states = model.model(torch.tensor([prompt])).last_hidden_state[0].double().numpy()
        expected = states[-1] if pooling == "last" else states.mean(0)
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_the_same_bits_beside_generation_and_in_chunks(built: tuple[Any, Path], pooling: str) -> None:
    _, engine = built
    alone = LLM(engine, threads=1, prefix_cache=False)
    expected = [alone.embed([prompt], pooling)[0] for prompt in PROMPTS]
    params = SamplingParams(max_tokens=40, ignore_eos=True, logprobs=1)
    (text,) = alone.generate([PROMPTS[2]], params)
    for sizes in ({}, {"max_batch_tokens": 7, "max_sequences": 4}, {"num_blocks": 9}):
        llm = LLM(engine, threads=2, check=True, **sizes)
        for _ in range(2):  # the second time from the prefix cache
            beside = llm.request(llm.add_request(PROMPTS[2], params))
            found = llm.embed(PROMPTS, pooling)
            while llm.has_unfinished:
                llm.step()
            np.testing.assert_array_equal(found, expected)
            assert tuple(beside.sequences[0].logprobs) == text.logprobs
