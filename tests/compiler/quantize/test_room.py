"""The memory that quantizing a weight takes stays below what a dry run tells."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from llmc.compiler.quantize import pack, room
from llmc.compiler.quantize.pack import quantize_site
from llmc.compiler.quantize.sites import Part, Site
from llmc.compiler.quantize.work import Work
from llmc.compiler.weights import Array
from llmc.quantization import awq, gptq, rounding, statistics
from llmc.quantization.base import LayerInputs, Method, Statistics, parse_method
from llmc.quantization.deterministic import single_threaded
from llmc.quantization.statistics import InputCollector

BYTES = 128 << 10
"""Of a piece, instead of megabytes."""


def site_of(rows: int, columns: int) -> Site:
    chance = np.random.default_rng(0)
    source = Array(chance.standard_normal((rows, columns), np.float32))
    return Site("w", "mlp", source, (Part("w", rows),), ((0, 1),), (0, 1))


def peak(site: Site, method: Method, work: Work) -> int:
    """Bytes that were allocated at a time, from the first token to the last code."""
    rows = np.random.default_rng(1).standard_normal((600, site.columns), np.float32)
    with single_threaded():
        pass  # imports what it needs
    tracemalloc.start()
    try:
        given: LayerInputs | None = None
        if method.needs is not Statistics.NONE:
            collector = InputCollector(site.columns, method.needs)
            for begin in range(0, len(rows), 100):
                collector.add(rows[begin : begin + 100])
            given = collector.finish()
            if method.folds:
                method.input_scale(site.source.rows(0, site.rows).astype(np.float32), given)
        quantize_site(site, site.source, method, work, lambda _: given)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(("rows", "columns"), [(1100, 256), (64, 1000)])
@pytest.mark.parametrize(
    "method",
    [
        "rtn",
        "fp8:scale=tensor",
        "gptq:group=64",
        "gptq:bits=8,sym=false",
        "awq:group=32",
        "awq:refine=0",
        "smoothquant",
    ],
)
def test_a_weight(method: str, rows: int, columns: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    of_pieces = ((pack, "PANEL_BYTES"), (gptq, "ROWS_BYTES"), (awq, "ROWS_BYTES"))
    for module, name in (*of_pieces, (rounding, "SEARCH_ROWS")):
        small = BYTES if name.endswith("BYTES") else 64
        monkeypatch.setattr(module, name, small)
        monkeypatch.setattr(room, name, small)
    site = site_of(rows, columns)
    found = parse_method(method)
    monkeypatch.setattr(statistics, "SAMPLE", 200)
    monkeypatch.setattr(room, "SAMPLE", 200)
    monkeypatch.setattr(room, "HELD_ROWS", 200 + 1024)
    assert peak(site, found, Work(tmp_path)) < room._site_bytes(site, found) + 4 * 600 * columns
