"""`llmc medusa train`: an engine of the model writes texts, heads learn from them, and are published."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

import llmc
from llmc.compiler import facts
from llmc.compiler.api import build_engine
from llmc.compiler.checkpoint import Checkpoint
from llmc.compiler.config import BuildConfig
from llmc.compiler.evaluation.texts import read_prompts
from llmc.compiler.medusa.collect import (
    AT_ONCE,
    KEPT,
    Features,
    make_prompts,
    read_pieces,
    write_pieces,
    write_whole,
)
from llmc.compiler.medusa.heads import write_heads
from llmc.compiler.medusa.output_layer import OutputLayer, embeddings, output_layer
from llmc.compiler.medusa.settings import STATE, HeadTraining
from llmc.compiler.progress import Progress
from llmc.compiler.staging import disk_errors, stage
from llmc.errors import UsageError
from llmc.runtime import manifest, resources
from llmc.runtime.batch import EmbeddingExecutor
from llmc.runtime.llm import LLM

if TYPE_CHECKING:
    from llmc.compiler.medusa.train import Trained

KEY, SPENT = "key.json", "spent.json"
TEXT_SHARE = 0.6
"""The part of the minutes that writing texts may take."""


@dataclass(frozen=True)
class TrainResult:
    """What was trained. ``accuracy``: of each head on held-out texts, {"top1": ..., "top5": ...}."""

    path: Path
    texts: int
    tokens: int
    steps: int
    loss: float
    accuracy: list[dict[str, float]]


def train_medusa(
    model: Path | str,
    heads: Path | str,
    settings: HeadTraining | None = None,
    *,
    work: Path | None = None,
    threads: int | None = None,
    allow_hard_links: bool = False,
    progress: Progress | None = None,
) -> TrainResult:
    """Train heads for a model, and publish them as a directory in the layout of Hugging Face.

    Args:
        model: a Hugging Face model directory, or a GGUF file.
        heads: the directory to make.
        settings: options.
        work: a folder for the engine, texts and the state of the training, which stays; None: one beside ``heads``
            that is removed at the end. What is in it already is used if it is of the same model and settings.
        threads: default: the physical cores that this process may use. The number may change the last bits.
        allow_hard_links: accept model files that have a second name elsewhere.
        progress: told what is being done.

    Raises:
        LlmcError: by its kind; what was made so far stays in the work folder, and the next run goes on with it.
    """
    settings, progress, target = settings or HeadTraining(), progress or Progress(), Path(heads)
    with stage(target) as staging:
        folder = target.with_name(f".{target.name}.llmc-train") if work is None else work
        _open_work(folder, _keys(Path(model), settings, allow_hard_links, progress), progress)
        clock = _Clock(folder, settings.minutes)
        given = _collect(model, settings, folder, clock, threads, allow_hard_links, progress)
        features = read_pieces(folder)
        trained = _train(features, *given, settings, folder, clock, threads, progress)
        blocks = [list(zip(w, b, strict=True)) for w, b in zip(trained.weight, trained.bias, strict=True)]
        seen = () if trained.token is None else list(trained.token)
        write_heads(staging, blocks, Path(os.path.realpath(model)).name, features.tokens, seen)
    if work is None:
        shutil.rmtree(folder)
    return TrainResult(
        target, int(features.texts[-1]) + 1, len(features.tokens), trained.steps, trained.loss, trained.accuracy
    )


def _collect(
    model: Path | str,
    settings: HeadTraining,
    folder: Path,
    clock: _Clock,
    threads: int | None,
    allow_hard_links: bool,
    progress: Progress,
) -> tuple[OutputLayer, NDArray[np.float32] | None]:
    """Make texts and features; returns the parts of the model that heads are trained with."""
    engine = folder / "engine"
    if not (engine / manifest.NAME).exists():
        config = BuildConfig(
            quantization=settings.quantization,
            max_seq_len=settings.length,
            max_sequences=AT_ONCE,
            allow_hard_links=allow_hard_links,
        )
        build_engine(model, engine, config, progress=progress)
    llm = LLM(engine, threads=threads, prefix_cache=False)  # its cache is used for features besides
    try:
        if not isinstance(llm.executor, EmbeddingExecutor):
            raise UsageError("LLMC_REFERENCE=1 gives no features to train heads on; leave it away")
        prompts = make_prompts(settings, llm, folder, progress)
        write_pieces(llm, prompts, settings, folder, lambda: clock.share < TEXT_SHARE, clock.save, progress)
        assert llm.engine is not None, "it was loaded"
        return output_layer(llm.engine), embeddings(llm.engine) if settings.token else None
    finally:
        llm.close()


def _train(
    features: Features,
    output: OutputLayer,
    table: NDArray[np.float32] | None,
    settings: HeadTraining,
    folder: Path,
    clock: _Clock,
    threads: int | None,
    progress: Progress,
) -> Trained:
    """Train on them, in the time that is left."""
    import torch

    from llmc.compiler.medusa.train import train_heads

    torch.set_num_threads(threads or resources.physical_cores())
    begin = min(clock.share, TEXT_SHARE)

    def share_of_time() -> float:
        return max(0.0, clock.share - begin) / (1 - begin)

    return train_heads(features, output, table, settings, folder, share_of_time, clock.save, progress)


class _Clock:
    """The time that was spent on this work, by earlier runs too."""

    def __init__(self, folder: Path, minutes: float | None) -> None:
        self._path, self._minutes = folder / SPENT, minutes
        before = json.loads(self._path.read_text()) if self._path.exists() else 0.0
        self._start = time.monotonic() - before

    @property
    def share(self) -> float:
        """Of the minutes, 1 at their end; 0 if there is no limit."""
        return 0.0 if self._minutes is None else (time.monotonic() - self._start) / (60 * self._minutes)

    def save(self) -> None:
        """Keep it."""
        write_whole(self._path, lambda file: file.write(json.dumps(time.monotonic() - self._start).encode()))


def _keys(model: Path, settings: HeadTraining, allow_hard_links: bool, progress: Progress) -> dict[str, Any]:
    """What the texts and the training depend on."""
    progress.step("reading the model")
    checkpoint = Checkpoint.open(model, allow_hard_links=allow_hard_links)
    checkpoint.tokenizer()
    with facts.InputHashes(checkpoint) as inputs:
        hashes = inputs.result()
    prompts = read_prompts(settings.prompts)
    texts = settings.of_texts | {
        "model": hashes,
        "prompts": "ours and those of the model" if prompts is None else prompts.sha256,
        "versions": facts.versions(),
        "llmc": llmc.__version__,
    }
    return {"texts": _digest(texts), "training": _digest(texts | settings.of_training)}


def _digest(value: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _open_work(folder: Path, keys: Mapping[str, Any], progress: Progress) -> None:
    """Make the folder, or remove what of it is of other settings.

    Raises:
        UsageError: the folder holds something else.
    """
    key = folder / KEY
    with disk_errors(folder, KEPT):
        if folder.exists() and any(folder.iterdir()) and not key.exists():
            raise UsageError(
                f"{folder}: holds something else than the work of `llmc medusa train`; choose another name"
            )
        folder.mkdir(parents=True, exist_ok=True)
        found = json.loads(key.read_text()) if key.exists() else keys
        if found["texts"] != keys["texts"]:
            progress.note(f"{folder}: is of another model, other prompts or settings, and is made anew")
            for path in folder.iterdir():
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        elif found["training"] != keys["training"]:
            (folder / STATE).unlink(missing_ok=True)
    write_whole(key, lambda file: file.write(json.dumps(keys).encode()))
