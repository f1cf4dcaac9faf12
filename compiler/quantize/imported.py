"""Weights that the checkpoint stores quantized stay so: the steps that read them become those of quantized products.

What has no form of the engine (or is read by other ops) is used as the floats that it stands for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmc.compiler.lower import LoweredGraph
from llmc.compiler.lowering.builder import LoweredStep, PackedWeight
from llmc.compiler.lowering.values import Buffer, View, contiguous, product
from llmc.compiler.quantize.decisions import COMPUTES, DEFAULT_COMPUTE
from llmc.compiler.quantize.replace import CODES, SCALE, X_SCALE, ZERO, QuantizedWeight, replace_weights
from llmc.compiler.quantize.sites import DOWN, GATE_UP, WEIGHT_INPUTS, Part, Site, find_sites, split_parts, stored_view
from llmc.compiler.quantized_views import common_scheme, find_quantized, key_of_order, quantized_parts, recast
from llmc.compiler.quantized_weights import QuantizedSource, describe
from llmc.compiler.safetensors_writer import Tensor
from llmc.compiler.weights import Array, Sized, Slice, WeightSource, numpy_dtype
from llmc.errors import CompileError, KernelError, UsageError
from llmc.plugins.quantized_linear import packing
from llmc.runtime.plan import Storage

CHUNK_BYTES = 16 << 20
"""Codes, one a byte, that are read at a time."""


@dataclass(frozen=True, eq=False)
class Imported:
    """A graph with the checkpoint's own codes. ``kept``: the weights that have them, by tensor."""

    graph: LoweredGraph
    sites: Sequence[Site]
    kept: Mapping[str, QuantizedSource]
    compute: str

    @property
    def text(self) -> str:
        """A line for people: ``of the checkpoint: int4 in groups of 128, computes with int8``."""
        forms = dict.fromkeys(describe(source) for source in self.kept.values())
        computes = dict.fromkeys(_computes(site, self.kept[site.name], self.compute) for site in self._kept_sites)
        return f"of the checkpoint: {', '.join(forms)}; computes with {', '.join(computes)}"

    @property
    def _kept_sites(self) -> list[Site]:
        return [site for site in self.sites if site.name in self.kept]

    @property
    def rescaled(self) -> list[Site]:
        """Experts: the checkpoint has scales for their inputs, and one kernel that multiplies all of them has not."""
        return [s for s in self._kept_sites if s.experts is not None and _any_x_scale(s.source)]

    @property
    def lost(self) -> list[Site]:
        """Weights that have codes in the checkpoint, but not here."""
        return [site for site in self.sites if site.name not in self.kept and _has_codes(site.source)]

    def coverage(self, stored: Mapping[str, Tensor]) -> list[dict[str, Any]]:
        """For report.json: how each weight is stored. ``stored``: the tensors of the engine, by name."""
        entries = []
        seen: set[str] = set()
        for site in self.sites:
            names = [site.name + suffix for suffix in (CODES, SCALE, ZERO, X_SCALE) if site.name + suffix in stored]
            if names:
                seen.update(names)
                nbytes = sum(stored[name].nbytes for name in names)
                entries.append(self._entry(site, nbytes, stored[site.name].dtype))
        for name, tensor in stored.items():
            if name not in seen:
                count = max(1, math.prod(tensor.shape))
                form = {"format": tensor.dtype, "bits": 8 * tensor.nbytes / count, "group": None, "error": None}
                entries.append({"name": name} | form | {"bytes": tensor.nbytes, "reason": "not quantized before"})
        return entries

    def _entry(self, site: Site, nbytes: int, dtype: str) -> dict[str, Any]:
        source = self.kept.get(site.name)
        lost = "its parts are quantized in several ways" if site in self.lost else "not quantized before"
        found = {
            "name": site.label,
            "tensor": site.name,
            "role": site.role,
            "shape": list(site.source.shape),
            "source_dtype": site.source.dtype,
            "format": dtype if source is None else source.scheme.format,
            "bits": round(8 * nbytes / site.numbers, 4),
            "group": None if source is None else source.scheme.group,
            "error": None if source is None else 0.0,
            "bytes": nbytes,
            "reason": lost if source is None else "",
        }
        if source is None:
            return found
        x_scale = x_scale_of(site, source, self.compute)
        inputs = {"input_scale": x_scale[0], "input_zero_point": int(sum(x_scale[1:]))} if x_scale else {}
        return found | inputs | {"method": "as in the checkpoint"}


def keep_quantized(graph: LoweredGraph, parameters: Mapping[str, WeightSource], compute: str) -> Imported | None:
    """Use the checkpoint's own codes; None if it has none.

    Args:
        graph: the lowered model.
        parameters: the sources of the model's parameters, by name.
        compute: what products compute with; "auto" is the default of the format.

    Raises:
        UsageError: ``compute`` is not for the format.
    """
    if not any(_has_codes(source) for source in parameters.values()):
        return None
    merged = graph
    for site in find_sites(merged, parameters):
        groups = _split(site)
        if len(groups) > 1 and all(merged.steps[number].op == "linear" for number, _ in site.readers):
            graph = split_parts(graph, site, groups)
    sites = find_sites(graph, parameters)
    found = {site.name: source for site in sites if (source := find_quantized(site.source)) is not None}
    for name in _read_otherwise(graph, found):
        found.pop(name, None)
    _match_experts(graph, found)
    graph = _order_inputs(graph, found)
    by_name = {site.name: site for site in sites}
    quantized = {name: _weight(by_name[name], source, compute) for name, source in found.items()}
    graph = replace_weights(_shift_biases(graph, by_name, found, compute), quantized)
    return Imported(graph, sites, found, compute)


def compute_for(format: str, wanted: str, rounds_inputs: bool = False) -> str:
    """What products with weights of a format compute with; the checkpoint may say that inputs are rounded too.

    Raises:
        UsageError: there are no such products.
    """
    if wanted not in COMPUTES:
        raise UsageError(f"--compute {wanted}: unknown; known: {', '.join(COMPUTES)}")
    if wanted in ("int8", "fp8") and (format == "fp8") != (wanted == "fp8"):
        raise UsageError(f"--compute {wanted}: not for {format} weights; choose auto, bfloat16 or float32")
    if wanted == "auto" and rounds_inputs:
        return "fp8" if format == "fp8" else "int8"
    return DEFAULT_COMPUTE[format] if wanted == "auto" else wanted


def x_scale_of(site: Site, source: QuantizedSource, compute: str) -> tuple[float, ...]:
    """The checkpoint's scale of the inputs, and the zero point if there is one; () where products don't use it."""
    linear = site.product is not None and site.experts is None
    return source.x_scale if linear and _computes(site, source, compute) in ("int8", "fp8") else ()


def _computes(site: Site, source: QuantizedSource, wanted: str) -> str:
    linear = site.product is not None and site.experts is None
    return compute_for(source.scheme.format, wanted, linear and bool(source.x_scale))


def _any_x_scale(source: WeightSource) -> bool:
    return any(part.x_scale for part in quantized_parts(source))


def _split(site: Site) -> list[list[Part]]:
    """Parts of a merged weight: neighbours that are quantized in one form, or are all floats, stay together."""
    if site.experts is not None or len(site.parts) == 1:
        return [list(site.parts)]
    forms = []
    end = 0
    for part in site.parts:
        start, end = end, end + part.rows
        source = find_quantized(Slice(site.source, (slice(start, end),)))
        forms.append(None if source is None else (source.scheme, source.zero, source.x_scale, key_of_order(source)))
    pairs = zip(site.parts, forms, strict=True)
    return [[part for part, _ in group] for _, group in groupby(pairs, key=lambda pair: pair[1])]


def _has_codes(source: WeightSource) -> bool:
    """Whether it is made of quantized weights, at least in part."""
    if quantized_parts(source):
        return True
    children = getattr(source, "parts", None) or ([source.source] if hasattr(source, "source") else [])
    return any(_has_codes(child) for child in children)


def _read_otherwise(graph: LoweredGraph, found: Mapping[str, QuantizedSource]) -> set[str]:
    """Names of weights that not only products and embeddings read; those in act-order are for linears only."""
    names = set()
    for step in graph.steps:
        for index, view in enumerate(step.inputs):
            if view is None or view.buffer.name not in found:
                continue
            in_order = found[view.buffer.name].order is not None
            if index not in WEIGHT_INPUTS.get(step.op, ()) or (in_order and step.op != "linear"):
                names.add(view.buffer.name)
    return names


def _order_inputs(graph: LoweredGraph, found: Mapping[str, QuantizedSource]) -> LoweredGraph:
    """Where the columns of a weight are in act-order, a step before the product brings its inputs into that order."""
    steps: list[LoweredStep] = []
    stored = dict(graph.weights)
    orders: dict[bytes, View] = {}
    ordered: dict[tuple[View, View], View] = {}
    for step in graph.steps:
        source = found.get(step.inputs[1].buffer.name) if step.op == "linear" and step.inputs[1] is not None else None
        if source is None or source.order is None:
            steps.append(step)
            continue
        x, weight = step.inputs[:2]
        assert x is not None and weight is not None, "a linear has both"
        key = source.order.tobytes()
        if key not in orders:
            tensor = PackedWeight(f"{weight.buffer.name}.order", Array(source.order.astype(np.int32)))
            stored[tensor.name] = tensor
            orders[key] = stored_view(tensor.name, tensor.dtype, tensor.shape)
        if (x, orders[key]) not in ordered:
            buffer = Buffer(f"{weight.buffer.name}.x", Storage.ARENA, x.dtype, product(x.shape))
            y = ordered[x, orders[key]] = View(buffer, x.shape, contiguous(x.shape))
            columns = (x.transpose([1, 0]), orders[key])
            steps.append(LoweredStep("gather", columns, (y.transpose([1, 0]),), {}, step.module))
        steps.append(replace(step, inputs=(ordered[x, orders[key]], *step.inputs[1:])))
    return replace(graph, steps=steps, weights=stored)


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


def _shift_biases(
    graph: LoweredGraph, sites: Mapping[str, Site], found: Mapping[str, QuantizedSource], compute: str
) -> LoweredGraph:
    """Where inputs have a zero point, what it adds to each product is taken from the bias."""
    steps, stored = [], dict(graph.weights)
    for step in graph.steps:
        weight = step.inputs[1] if step.op == "linear" else None
        source = None if weight is None else found.get(weight.buffer.name)
        if weight is None or source is None or len(x_scale_of(sites[weight.buffer.name], source, compute)) < 2:
            steps.append(step)
            continue
        before = step.inputs[2] if len(step.inputs) > 2 else None
        old = None
        if before is not None:
            tensor = stored[before.buffer.name]
            assert isinstance(tensor, PackedWeight) and before.offset.is_constant, "a bias, or a part of one"
            old = Slice(tensor.source, (slice(before.offset.constant, before.offset.constant + source.shape[0]),))
        bias = PackedWeight(f"{weight.buffer.name}.shifted_bias", _ShiftedBias(source, old))
        stored[bias.name] = bias
        view = stored_view(bias.name, bias.dtype, bias.shape)
        steps.append(replace(step, inputs=(*step.inputs[:2], view)))
    if len(stored) == len(graph.weights):
        return graph
    used = {view.buffer.name for step in steps for view in step.inputs if view is not None}
    return replace(graph, steps=steps, weights={name: tensor for name, tensor in stored.items() if name in used})


@dataclass(frozen=True, eq=False)
class _ShiftedBias(Sized):
    """bias - scale of the inputs * their zero point * the sum of each row of the weight."""

    weight: QuantizedSource
    bias: WeightSource | None

    @property
    def shape(self) -> tuple[int, ...]:
        """One number a row."""
        return self.weight.shape[:1]

    @property
    def dtype(self) -> str:
        """As the kernel wants it."""
        return "float32"

    def rows(self, start: int, stop: int) -> NDArray[Any]:
        """The numbers that the codes stand for are summed in float64."""
        scale, zero = self.weight.x_scale
        sums = self.weight.quantized_rows(start, stop).dequantize().sum(1, dtype=np.float64)
        bias = 0 if self.bias is None else self.bias.rows(start, stop).astype(np.float64)
        return np.asarray(bias - np.float64(np.float32(scale)) * zero * sums, np.float32)


def _weight(site: Site, source: QuantizedSource, compute: str) -> QuantizedWeight:
    name, scheme = site.name, source.scheme
    tensors: dict[str, Tensor] = {CODES: _Codes(name, source), SCALE: _Scales(name + SCALE, source)}
    if source.zero is not None:
        tensors[ZERO] = _Zeros(name + ZERO, source)
    chosen, x_scale = _computes(site, source, compute), x_scale_of(site, source, compute)
    if x_scale:
        tensors[X_SCALE] = PackedWeight(name + X_SCALE, Array(np.array(x_scale, np.float32)))
    x_group = scheme.x_group if chosen == "int8" and not x_scale else 0
    return QuantizedWeight(scheme.format, scheme.group, chosen, x_group, tensors, source.shape[-1])


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

    def _packed(self, pack: Callable[..., NDArray[Any]], *given: Any) -> NDArray[Any]:
        """Raises CompileError for numbers that are not finite."""
        try:
            return pack(*given)
        except KernelError as problem:
            raise CompileError(f"{self.name}: {problem}; the checkpoint is damaged, get it once more") from None

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
            codes = self.source.quantized_rows(start, stop).codes
            yield self._packed(packing.pack, scheme.format, scheme.group, codes)


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
            yield self._packed(packing.pack_scales, self.source.scale_rows(start, stop)[0], self.dtype)


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
            yield self._packed(packing.pack_scales, zero, self.dtype)
