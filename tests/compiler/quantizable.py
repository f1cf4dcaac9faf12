"""Lowered graphs of small random models, and runs of them."""

from __future__ import annotations

import json
import mmap
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from configs import CONFIGS
from more_configs import MORE
from numpy.typing import NDArray
from packed import random_model

from llmc.compiler import api
from llmc.compiler.api import Compiled, compile_model, open_checkpoint
from llmc.compiler.config import BuildConfig
from llmc.compiler.lower import LoweredGraph, LoweredModel, plan_steps
from llmc.compiler.progress import Progress
from llmc.compiler.quantize.activations import Activations
from llmc.compiler.quantize.build import predicted
from llmc.compiler.quantize.decisions import plan
from llmc.compiler.quantize.interpreter import Interpreter, make_chunks
from llmc.compiler.quantize.loader import Loader
from llmc.compiler.quantize.work import Work
from llmc.compiler.safetensors_writer import Tensor
from llmc.runtime import manifest
from llmc.runtime.devices.cpu import CpuExecutor
from llmc.runtime.engine import Engine, Weight
from llmc.runtime.manifest import KvCacheSpec, Manifest, ModelFacts


class Notes(Progress):
    """Keeps what a build notes."""

    def __init__(self) -> None:
        super().__init__()
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


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
    for cut in cuts:
        interpreter.run(begin, cut)
        begin = cut
    return [found.copy() for found in interpreter.logits(begin)]


def token_file(path: Path, count: int = 8, length: int = 64, vocabulary: int = 128) -> Path:
    """Calibration as token ids, for models without a tokenizer."""
    rows = [json.dumps({"tokens": ids.tolist()}) for ids in samples(count, length, vocabulary, seed=5)]
    path.write_text("\n".join(rows) + "\n")
    return path


def quantize(model: Compiled, quant: str, folder: Path, **options: object) -> tuple[LoweredModel, dict[str, Any]]:
    """The plan and weights (in memory) of a compiled model once it is quantized, and the section of the report."""
    given = {"quantization": quant, "calib": str(token_file(folder / "calib.jsonl")), "calib_length": 32} | options
    config = BuildConfig(max_seq_len=64, **given)  # type: ignore[arg-type]
    recipe = config.quantization_recipe
    assert recipe is not None
    parameters = {name: model.checkpoint.weight(name) for name in model.checkpoint.names}
    planned = plan(model.steps, parameters, recipe, config.compute)
    predicted_model = plan_steps(predicted(planned), model.target, model.limits)
    model = replace(model, planned=planned, lowered=predicted_model)
    with api._quantized(model, config, None, folder / "engine", {}, Progress()) as (made, result, _):
        assert result is not None
        report = result.report(made.lowered, made.steps)
        if not planned.has_goal:
            check_prediction(predicted_model, made.lowered)
        weights = {name: InMemory(tensor) for name, tensor in made.lowered.weights.items()}
        return LoweredModel(made.lowered.plan, weights), report


def check_prediction(expected: LoweredModel, found: LoweredModel) -> None:
    """A dry run tells the sizes of the engine that comes out, but for scales beyond float16 and for folded norms."""
    sizes = [sum(t.nbytes for t in m.weights.values() if t.dtype == "uint8") for m in (expected, found)]
    assert sizes[0] == sizes[1]


class InMemory:
    """A tensor to be written, read into memory while its source is there."""

    def __init__(self, tensor: Tensor) -> None:
        self.name, self.dtype, self.shape, self.nbytes = tensor.name, tensor.dtype, tensor.shape, tensor.nbytes
        self._chunks = [np.array(chunk) for chunk in tensor.chunks()]

    def chunks(self) -> Iterator[NDArray[Any]]:
        return iter(self._chunks)


def engine_of(lowered: LoweredModel, dtype: str, kv_dtype: str = "float32") -> Engine:
    """An engine in memory."""
    vocabulary = lowered.plan.value(lowered.plan.logits).shape[1].constant
    facts = ModelFacts("Test", "test", 0, dtype, vocabulary, None, (), None, None, False, False)
    made = Manifest(1, "0", "cpu", manifest.Limits(64, 64, 4), facts, KvCacheSpec(kv_dtype, 16), {}, "")
    weights = {}
    for name, tensor in lowered.weights.items():
        data = np.concatenate([np.ascontiguousarray(c).reshape(-1).view(np.uint8) for c in tensor.chunks()])
        memory = np.empty(len(data) + 64, np.uint8)
        start = -memory.ctypes.data % 64
        memory[start : start + len(data)] = data
        weights[name] = Weight(name, tensor.dtype, tensor.shape, memory[start : start + len(data)])
    return Engine(Path("test"), made, lowered.plan, weights, "", {}, mmap.mmap(-1, 64))


def logits(
    lowered: LoweredModel, ids: NDArray[np.int32], dtype: str = "float32", kv_dtype: str = "float32", **options: Any
) -> NDArray[np.float32]:
    """Of all rows of one sequence."""
    executor = CpuExecutor(engine_of(lowered, dtype, kv_dtype), num_blocks=8, **({"threads": 1} | options))
    return executor.step(make_chunks([ids])[0]).copy()


def distance(found: NDArray[np.float32], wanted: NDArray[np.float32]) -> float:
    """Relative, in the Frobenius norm."""
    return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))
