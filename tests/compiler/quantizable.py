"""Lowered graphs of small random models, and runs of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from configs import CONFIGS
from more_configs import MORE
from numpy.typing import NDArray
from packed import random_model

from llmc.compiler.api import Compiled, compile_model, open_checkpoint
from llmc.compiler.config import BuildConfig
from llmc.compiler.lower import LoweredGraph
from llmc.compiler.progress import Progress
from llmc.compiler.quantize.activations import Activations
from llmc.compiler.quantize.apply import Loader
from llmc.compiler.quantize.interpreter import Interpreter, make_chunks, view_of
from llmc.compiler.quantize.work import Work


def save_model(name: str, folder: Path) -> Path:
    """A random model of the coverage list."""
    config = (CONFIGS | MORE)[name]
    random_model(config.make(), config.reference).save_pretrained(folder)
    return folder


def compiled(model: Path, **options: object) -> Compiled:
    config = BuildConfig(**({"max_seq_len": 64} | options))  # type: ignore[arg-type]
    return compile_model(open_checkpoint(model, config, Progress()), config, Progress())


def samples(count: int, length: int, vocabulary: int = 128, seed: int = 0) -> list[NDArray[np.int32]]:
    random = np.random.default_rng(seed)
    return [random.integers(3, vocabulary, length, dtype=np.int32) for _ in range(count)]


def interpret(
    graph: LoweredGraph,
    dtype: str,
    folder: Path,
    cuts: list[int],
    *,
    tokens: list[NDArray[np.int32]],
    limit: int = 1 << 30,
    per_chunk: int = 24,
    threads: int = 1,
) -> list[NDArray[np.float32]]:
    """Logits of all rows, the steps run in stretches that end at ``cuts``."""
    chunks = make_chunks(tokens, per_chunk)
    loader = Loader(graph, {}, Work(folder), dtype)
    activations = Activations(folder, len(chunks), limit)
    interpreter = Interpreter(graph, chunks, loader, activations, threads)
    begin = 0
    for cut in [*cuts, len(graph.steps) - 1]:
        interpreter.run(begin, cut)
        begin = cut
    last = interpreter.steps[-1]
    assert last.outputs[0].buffer is graph.logits.buffer
    found = []
    loaded = interpreter._load([last])
    for number, batch in enumerate(chunks):
        memory = {b: activations.get(b.name, number) for b in interpreter._crossing(begin)}
        interpreter._run_step(last, memory, batch, loaded)
        found.append(view_of(graph.logits, memory, batch).copy())
    activations.clear()
    return found
