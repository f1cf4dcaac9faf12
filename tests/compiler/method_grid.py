"""Each method and each type of KV cache on a compiled model: one recipe gives every weight another method in turn."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from quantizable import distance, logits, quantize, samples

from llmc.compiler.api import Compiled
from llmc.compiler.quantize.decisions import method_text
from llmc.compiler.quantize.sites import Site, find_sites
from llmc.quantization.base import parse_method

METHODS = {
    "rtn:bits=8,group=32": 0.01,
    "gptq:group=32": 0.3,
    "smoothquant:inputs=static": 0.02,
    "awq:group=32": 0.2,
    "fp8:scale=block,inputs=fp8": 0.06,
    "rtn:bits=4,group=16,sym=false": 0.13,
    "smoothquant": 0.02,
    "gptq:bits=8,group=0": 0.03,
    "fp8": 0.06,
    "rtn:bits=4,group=128": 0.2,
    "smoothquant:inputs=token": 0.02,
    "awq:bits=4,group=16,sym=false": 0.2,
    "fp8:scale=tensor,inputs=fp8": 0.06,
}
"""The largest relative error of a weight; gptq and awq care for outputs instead."""

LOGITS = 0.7
ROUTED = 0.2
"""Bounds of the relative distance of logits of random models; the second is added where tokens may change experts."""

KV = {"float16": 0.002, "bfloat16": 0.02, "float8_e4m3": 0.15, "int8": 0.05, "int4": 0.7}
"""The same, with the weights as they are and keys and values in these types."""


def check_methods(model: Compiled, turn: int, folder: Path) -> None:
    """Each weight but routers gets a method, and each method a weight, however few weights there are."""
    (ids,) = samples(1, 40, seed=9)
    wanted = logits(model.lowered, ids)
    parameters = {name: model.checkpoint.weight(name) for name in model.checkpoint.names}
    sites = [site for site in find_sites(model.steps, parameters) if not site.is_router]
    units = [list(found) for _, found in groupby(sites, key=lambda site: site.readers[0][0])]
    most = LOGITS + _routed(model)
    for number in range(0, len(METHODS), len(units)):
        lowered, report = quantize(model, "none", folder, recipe=_recipe(units, turn + number, folder), calib_samples=4)
        entries = [entry for entry in report["weights"] if entry.get("role")]
        assert sorted(e["tensor"] for e in entries if "format" in e) == sorted(site.name for site in sites)
        wrong = [f"{e['name']}: {e['method']}: {e['error']}" for e in entries if "format" in e and _is_wrong(e)]
        assert not wrong
        far = distance(logits(lowered, ids), wanted)
        assert far < most, f"{far}, of {report['summary']}"


def _routed(model: Compiled) -> float:
    return ROUTED if any(step.op == "moe" for step in model.steps.steps) else 0


def _is_wrong(entry: dict[str, float | str]) -> bool:
    return not float(entry["error"]) < BOUNDS[str(entry["method"])]


BOUNDS = {method_text(parse_method(text)): bound for text, bound in METHODS.items()}


def _recipe(units: Sequence[Sequence[Site]], turn: int, folder: Path) -> Path:
    names = list(METHODS)
    chosen: dict[str, str] = {}
    for number, unit in enumerate(units):
        for part in (part for site in unit for part in site.parts):
            chosen.setdefault(part.name, names[(turn + number) % len(names)])
    rules = [{"match": re.escape(name), "method": method} for name, method in chosen.items()]
    path = folder / "recipe.json"
    path.write_text(json.dumps({"rules": rules}))
    return path


def check_kv_types(model: Compiled) -> None:
    """Keys and values in each type."""
    (ids,) = samples(1, 40, seed=9)
    found = {dtype: logits(model.lowered, ids, kv_dtype=dtype) for dtype in ("float32", *KV)}
    far = {dtype: distance(found[dtype], found["float32"]) for dtype in KV}
    wrong = {dtype: value for dtype, value in far.items() if not value < KV[dtype] + _routed(model)}
    assert not wrong, wrong
