"""LoRA in a build: an adapter merged into the weights, W + scale * B A, or what an engine tells so that one can be."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmc.compiler import weights
from llmc.compiler.checkpoint import Checkpoint
from llmc.compiler.quantize.folding import Factors
from llmc.compiler.quantize.sites import Site, unrounded
from llmc.compiler.weights import Concat, Sized, Transpose, WeightSource
from llmc.errors import CheckpointError
from llmc.runtime.adapter_file import AdapterFile, LowRank
from llmc.runtime.lora import Linear, LinearRows, Linears


@dataclass(frozen=True, eq=False)
class Merged(Sized):
    """A weight [N, K] (or [K, N] if ``transposed``) with what an adapter adds to it, in float32."""

    source: WeightSource
    added: LowRank
    transposed: bool

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the source."""
        return self.source.shape

    @property
    def dtype(self) -> str:
        """Wide enough for the sum; the build rounds it once."""
        return "float32"

    def rows(self, start: int, stop: int) -> NDArray[Any]:
        """Rows. Products are added rank by rank, so that no library's threads decide about the order."""
        values = self.source.rows(start, stop).astype(np.float32)
        left, right = (self.added.a.T, self.added.b.T) if self.transposed else (self.added.b, self.added.a)
        for j in range(right.shape[0]):
            values += left[start:stop, j, None] * right[j]
        return values


def merge(checkpoint: Checkpoint, adapter: AdapterFile) -> Checkpoint:
    """The checkpoint of the adapted model.

    Raises:
        CheckpointError: the adapter is made for another model, or changes a weight that is used twice.
    """
    uses = Counter(weights.identity(checkpoint.weight(name)) for name in checkpoint.names)
    merged = {}
    for module, added in adapter.modules.items():
        name = f"{module}.weight"
        if name not in checkpoint.names:
            raise CheckpointError(f"{adapter.path}: the model has no linear {module!r}; is the adapter made for it?")
        source = checkpoint.weight(name)
        sizes = (added.b.shape[0], added.a.shape[1])
        if tuple(source.shape) != (sizes[::-1] if adapter.transposed else sizes):
            raise CheckpointError(
                f"{adapter.path}: {module} adapts a weight {list(sizes)}, but that of the model is {list(source.shape)}"
            )
        if uses[weights.identity(source)] > 1:
            raise CheckpointError(f"{adapter.path}: {name} is tied to another weight, which must not change with it")
        merged[name] = Merged(source, added, adapter.transposed)
    return replace(checkpoint, _weights={**checkpoint._weights, **merged})


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
