"""Runs a built engine before it is published, and records what it says."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from llmc.runtime import selftest
from llmc.runtime.engine import Engine, load_engine
from llmc.runtime.selftest import Golden

TEXTS = (
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "In 1969, two people walked on the Moon. What they saw there",
)

OPERATIONS = 2e10
"""Multiplications and additions that recording may take, so that it stays short for large models."""

SHORTEST, LONGEST = 4, 16
"""Tokens of a prompt."""


def record_goldens(path: Path, parameters: int) -> list[Golden]:
    """Load the engine, run the prompts with the portable kernels, and return what came out.

    The portable kernels give the same bits on every machine, so the engine does not depend on where it was built.
    """
    from llmc.runtime.devices.cpu import CpuExecutor

    engine = load_engine(path)
    prompts = _prompts(engine, parameters)
    blocks = selftest.blocks_needed(prompts, engine.kv_cache.block_size)
    executor = CpuExecutor(engine, num_blocks=blocks, isa="scalar")
    return [selftest.record(executor, prompt, engine.kv_cache.block_size) for prompt in prompts]


def _prompts(engine: Engine, parameters: int) -> list[Sequence[int]]:
    budget = int(OPERATIONS / (2 * max(1, parameters)))
    length = max(SHORTEST, min(LONGEST, budget // len(TEXTS) - selftest.CONTINUATION))
    count = len(TEXTS) if budget >= len(TEXTS) * (SHORTEST + selftest.CONTINUATION) else 1
    prompts = [_encode(engine, text, number)[:length] for number, text in enumerate(TEXTS[:count])]
    room = max(1, min(engine.limits.max_seq_len - selftest.CONTINUATION, engine.limits.max_batch_tokens))
    return [prompt[:room] for prompt in prompts]


def _encode(engine: Engine, text: str, number: int) -> list[int]:
    """Token ids of a text; without a tokenizer, ids spread over the vocabulary."""
    size = engine.model.vocab_size
    ids: list[int] = []
    if engine.read("tokenizer/tokenizer.json") is not None:
        from tokenizers import Tokenizer

        ids = Tokenizer.from_str(engine.tokenizer_json).encode(text).ids
    if not ids or max(ids) >= size:
        ids = [(7919 * (i + 1) + 104729 * number) % size for i in range(LONGEST)]
    return ids
