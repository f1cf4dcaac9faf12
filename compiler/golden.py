"""Runs a built engine before it is published, and records what it says."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from llmc.errors import CompileError
from llmc.runtime import selftest
from llmc.runtime.engine import Engine, load_engine
from llmc.runtime.selftest import Golden

TEXTS = (
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "In 1969, two people walked on the Moon. What they saw there",
)

OPERATIONS = 6e9
"""Multiplications and additions that recording may take if possible, so that it stays short for large models."""

LONGEST, SHORTEST = 12, 2
"""Tokens of a prompt."""

CONTINUATION = 4
"""Tokens that are generated after a prompt, less for large models."""

RELEASE_SECONDS = 0.02


def record_goldens(path: Path, parameters: int) -> list[Golden]:
    """Load the engine, run prompts with the portable kernels, and return what came out.

    The portable kernels give the same bits on every machine, so the engine does not depend on where it was built.

    Raises:
        CompileError: logits are NaN.
    """
    from llmc.runtime.devices.cpu import CpuExecutor

    engine = load_engine(path)
    prompts, steps = _prompts(engine, int(OPERATIONS / (2 * max(1, parameters))))
    size = engine.kv_cache.block_size
    executor = CpuExecutor(engine, num_blocks=selftest.blocks_needed(prompts, size, steps), isa="scalar")
    with _little_memory(engine):
        goldens = [selftest.record(executor, prompt, size, steps) for prompt in prompts]
    if any(np.isnan(golden.logits).any() for golden in goldens):
        raise CompileError("the engine's logits are NaN; weights of the checkpoint are far too large")
    return goldens


@contextmanager
def _little_memory(engine: Engine) -> Iterator[None]:
    """Weights that were read count as memory of this process until they are released."""
    done = threading.Event()

    def release() -> None:
        while not done.wait(RELEASE_SECONDS):
            engine.release_pages()

    thread = threading.Thread(target=release)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _prompts(engine: Engine, tokens: int) -> tuple[list[Sequence[int]], int]:
    """Prompts and the length of their continuations, of about so many tokens in all."""
    count = len(TEXTS) if tokens >= len(TEXTS) * 2 * CONTINUATION else 1
    steps = min(CONTINUATION, max(1, tokens // (2 * count)))
    length = max(SHORTEST, min(LONGEST, tokens // count - steps))
    room = max(1, min(engine.limits.max_seq_len - steps, engine.limits.max_batch_tokens))
    return [_encode(engine, text, number)[: min(length, room)] for number, text in enumerate(TEXTS[:count])], steps


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
