"""Where the interpreter gets its weights from: the checkpoint, what is quantized so far, or roundings for a trial."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmc.compiler.lower import LoweredGraph
from llmc.compiler.lowering.builder import PackedWeight
from llmc.compiler.quantize.interpreter import Weights
from llmc.compiler.quantize.pack import dequantized, pieces
from llmc.compiler.quantize.sites import Site, unrounded
from llmc.compiler.quantize.work import Record, Work
from llmc.compiler.safetensors_writer import Tensor
from llmc.compiler.weights import numpy_dtype
from llmc.plugins.linear import packing as panels
from llmc.quantization.base import Method


class Loader(Weights):
    """Weights in the dtype of the engine; those that are quantized by now as the numbers that they stand for."""

    def __init__(self, graph: LoweredGraph, quantized: Mapping[str, Site], work: Work, dtype: str) -> None:
        self.graph = graph
        self._quantized = quantized
        self._work = work
        self._dtype = numpy_dtype(dtype)

    def load(self, name: str) -> NDArray[Any]:
        """See Weights."""
        weight = self.graph.weights[name]
        site, record = self._record(name)
        if site is None or record is None:
            return whole(weight)
        found = np.empty(weight.shape, self._dtype)
        for expert in [None] if site.experts is None else range(site.experts):
            self._fill(found if expert is None else found[expert], dequantized(site, record, self._work, expert))
        return found

    def expert(self, name: str, expert: int) -> NDArray[Any]:
        """One matrix of several, packed."""
        weight = self.graph.weights[name]
        site, record = self._record(name)
        if site is not None and record is not None:
            found = np.empty(weight.shape[1:], self._dtype)
            self._fill(found, dequantized(site, record, self._work, expert))
            return found
        assert isinstance(weight, PackedWeight), "a weight of the checkpoint"
        return panels.pack(weight.source.rows(expert, expert + 1)[0])

    def is_table(self, name: str) -> bool:
        """See Weights."""
        return isinstance(self.graph.weights[name], PackedWeight)

    def table_rows(self, name: str, ids: NDArray[np.int64]) -> NDArray[np.float32]:
        """See Weights."""
        weight = self.graph.weights[name]
        assert isinstance(weight, PackedWeight), "a weight of the checkpoint"
        site, record = self._record(name)
        if site is not None and record is not None:
            from llmc.plugins.quantized_linear import packing

            tensors = {suffix: tensor.read() for suffix, tensor in self._work.tensors(record).items()}
            facts = record.facts
            return packing.dequantize_rows(
                facts["format"], facts["group"], tensors[""], tensors[".scale"], tensors.get(".zero"), ids, site.columns
            )
        parts = [weight.source.rows(begin, end) for begin, end in _runs(ids)]
        return np.concatenate(parts).astype(np.float32)

    def _record(self, name: str) -> tuple[Site | None, Record | None]:
        site = self._quantized.get(name)
        return site, None if site is None else self._work.find(name)

    def _fill(self, packed: NDArray[Any], pieces: Iterator[NDArray[np.float32]]) -> None:
        """Pack rows, which are whole panels but for the last ones."""
        begin = 0
        for rows in pieces:
            made = panels.pack(rows.astype(self._dtype))
            packed[begin : begin + len(made)] = made
            begin += len(made)


class Rounded(Loader):
    """Some weights as what a method that needs no calibration makes of them; nothing of that is kept."""

    def __init__(self, graph: LoweredGraph, methods: Mapping[str, tuple[Site, Method]], work: Work, dtype: str) -> None:
        super().__init__(graph, {}, work, dtype)
        self._methods = methods

    @property
    def names(self) -> Collection[str]:
        """Of the weights that are rounded."""
        return self._methods.keys()

    def load(self, name: str) -> NDArray[Any]:
        """See Weights."""
        if name not in self._methods:
            return super().load(name)
        site, _ = self._methods[name]
        found = np.empty(self.graph.weights[name].shape, self._dtype)
        for expert in [None] if site.experts is None else range(site.experts):
            self._fill(found if expert is None else found[expert], self._rows(name, expert))
        return found

    def table_rows(self, name: str, ids: NDArray[np.int64]) -> NDArray[np.float32]:
        """See Weights."""
        if name not in self._methods:
            return super().table_rows(name, ids)
        found, begin = [], 0
        for rows in self._rows(name, None):
            wanted = ids[(ids >= begin) & (ids < begin + len(rows))]
            found.append(rows[wanted - begin])
            begin += len(rows)
        return np.concatenate(found)

    def _rows(self, name: str, expert: int | None) -> Iterator[NDArray[np.float32]]:
        weight, (site, method) = self.graph.weights[name], self._methods[name]
        assert isinstance(weight, PackedWeight), "a weight of the checkpoint"
        for _, quantized, _ in pieces(site, unrounded(weight.source), method, None, expert):
            yield quantized.dequantize()


class Stored(Weights):
    """Weights as the engine will store them, quantized ones too."""

    def __init__(self, graph: LoweredGraph) -> None:
        self._weights = graph.weights

    def load(self, name: str) -> NDArray[Any]:
        """See Weights."""
        return whole(self._weights[name])

    def is_table(self, name: str) -> bool:
        """See Weights."""
        return isinstance(self._weights[name], PackedWeight)

    def table_rows(self, name: str, ids: NDArray[np.int64]) -> NDArray[np.float32]:
        """See Weights."""
        weight = self._weights[name]
        assert isinstance(weight, PackedWeight), "a float table"
        rows = np.concatenate([weight.source.rows(begin, end) for begin, end in _runs(ids)])
        return rows.astype(numpy_dtype(weight.dtype)).astype(np.float32)


def whole(tensor: Tensor) -> NDArray[Any]:
    """A tensor in memory, which is there once even while it is read."""
    found = np.empty(tensor.shape, numpy_dtype(tensor.dtype))
    flat, begin = found.reshape(-1).view(np.uint8), 0
    for chunk in tensor.chunks():
        data = np.ascontiguousarray(chunk).reshape(-1).view(np.uint8)
        flat[begin : begin + len(data)] = data
        begin += len(data)
    assert begin == len(flat), f"{tensor.name}: {begin} bytes of {len(flat)}"
    return found


def _runs(ids: NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """Ascending numbers as ranges [begin, end) of neighbours."""
    cuts = np.flatnonzero(np.diff(ids) != 1) + 1
    for part in np.split(ids, cuts):
        if len(part):
            yield int(part[0]), int(part[-1]) + 1
