"""The EAGLE layer of an engine: the files that hold it, read with checks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from llmc.errors import EngineError
from llmc.plugins.paged_attention.storage import KV_DTYPES
from llmc.runtime import plan_file, strict
from llmc.runtime.manifest import KvCacheSpec, Limits
from llmc.runtime.plan import Dim, Plan

if TYPE_CHECKING:
    from llmc.runtime.engine import Weight

PLAN, WEIGHTS, SPEC = "eagle/plan.json", "eagle/weights.safetensors", "eagle/eagle.json"
FILES = (PLAN, WEIGHTS, SPEC)

FEATURES, HIDDEN = "target_features", "hidden"
"""Values of the plan that are written from outside: what the model computed [T, ..]; what the layer itself did [T, H].

Without the first, the model's features are of the second kind.
"""

TOKEN_IDS = "eagle.token_ids"
"""Not read by the plan: the token of the model for each that the layer gives logits of."""


@dataclass(frozen=True)
class EagleSpec:
    """Its version (``eagle`` is EAGLE-1), and how it stores keys and values."""

    kind: str
    kv_dtype: str


@dataclass(frozen=True)
class EngineEagle:
    """A layer that goes on with what the model computed.

    Attributes:
        plan: row i takes the feature at token i and token i + 1, and gives its own feature of token i + 1 (the only
            one of ``plan.features``) and logits of token i + 2.
        weights: that it reads.
        spec: what it is.
        token_ids: of its logits; None: those of the model.
        begin: the first step after what the model computed has become of the layer's own kind.
    """

    plan: Plan
    weights: Mapping[str, Weight]
    spec: EagleSpec
    token_ids: NDArray[np.int32] | None
    begin: int


def read_eagle(
    plan: bytes,
    spec: bytes,
    own: Mapping[str, Weight],
    shared: Mapping[str, Weight],
    model: Plan,
    vocabulary: int,
    limits: Limits,
    where: str,
) -> EngineEagle:
    """Parse and check.

    Args:
        plan: content of the file.
        spec: the same.
        own: weights of the layer.
        shared: those of the model, which the plan may name too.
        model: the plan of the model.
        vocabulary: of the model.
        limits: of the engine.
        where: the engine's path, for messages.

    Raises:
        EngineError: they contradict each other.
    """
    found = strict.load(EagleSpec, strict.parse_json(spec, f"{where}/{SPEC}"), f"{where}/{SPEC}")
    if found.kv_dtype not in KV_DTYPES:
        raise EngineError(f"{where}/{SPEC}: kv_dtype {found.kv_dtype!r} is unknown; build the engine anew")
    weights = {**shared, **own}
    shapes = {weight.name: (weight.dtype, weight.shape) for weight in weights.values()}
    parsed = plan_file.from_bytes(plan, shapes, limits, f"{where}/{PLAN}")
    widths = [model.value(name).shape[1].constant for name in model.features]
    entry = FEATURES if FEATURES in parsed.names else HIDDEN
    inputs = {name: parsed.input_width(name, Dim(tokens=1)) for name in (entry, HIDDEN)}
    own_width = parsed.value(parsed.features[0]).shape[1].constant if len(parsed.features) == 1 else None
    if len(parsed.kv_slots) != 1 or (inputs[entry], inputs[HIDDEN]) != (sum(widths), own_width):
        raise EngineError(f"{where}/{PLAN}: it does not go on with what the model computes; build the engine anew")
    ids = weights.pop(TOKEN_IDS).array if TOKEN_IDS in weights else None
    count = parsed.value(parsed.logits).shape[1].constant
    if ids is not None and (ids.dtype != np.int32 or ids.shape != (count,) or ids.min() < 0):
        raise EngineError(f"{where}/{WEIGHTS}: {TOKEN_IDS} are no {count} tokens; build the engine anew")
    if (count if ids is None else int(ids.max()) + 1) > vocabulary:
        raise EngineError(f"{where}/{PLAN}: it drafts tokens that the model does not have; build the engine anew")
    writers = [number for number, step in enumerate(parsed.steps) if HIDDEN in step.outputs]
    used = {str(value.base) for value in parsed.values if value.storage.value == "weight"}
    mine = {name: weight for name, weight in weights.items() if name in used}
    return EngineEagle(parsed, mine, found, ids, writers[-1] + 1 if writers else 0)


def cache_spec(eagle: EngineEagle, block_size: int) -> KvCacheSpec:
    """Of its own KV cache."""
    return KvCacheSpec(eagle.spec.kv_dtype, block_size)
