"""The perplexity of a quantized graph and of its model, on text that calibration has not seen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmc.compiler.evaluation.scores import score
from llmc.compiler.lower import LoweredGraph
from llmc.compiler.quantize.activations import Activations
from llmc.compiler.quantize.interpreter import Interpreter, make_chunks
from llmc.compiler.quantize.loader import Stored
from llmc.compiler.quantize.work import Work
from llmc.errors import UsageError
from llmc.runtime.batch import Batch

SHARE, MOST = 8, 16
"""One window of so many is held out, and at most so many of them."""

LOGIT_BYTES = 128 << 20
"""Logits of a window are looked at in so much memory: of large vocabularies not at each of its tokens."""


def hold_out(tokens: NDArray[np.int32]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Windows [samples, length] for calibration, and others to measure on.

    Raises:
        UsageError: there are too few.
    """
    if len(tokens) < 2:
        raise UsageError(
            "--budget, --max-ppl-increase: one piece of the calibration text is held out to measure on, so there must "
            "be 2 at least; give a longer text, or a smaller --calib-length"
        )
    count = min(MOST, max(1, len(tokens) // SHARE))
    held = (2 * np.arange(count) + 1) * len(tokens) // (2 * count)
    kept = np.ones(len(tokens), bool)
    kept[held] = False
    return tokens[kept], tokens[~kept]


def perplexity(
    graph: LoweredGraph,
    tokens: NDArray[np.int32],
    work: Work,
    threads: int,
    advance: Callable[[int], None],
) -> dict[str, Any]:
    """Its logarithm ("nll", the mean over the "tokens" that were scored), with keys and values in float32.

    Args:
        graph: with weights as the engine stores them.
        tokens: [windows, length].
        work: its folder takes activations that are too large for memory.
        threads: they change no bit.
        advance: told the steps that are done.
    """
    vocabulary = graph.logits.shape[-1].constant
    step = max(1, -(-4 * vocabulary * tokens.shape[1] // LOGIT_BYTES))
    rows = np.arange(0, tokens.shape[1] - 1, step, dtype=np.int32)
    chunks = [_with_rows(make_chunks([window])[0], rows) for window in tokens]
    interpreter = Interpreter(graph, chunks, Stored(graph), Activations(work.path, len(chunks)), threads)
    last = len(interpreter.steps) - 1
    for begin, end in interpreter.stretches(0, last):
        interpreter.run(begin, end)
        advance(end - begin)
    found = [
        score(logits.reshape(len(rows), -1), window[rows + 1].astype(np.int64)).nll
        for logits, window in zip(interpreter.logits(last), tokens, strict=True)
    ]
    scored = np.concatenate(found)
    return {"nll": float(f"{scored.mean():.10g}"), "tokens": len(scored)}


def _with_rows(batch: Batch, rows: NDArray[np.int32]) -> Batch:
    return replace(batch, logit_rows=rows)
