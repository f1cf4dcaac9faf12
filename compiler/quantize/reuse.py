"""Takes over what an earlier engine has quantized in the same way: the codes, and the floats with folded factors."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmc.compiler.progress import Progress
from llmc.compiler.quantize.coverage import BASE_KEYS, CODES, SCALE, X_SCALE, ZERO
from llmc.compiler.quantize.decisions import Planned
from llmc.compiler.quantize.sites import DOWN, Site
from llmc.compiler.quantize.spend import Choices, free_layers
from llmc.compiler.quantize.work import FOLDED, FOUND, SENSITIVITY, TRIES, Work
from llmc.errors import EngineError
from llmc.runtime.engine import Engine, Weight, load_engine
from llmc.runtime.lora import Linear, read_linears


def take_over(work: Work, planned: Planned, digest: str, engines: Sequence[Path], progress: Progress) -> bool:
    """Fill the work folder from the first of these engines that has the same key; whether there is one.

    Args:
        work: the folder; what it has already stays.
        planned: what is to be quantized.
        digest: the key.
        engines: directories, which need not hold engines.
        progress: told what is taken, and why not.
    """
    for path in engines:
        try:
            engine = load_engine(path)
            linears = read_linears(engine)
        except EngineError as problem:
            progress.note(f"nothing is taken over from {path}: {problem}")
            continue
        recipe, report = (json.loads(engine.read(name) or b"{}") for name in ("recipe.json", "report.json"))
        if recipe.get("quantization", {}).get("key") != digest:
            progress.note(f"nothing is taken over from {path}: its weights were quantized with other inputs or options")
            continue
        progress.note(f"taking over the quantized weights of {path}")
        section = report["quantization"]
        if planned.has_goal:
            planned = _take_choice(work, planned, section["goal"])
        _copy(work, planned, engine, linears, section["weights"])
        return True
    return False


def _take_choice(work: Work, planned: Planned, goal: Mapping[str, Any]) -> Planned:
    """What was measured for a choice of formats, and the choice."""
    layers = {name: {key: layer[key] for key in ("kl", "errors")} for name, layer in goal["layers"].items()}
    facts = {SENSITIVITY: {"layers": layers}, TRIES: {"tries": goal["tries"]}, FOUND: goal["held_out"]}
    for name, known in facts.items():
        if work.find(name) is None:
            with work.record(name, dict(known)):
                pass
    choices = Choices(planned.graph, planned, free_layers(planned))
    return choices.decided({name: layer["chosen"] for name, layer in goal["layers"].items()})


def _copy(
    work: Work, planned: Planned, engine: Engine, linears: Mapping[str, Linear], entries: Sequence[Mapping[str, Any]]
) -> None:
    by_tensor = {entry["tensor"]: entry for entry in entries if "tensor" in entry}
    for site in planned.chosen:
        entry = by_tensor[site.name]
        facts = {key: value for key, value in entry.items() if key not in BASE_KEYS}
        if work.find(site.name) is None:
            with work.record(site.name, facts) as writer:
                for suffix in (CODES, SCALE, ZERO, X_SCALE):
                    weight = engine.weights.get(site.name + suffix)
                    if weight is not None:
                        writer.tensor(suffix, weight.dtype, weight.shape, _pieces(weight))
        name = f"scale of {site.name}"
        if work.find(name) is None:
            scale = _factors(site, linears) if str(entry.get("scaled", "")).startswith("into") else None
            with work.record(name, {}) as writer:
                if scale is not None:
                    writer.tensor("", "float32", scale.shape, iter([scale]))
    for entry in entries:
        tensor = entry.get("tensor", entry["name"])
        if "kept" in entry and "scaled" in entry and work.find(FOLDED + tensor) is None:
            weight = engine.weights[tensor]
            with work.record(FOLDED + tensor, {}) as writer:
                writer.tensor("", weight.dtype, weight.shape, _pieces(weight))


def _factors(site: Site, linears: Mapping[str, Linear]) -> NDArray[np.float32]:
    """What the weight was scaled by. Of experts, which take no adapters, only that they were is known, and needed."""
    if site.name in linears and linears[site.name].columns:
        return np.array(linears[site.name].columns, np.float32)
    is_down = site.product is not None and site.product[1] == DOWN
    lead = (site.experts,) if site.experts is not None and is_down else ()
    return np.ones((*lead, site.columns), np.float32)


def _pieces(weight: Weight) -> Iterator[NDArray[np.uint8]]:
    for start in range(0, len(weight.data), 1 << 24):
        yield weight.data[start : start + (1 << 24)]
