"""Every decoder of the list builds and runs natively: logits and greedy tokens of transformers, however rows are packed."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from llmc import LLM, SamplingParams
from llmc.compiler.api import build_engine
from llmc.compiler.config import BuildConfig
from llmc.runtime.batch import Batch
from llmc.runtime.devices.cpu import CpuExecutor
from llmc.runtime.engine import load_engine

sys.path.insert(0, str(Path(__file__).parent / "compiler"))
from configs import CONFIGS
from packed import MIXED, expected_logits, random_ids, random_model

BLOCK = 16
CHUNKED = ((("a", 7),), (("a", 16),), (("a", 5),), (("a", 1),))
DECODE = ((("b", 17),), (("b", 1),), (("b", 1),), (("b", 2),))
GREEDY = 32


class Packed:
    """Runs steps of (request, tokens) on an executor; each request owns blocks of its own."""

    def __init__(self, executor: Any, ids: dict[str, list[int]]) -> None:
        self.executor, self.ids = executor, ids
        self.done = dict.fromkeys(ids, 0)
        self.blocks = {name: np.arange(8, dtype=np.int32) * 2 + i for i, name in enumerate(ids)}

    def step(self, rows: Any) -> Iterator[tuple[str, np.ndarray]]:
        """Logits [n, V] of each request's rows."""
        counts = [n for _, n in rows]
        tokens = [t for name, n in rows for t in self.ids[name][self.done[name] : self.done[name] + n]]
        positions = [p for name, n in rows for p in range(self.done[name], self.done[name] + n)]
        batch = Batch(
            input_ids=np.array(tokens, np.int32),
            position_ids=np.array(positions, np.int32),
            logit_rows=np.arange(len(tokens), dtype=np.int32),
            cu_seqlens=np.cumsum([0, *counts]).astype(np.int32),
            num_computed=np.array([self.done[name] for name, _ in rows], np.int32),
            block_tables=np.stack([self.blocks[name] for name, _ in rows]),
        )
        logits = self.executor.step(batch).copy()
        for (name, n), part in zip(rows, np.split(logits, np.cumsum(counts)[:-1]), strict=True):
            self.done[name] += n
            yield name, part

    def run(self, steps: Any) -> dict[str, np.ndarray]:
        parts: dict[str, list[np.ndarray]] = {name: [] for name in self.ids}
        for rows in steps:
            for name, part in self.step(rows):
                parts[name].append(part)
        return {name: np.concatenate(p) for name, p in parts.items() if p}


def greedy(model: Any, prompt: list[int], new: int) -> list[int]:
    ids = list(prompt)
    for _ in range(new):
        ids.append(int(expected_logits(model, torch.tensor([ids]))[0, -1].argmax()))
    return ids[len(prompt) :]


@pytest.mark.parametrize("name", CONFIGS)
def test_runs_as_in_transformers(name: str, tmp_path: Path) -> None:
    entry = CONFIGS[name]
    config = entry.make()
    model = random_model(config, entry.reference)
    model.save_pretrained(tmp_path / "model")
    build_engine(tmp_path / "model", tmp_path / "engine", BuildConfig(max_seq_len=entry.max_len))
    ids = random_ids(config, a=29, b=21)
    expected = {key: expected_logits(model, x)[0].numpy() for key, x in ids.items()}
    engine = load_engine(tmp_path / "engine")
    tokens = {key: x[0].tolist() for key, x in ids.items()}
    for steps in ([[("a", 29)]], CHUNKED, DECODE, MIXED):
        packed = Packed(CpuExecutor(engine, num_blocks=32, threads=2), tokens)
        for key, logits in packed.run(steps).items():
            np.testing.assert_allclose(logits, expected[key][: len(logits)], rtol=0, atol=1e-4)
    llm = LLM(tmp_path / "engine", num_blocks=32, threads=2)
    results = llm.generate(list(tokens.values()), SamplingParams(max_tokens=GREEDY, ignore_eos=True))
    room = entry.max_len
    for result, prompt in zip(results, tokens.values(), strict=True):
        assert list(result.token_ids) == greedy(model, prompt, min(GREEDY, room - len(prompt)))
