"""Golden prompts: recorded when an engine is built, and replayed to prove that it still computes the same.

selftest.safetensors holds for each prompt i ``prompt.i`` and ``continuation.i`` (int32 token ids) and ``logits.i``
(float32, for the last token of the prompt), made with the portable kernels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmc.runtime.batch import Batch, Executor

NAME = "selftest.safetensors"


@dataclass(frozen=True)
class Golden:
    """A prompt, the logits after it, and its greedy continuation."""

    prompt: tuple[int, ...]
    logits: NDArray[np.float32]
    continuation: tuple[int, ...]


def record(executor: Executor, prompt: Sequence[int], block_size: int, steps: int) -> Golden:
    """Run a prompt in one step and continue it by ``steps`` tokens, greedily. Uses the first blocks of the cache."""
    total = len(prompt) + steps
    blocks = np.arange(-(-total // block_size), dtype=np.int32)[None]
    logits = np.array(executor.step(_batch(prompt, 0, blocks))[0], np.float32)
    token = int(logits.argmax())
    continuation = [token]
    for position in range(len(prompt), total - 1):
        token = int(executor.step(_batch([token], position, blocks))[0].argmax())
        continuation.append(token)
    return Golden(tuple(prompt), logits, tuple(continuation))


def blocks_needed(prompts: Sequence[Sequence[int]], block_size: int, steps: int) -> int:
    """Blocks of KV cache that ``record`` needs."""
    return max(-(-(len(prompt) + steps) // block_size) for prompt in prompts)


def _batch(tokens: Sequence[int], position: int, blocks: NDArray[np.int32]) -> Batch:
    count = len(tokens)
    return Batch(
        input_ids=np.array(tokens, np.int32),
        position_ids=np.arange(position, position + count, dtype=np.int32),
        logit_rows=np.array([count - 1], np.int32),
        cu_seqlens=np.array([0, count], np.int32),
        num_computed=np.array([position], np.int32),
        block_tables=blocks,
    )


def to_arrays(goldens: Sequence[Golden]) -> dict[str, NDArray[Any]]:
    """The tensors of the file."""
    arrays: dict[str, NDArray[Any]] = {}
    for i, golden in enumerate(goldens):
        arrays[f"prompt.{i}"] = np.array(golden.prompt, np.int32)
        arrays[f"continuation.{i}"] = np.array(golden.continuation, np.int32)
        arrays[f"logits.{i}"] = golden.logits
    return arrays


def from_arrays(arrays: Mapping[str, NDArray[Any]]) -> list[Golden]:
    """The reverse; prompts in order."""
    return [
        Golden(
            tuple(arrays[f"prompt.{i}"].tolist()), arrays[f"logits.{i}"], tuple(arrays[f"continuation.{i}"].tolist())
        )
        for i in range(len(arrays) // 3)
    ]
