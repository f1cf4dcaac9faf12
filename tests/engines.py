"""Builds engines of small random models, and runs packed steps on their executors."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from packed import expected_logits, random_model
from transformers import LlamaConfig

from llmc.compiler.api import build_engine
from llmc.compiler.config import BuildConfig
from llmc.runtime.batch import Batch

BLOCK = 16
Rows = Sequence[tuple[str, int]]
"""(request, tokens) of one step."""


def small_llama(**changes: Any) -> LlamaConfig:
    """Two layers, grouped queries, and widths that no vector divides."""
    values = {
        "vocab_size": 131,
        "hidden_size": 60,
        "intermediate_size": 172,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "tie_word_embeddings": False,
    }
    return LlamaConfig(**(values | changes))


def build(config: Any, folder: Path, reference: str = "eager", **options: Any) -> tuple[Any, Path]:
    """A random model of the config, saved to FOLDER/model, and its engine in FOLDER/engine: (model, engine)."""
    model = random_model(config, reference)
    model.save_pretrained(folder / "model")
    build_engine(folder / "model", folder / "engine", BuildConfig(**options))
    return model, folder / "engine"


class Packed:
    """Runs steps on an executor; each request owns blocks of its own, interleaved with those of the others."""

    def __init__(self, executor: Any, ids: dict[str, list[int]], blocks: int = 8) -> None:
        self.executor, self.ids = executor, ids
        self.done = dict.fromkeys(ids, 0)
        self.blocks = {name: np.arange(blocks, dtype=np.int32) * len(ids) + i for i, name in enumerate(ids)}

    def batch(self, rows: Rows) -> Batch:
        """That of a step, with logits of all rows."""
        counts = [n for _, n in rows]
        tokens = [t for name, n in rows for t in self.ids[name][self.done[name] : self.done[name] + n]]
        positions = [p for name, n in rows for p in range(self.done[name], self.done[name] + n)]
        return Batch(
            input_ids=np.array(tokens, np.int32),
            position_ids=np.array(positions, np.int32),
            logit_rows=np.arange(len(tokens), dtype=np.int32),
            cu_seqlens=np.cumsum([0, *counts]).astype(np.int32),
            num_computed=np.array([self.done[name] for name, _ in rows], np.int32),
            block_tables=np.stack([self.blocks[name] for name, _ in rows]),
        )

    def step(self, rows: Rows) -> Iterator[tuple[str, NDArray[np.float32]]]:
        """Logits [n, V] of each request's rows."""
        logits = self.executor.step(self.batch(rows)).copy()
        for (name, n), part in zip(rows, np.split(logits, np.cumsum([n for _, n in rows])[:-1]), strict=True):
            self.done[name] += n
            yield name, part

    def run(self, steps: Sequence[Rows]) -> dict[str, NDArray[np.float32]]:
        """Logits of each request over all steps."""
        parts: dict[str, list[NDArray[np.float32]]] = {name: [] for name in self.ids}
        for rows in steps:
            for name, part in self.step(rows):
                parts[name].append(part)
        return {name: np.concatenate(p) for name, p in parts.items() if p}


def is_greedy(model: Any, prompt: list[int], generated: Sequence[int]) -> bool:
    """Whether transformers too takes each of these tokens for the most likely one: one forward pass over all."""
    return is_nearly_greedy(model, prompt, generated, 0.0)


def is_nearly_greedy(model: Any, prompt: list[int], generated: Sequence[int], margin: float) -> bool:
    """The same; a token may be behind by ``margin`` standard deviations, as another rounding may choose it then."""
    logits = expected_logits(model, torch.tensor([[*prompt, *generated]]))[0, len(prompt) - 1 : -1]
    chosen = logits[torch.arange(len(generated)), torch.tensor(list(generated))]
    return bool((logits.amax(-1) - chosen <= margin * logits.std()).all())
