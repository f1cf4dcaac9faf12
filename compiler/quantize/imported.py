"""Weights that the checkpoint stores quantized stay so: the steps that read them become those of quantized products.

What has no form of the engine (or is read by other ops) is used as the floats that it stands for.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmc.compiler.lower import LoweredGraph
from llmc.compiler.quantize.decisions import COMPUTES, DEFAULT_COMPUTE
from llmc.compiler.quantize.replace import CODES, SCALE, ZERO, QuantizedWeight, replace_weights
from llmc.compiler.quantize.sites import DOWN, GATE_UP, WEIGHT_INPUTS, Part, Site, find_sites, split_parts
from llmc.compiler.quantized_views import common_scheme, find_quantized, quantized_parts, recast
from llmc.compiler.quantized_weights import QuantizedSource
from llmc.compiler.safetensors_writer import Tensor
from llmc.compiler.weights import Slice, WeightSource, numpy_dtype
from llmc.errors import UsageError
from llmc.plugins.quantized_linear import packing

CHUNK_BYTES = 16 << 20
"""Codes, one a byte, that are read at a time."""


def keep_quantized(
    graph: LoweredGraph, parameters: Mapping[str, WeightSource], compute: str
) -> tuple[LoweredGraph, list[str]]:
    """The graph with the checkpoint's own codes, and notes about weights that are floats all the same.

    Args:
        graph: the lowered model.
        parameters: the sources of the model's parameters, by name.
        compute: what products compute with; "auto" is the default of the format.

    Raises:
        UsageError: ``compute`` is not for the format.
    """
    for site in find_sites(graph, parameters):
        groups = _split(site)
        if len(groups) > 1 and all(graph.steps[number].op == "linear" for number, _ in site.readers):
            graph = split_parts(graph, site, groups)
    sites = {site.name: site for site in find_sites(graph, parameters)}
    found = {name: source for name, site in sites.items() if (source := find_quantized(site.source)) is not None}
    for name in _read_otherwise(graph):
        found.pop(name, None)
    _match_experts(graph, found)
    notes = [
        f"{site.label}: dequantized, since its parts are quantized in ways that don't fit together"
        for name, site in sites.items()
        if name not in found and _has_codes(site.source)
    ]
    quantized = {name: _weight(name, source, compute) for name, source in found.items()}
    return replace_weights(graph, quantized), notes


def compute_for(format: str, wanted: str) -> str:
    """What products with weights of a format compute with.

    Raises:
        UsageError: there are no such products.
    """
    if wanted not in COMPUTES:
        raise UsageError(f"--compute {wanted}: unknown; known: {', '.join(COMPUTES)}")
    if wanted in ("int8", "fp8") and (format == "fp8") != (wanted == "fp8"):
        raise UsageError(f"--compute {wanted}: not for {format} weights; choose auto, bfloat16 or float32")
    return DEFAULT_COMPUTE[format] if wanted == "auto" else wanted


def _split(site: Site) -> list[list[Part]]:
    """Parts of a merged weight, those together that are quantized in one form or are all floats."""
    if site.experts is not None or len(site.parts) == 1 or find_quantized(site.source) is not None:
        return [list(site.parts)]
    ends = np.cumsum([0, *(part.rows for part in site.parts)]).tolist()
    groups: list[list[Part]] = []
    begin = 0
    for part, (start, end) in zip(site.parts, pairwise(ends), strict=True):
        is_float = _rows(site, start, end) is None
        together = _rows(site, begin, end) is None if is_float else _rows(site, begin, end) is not None
        if groups and together and (_rows(site, begin, start) is None) == is_float:
            groups[-1].append(part)
        else:
            groups.append([part])
            begin = start
    return groups


def _rows(site: Site, begin: int, end: int) -> QuantizedSource | None:
    return find_quantized(Slice(site.source, (slice(begin, end),)))


def _has_codes(source: WeightSource) -> bool:
    """Whether it is made of quantized weights, at least in part."""
    if quantized_parts(source):
        return True
    children = getattr(source, "parts", None) or ([source.source] if hasattr(source, "source") else [])
    return any(_has_codes(child) for child in children)


def _read_otherwise(graph: LoweredGraph) -> set[str]:
    """Names of weights that not only products and embeddings read."""
    names = set()
    for step in graph.steps:
        for index, view in enumerate(step.inputs):
            if view is not None and index not in WEIGHT_INPUTS.get(step.op, ()):
                names.add(view.buffer.name)
    return names


def _match_experts(graph: LoweredGraph, found: dict[str, QuantizedSource]) -> None:
    """Both matrices of the experts have one format and group, or they are floats."""
    for step in graph.steps:
        if step.op != "moe":
            continue
        views = [step.inputs[GATE_UP], step.inputs[DOWN]]
        names = [view.buffer.name for view in views if view is not None]
        pair = [found[name] for name in names if name in found]
        scheme = common_scheme(pair) if len(pair) == 2 else None
        for name in names:
            if scheme is None:
                found.pop(name, None)
            else:
                found[name] = recast(found[name], scheme)


def _weight(name: str, source: QuantizedSource, compute: str) -> QuantizedWeight:
    scheme = source.scheme
    tensors: dict[str, Tensor] = {CODES: _Codes(name, source), SCALE: _Scales(name + SCALE, source)}
    if source.zero is not None:
        tensors[ZERO] = _Zeros(name + ZERO, source)
    return QuantizedWeight(scheme.format, scheme.group, compute_for(scheme.format, compute), scheme.x_group, tensors)


@dataclass(frozen=True, eq=False)
class _Packed:
    """A tensor of weights.safetensors that is made of a source while it is written."""

    name: str
    source: QuantizedSource

    @property
    def dtype(self) -> str:
        raise NotImplementedError

    @property
    def shape(self) -> tuple[int, ...]:
        raise NotImplementedError

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * numpy_dtype(self.dtype).itemsize

    @property
    def _lead(self) -> tuple[int, ...]:
        return self.source.shape[:-2]

    def _ranges(self) -> Iterator[tuple[int, int]]:
        """Rows of all matrices, whole panels of a matrix at a time."""
        rows, columns = self.source.shape[-2:]
        step = max(1, CHUNK_BYTES // max(1, packing.PANEL * columns)) * packing.PANEL
        for matrix in range(math.prod(self._lead)):
            for start in range(0, rows, step):
                yield matrix * rows + start, matrix * rows + min(rows, start + step)


class _Codes(_Packed):
    @property
    def dtype(self) -> str:
        return "uint8"

    @property
    def shape(self) -> tuple[int, ...]:
        scheme, (rows, columns) = self.source.scheme, self.source.shape[-2:]
        return (*self._lead, *packing.packed_shape(scheme.format, rows, columns, scheme.group))

    def chunks(self) -> Iterator[NDArray[Any]]:
        """Panels."""
        scheme = self.source.scheme
        for start, stop in self._ranges():
            yield packing.pack(scheme.format, scheme.group, self.source.quantized_rows(start, stop).codes)


class _Scales(_Packed):
    @property
    def dtype(self) -> str:
        return self.source.scale_dtype

    @property
    def shape(self) -> tuple[int, ...]:
        rows, columns = self.source.shape[-2:]
        return (*self._lead, *packing.scale_shape(rows, columns, self.source.scheme.group))

    def chunks(self) -> Iterator[NDArray[Any]]:
        """Panels."""
        for start, stop in self._ranges():
            yield packing.pack_scales(self.source.scale_rows(start, stop)[0], self.dtype)


class _Zeros(_Scales):
    @property
    def dtype(self) -> str:
        assert self.source.zero is not None, "there are zero points"
        return self.source.zero

    def chunks(self) -> Iterator[NDArray[Any]]:
        """Panels."""
        for start, stop in self._ranges():
            zero = self.source.scale_rows(start, stop)[1]
            assert zero is not None, "there are zero points"
            yield packing.pack_scales(zero, self.dtype)
