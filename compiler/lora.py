"""LoRA in a build: an adapter merged into the weights, W + scale * B A, or what an engine tells so that one can be."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from llmc.compiler import weights
from llmc.compiler.checkpoint import Checkpoint
from llmc.compiler.quantize.folding import Factors
from llmc.compiler.quantize.sites import Site, unrounded
from llmc.compiler.safetensors_file import FileTensor
from llmc.compiler.weights import Array, Cast, Concat, Elementwise, Transpose, WeightSource
from llmc.errors import CheckpointError
from llmc.runtime.adapter_file import AdapterFile, LowRank, ParameterPair
from llmc.runtime.lora import Linear, LinearRows, Linears


@dataclass(frozen=True, eq=False)
class Merged(Elementwise):
    """A weight [N, K] (or [K, N] if ``transposed``) with what an adapter adds to it."""

    added: LowRank
    transposed: bool

    def rows(self, start: int, stop: int) -> NDArray[Any]:
        """Rows. Products are added rank by rank, so that no library's threads decide about the order."""
        values = self.source.rows(start, stop).astype(np.float32)
        left, right = (self.added.a.T, self.added.b.T) if self.transposed else (self.added.b, self.added.a)
        for j in range(right.shape[0]):
            values += left[start:stop, j, None] * right[j]
        return values


@dataclass(frozen=True, eq=False)
class MergedStack(Elementwise):
    """Weights [E, N, K] (or [E, K, N] if ``transposed``) with what an adapter adds to each."""

    added: ParameterPair
    transposed: bool

    def rows(self, start: int, stop: int) -> NDArray[Any]:
        """Whole experts."""
        values = self.source.rows(start, stop).astype(np.float32)
        a = self.added.a.reshape(self.shape[0], -1, self.added.a.shape[1])  # [E, rank, K]
        b = self.added.b.reshape(self.added.b.shape[0], -1, self.shape[0])  # [N, rank, E]
        for e, value in enumerate(values, start):
            for j in range(a.shape[1]):
                column, row = (a[e, j], b[:, j, e]) if self.transposed else (b[:, j, e], a[e, j])
                value += column[:, None] * row
        return values


def merge(checkpoint: Checkpoint, adapter: AdapterFile) -> Checkpoint:
    """The checkpoint of the adapted model.

    Raises:
        CheckpointError: the adapter is made for another model, or changes a weight that is used twice.
    """
    merged = _Merge(checkpoint, adapter)
    for name, values in adapter.replaced.items():
        source = merged.weight(name, "parameter")
        if tuple(source.shape) != values.shape:
            merged.refuse(f"has {name} {list(values.shape)}, but that of the model is {list(source.shape)}")
        merged.weights[name] = Array(values)
    of_linears = [(module, added, adapter.transposed) for module, added in adapter.modules.items()]
    of_experts = [entry for entry in of_linears if f"{entry[0]}.weight" not in checkpoint.names]
    merged.stored({f"{module}.weight": added for module, added, _ in of_experts})
    of_embeddings = [(module, added, True) for module, added in adapter.embeddings.items()]
    for module, added, transposed in [*of_linears, *of_embeddings]:
        if f"{module}.weight" in checkpoint.names:
            merged.linear(module, added, transposed)
    for pair in adapter.parameters:
        merged.stack(pair)
    return replace(checkpoint, _weights={**checkpoint._weights, **merged.weights})


class _Merge:
    """``weights``: those that change, by name."""

    def __init__(self, checkpoint: Checkpoint, adapter: AdapterFile) -> None:
        self.checkpoint, self.path = checkpoint, adapter.path
        self.weights: dict[str, WeightSource] = {}
        self._uses = Counter(weights.identity(checkpoint.weight(name)) for name in checkpoint.names)

    def refuse(self, problem: str) -> NoReturn:
        raise CheckpointError(f"{self.path}: {problem}")

    def weight(self, name: str, what: str) -> WeightSource:
        """A weight of the model that may change, as it is by now."""
        if name not in self.checkpoint.names:
            self.refuse(f"the model has no {what} {name.removesuffix('.weight')!r}; is the adapter made for it?")
        source = self.checkpoint.weight(name)
        if self._uses[weights.identity(source)] > 1:
            self.refuse(f"{name} is tied to another weight, which must not change with it")
        return self.weights.get(name, source)

    def linear(self, module: str, added: LowRank, transposed: bool) -> None:
        source = self.weight(f"{module}.weight", "linear")
        self.weights[f"{module}.weight"] = self._merged(module, source, added, transposed)

    def stack(self, pair: ParameterPair) -> None:
        """Merge into the one parameter that it fits, in the one way."""
        names = [n for n in (f"{pair.module}.{p}" for p in pair.parameters) if n in self.checkpoint.names]
        rows, sizes = pair.a.shape[0], (pair.b.shape[0], pair.a.shape[1])
        fits = []
        for name in names:
            shape = self.checkpoint.weight(name).shape
            if len(shape) in (2, 3) and rows % math.prod(experts := shape[:-2]) == 0:
                fits += [(name, False)] if shape[-2:] == sizes else []
                fits += [(name, True)] if experts and shape[-2:] == sizes[::-1] else []
        if len(fits) != 1:
            shapes = ", ".join(f"{name} {list(self.checkpoint.weight(name).shape)}" for name in names) or "none"
            self.refuse(
                f"{pair.module}: lora_A {list(pair.a.shape)} and lora_B {list(pair.b.shape)} must fit one of the "
                f"parameters {'/'.join(pair.parameters)} in one way; the model has {shapes}"
            )
        ((name, transposed),) = fits
        if name in self.weights:
            self.refuse(f"{name} is adapted twice")
        source = self.weight(name, "parameter")
        alone = len(source.shape) == 2
        added = LowRank(pair.a, pair.b)
        self.weights[name] = Merged(source, added, False) if alone else MergedStack(source, pair, transposed)

    def stored(self, added: Mapping[str, LowRank]) -> None:
        """Merge into tensors of the files that parameters are made of, such as the linears of single experts."""
        found: set[str] = set()

        def changed(value: Any) -> Any:
            if isinstance(value, tuple):
                return tuple(map(changed, value))
            if isinstance(value, FileTensor):
                if value.name not in added:
                    return Cast(value, "float32")
                found.add(value.name)
                return self._merged(value.name.removesuffix(".weight"), value, added[value.name], False)
            if is_dataclass(value) and not isinstance(value, type) and isinstance(value, WeightSource):
                return replace(value, **{f.name: changed(getattr(value, f.name)) for f in fields(value)})
            return value

        for name in self.checkpoint.names if added else ():
            before = len(found)
            source = changed(self.checkpoint.weight(name))
            if len(found) > before:
                self.weight(name, "parameter")
                self.weights[name] = source
        for name in added:
            if name not in found:
                self.weight(name, "linear")

    def _merged(self, module: str, source: WeightSource, added: LowRank, transposed: bool) -> Merged:
        sizes = (added.b.shape[0], added.a.shape[1])
        if tuple(source.shape) != (sizes[::-1] if transposed else sizes):
            self.refuse(f"{module} adapts a weight {list(sizes)}, but that of the model is {list(source.shape)}")
        return Merged(source, added, transposed)


def linears_of(
    sites: Sequence[Site],
    parameters: Mapping[str, WeightSource],
    columns: Mapping[str, Factors],
    rows: Mapping[str, Factors],
) -> Linears:
    """Of every product whose rows are rows of parameters. ``columns``, ``rows``: the factors folded into it."""
    names: dict[Hashable, str] = {}
    for name, source in parameters.items():
        names.setdefault(weights.identity(source), name)
    found = {}
    for site in sites:
        parts = list(_parts(site.source, names))
        if site.product is not None and len(site.source.shape) == 2 and None not in parts:
            found[site.name] = Linear(
                tuple(part for part in parts if part is not None),
                tuple(columns[site.name].tolist()) if site.name in columns else (),
                tuple(rows[site.name].tolist()) if site.name in rows else (),
            )
    return Linears(found)


def _parts(source: WeightSource, names: Mapping[Hashable, str]) -> Iterator[LinearRows | None]:
    """The parameters one below the other; None for rows that are none of a parameter in its order."""
    source = unrounded(source)
    whole = source.source if isinstance(source, Transpose) and len(source.shape) == 2 else source
    known = names.get(weights.identity(source)) or names.get(weights.identity(whole))
    if known is None and isinstance(source, Concat) and source.axis == 0:
        for part in source.parts:
            yield from _parts(part, names)
    else:
        yield None if known is None else LinearRows(known, source.shape[0])
