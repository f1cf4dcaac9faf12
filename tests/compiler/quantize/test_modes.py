"""Each way to round inputs as well as weights, through the command line: the plan and the report say what was done."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from checkpoints import llama_arrays, write_model
from engines import Packed
from quantizable import distance, token_file

from llmc.__main__ import main
from llmc.runtime.devices.cpu import CpuExecutor
from llmc.runtime.engine import load_engine

SIZES = {"hidden_size": 160, "intermediate_size": 96, "head_dim": 40, "num_hidden_layers": 1}

MODES = {
    "w8a8": ("int8", 128, "int8", 128),
    "smoothquant": ("int8", 0, "int8", 128),
    "smoothquant:inputs=token,search=false": ("int8", 0, "int8", 0),
    "smoothquant:inputs=static": ("int8", 0, "int8", 0),
    "fp8": ("fp8", 0, "bfloat16", 0),
    "fp8:scale=tensor": ("fp8", 0, "bfloat16", 0),
    "fp8:scale=block,inputs=fp8": ("fp8", 128, "fp8", 0),
    "fp8:scale=tensor,inputs=fp8": ("fp8", 0, "fp8", 0),
    "fp8:inputs=fp8": ("fp8", 0, "fp8", 0),
}
"""Format, group, compute and x_group of the products."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    arrays = llama_arrays("float32", **SIZES)
    small = {name: array * np.float32(0.1) if array.ndim > 1 else array for name, array in arrays.items()}
    return write_model(tmp_path_factory.mktemp("model"), small, **SIZES)


@pytest.fixture(scope="module")
def floats(model: Path, tmp_path_factory: pytest.TempPathFactory) -> np.ndarray:
    engine = tmp_path_factory.mktemp("float") / "engine"
    build(model, engine)
    return logits(engine)


def build(model: Path, engine: Path, *options: object) -> None:
    try:
        main([str(argument) for argument in ("build", model, "-o", engine, "--kv-dtype", "float32", *options)])
    except SystemExit as end:
        assert not end.code


def logits(engine: Path) -> np.ndarray:
    ids = [3, 40, 17, 5, 29, 11, 2, 33, 8, 21, 9, 14]
    packed = Packed(CpuExecutor(load_engine(engine), num_blocks=8), {"a": ids})
    return packed.run([[("a", 7)], [("a", 1)], [("a", 4)]])["a"]


@pytest.mark.parametrize("mode", MODES)
def test_modes(mode: str, model: Path, floats: np.ndarray, tmp_path: Path) -> None:
    format, group, compute, x_group = MODES[mode]
    calib = token_file(tmp_path / "calib.jsonl", vocabulary=48)
    given = () if mode.startswith("fp8") else ("--calib", calib, "--calib-length", 32)
    build(model, tmp_path / "engine", "--quant", mode, *given)
    engine = load_engine(tmp_path / "engine")
    products = [step for step in engine.plan.steps if step.op == "quantized_linear"]
    static = "static" in mode
    found = {tuple(step.attributes[key] for key in ("format", "group", "compute", "x_group")) for step in products}
    assert found == {(format, group, compute, x_group)}
    assert all((len(s.inputs) > 5 and s.inputs[5] is not None) == static for s in products)
    report = json.loads((tmp_path / "engine/report.json").read_text())["quantization"]
    entries = {entry["name"]: entry for entry in report["weights"]}
    assert sum(entry["bytes"] for entry in entries.values()) == sum(w.data.nbytes for w in engine.weights.values())
    done = [entry for entry in entries.values() if "format" in entry]
    assert len(done) == len(products) == 4
    for entry in done:
        assert (entry["format"], entry["group"], entry["bits"], entry["source_dtype"]) == (format, group, 8, "float32")
        assert entry["method"].split(":")[0] == ("smoothquant" if mode == "w8a8" else mode.split(":")[0])
        assert 0 < entry["error"] < (0.05 if format == "fp8" else 0.02)
    kept = [entry["kept"] for entry in entries.values() if "format" not in entry]
    assert sum(text.startswith("head: only with --quant-lm-head") for text in kept) == 1 and all(kept)
    assert distance(logits(tmp_path / "engine"), floats) < (0.25 if format == "fp8" or static else 0.1)
