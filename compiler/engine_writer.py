"""Writes the files of an engine, the weights as a stream, and last engine.json, which vouches for all others."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

import llmc
from llmc.compiler import safetensors_writer
from llmc.compiler.config import BLOCK_SIZE
from llmc.compiler.config import Limits as StepLimits
from llmc.compiler.lower import LoweredGraph, LoweredModel, plan_steps
from llmc.compiler.safetensors_writer import Tensor
from llmc.compiler.staging import Staging
from llmc.compiler.targets.base import Target
from llmc.compiler.tokenizer import FrozenTokenizer
from llmc.errors import CompileError
from llmc.runtime import lora, plan_file, selftest, strict
from llmc.runtime import manifest as manifest_file
from llmc.runtime.engine import WEIGHTS, kv_bytes_per_token
from llmc.runtime.lora import Linears
from llmc.runtime.manifest import KvCacheSpec, Limits, Manifest, ModelFacts
from llmc.runtime.plan import Plan
from llmc.runtime.selftest import Golden


@dataclass(frozen=True)
class DraftPart:
    """What drafts tokens for the model, with a plan of its own.

    ``files``: of the plan and of the weights that the model does not have. ``more``: tensors that the plan does not
    read. ``name``: of its section in the report.
    """

    name: str
    files: tuple[str, str]
    graph: LoweredGraph
    limits: StepLimits
    kv_dtype: str
    more: Sequence[Tensor] = ()

    def write(
        self, staging: Staging, target: Target, shared: Collection[str], graph: LoweredGraph | None = None
    ) -> tuple[LoweredModel, dict[str, int]]:
        """Write the files; returns what was placed, and sizes for the report. ``shared``: weights of the model."""
        lowered = plan_steps(graph or self.graph, target, self.limits)
        own = self._own(lowered, shared)
        staging.write(self.files[0], plan_file.to_bytes(lowered.plan))
        staging.write_stream(self.files[1], safetensors_writer.pieces(safetensors_writer.order(own)))
        sizes = (sum(tensor.nbytes for tensor in tensors) for tensors in (own, lowered.weights.values()))
        return lowered, dict(zip(("own_bytes", "read_bytes"), sizes, strict=True))

    def sizes(self, target: Target, shared: Collection[str]) -> tuple[int, int]:
        """Bytes of the weights that the model does not have, and of what it keeps of each token."""
        lowered = plan_steps(self.graph, target, self.limits)
        return sum(tensor.nbytes for tensor in self._own(lowered, shared)), self.kept_bytes(lowered)

    def kept_bytes(self, lowered: LoweredModel) -> int:
        """Of each token, in a cache of its own."""
        return kv_bytes_per_token(lowered.plan, KvCacheSpec(self.kv_dtype, BLOCK_SIZE))

    def _own(self, lowered: LoweredModel, shared: Collection[str]) -> list[Tensor]:
        return [tensor for name, tensor in lowered.weights.items() if name not in shared] + list(self.more)


@dataclass(frozen=True)
class EngineContents:
    """Everything that goes into an engine. ``recipe`` and ``report`` are JSON objects."""

    target: str
    limits: Limits
    model: ModelFacts
    kv_cache: KvCacheSpec
    plan: Plan
    weights: Sequence[Tensor]
    graph: bytes
    tokenizer: FrozenTokenizer | None
    generation_config: Mapping[str, Any]
    recipe: Mapping[str, Any]
    report: Mapping[str, Any]
    linears: Linears
    parts: tuple[DraftPart, ...] = ()


@dataclass(frozen=True)
class ArrayTensor:
    """A tensor in memory, to be written."""

    name: str
    array: NDArray[Any]

    @property
    def dtype(self) -> str:
        """The dtype's name."""
        return self.array.dtype.name

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes."""
        return self.array.shape

    @property
    def nbytes(self) -> int:
        """Bytes in all."""
        return self.array.nbytes

    def chunks(self) -> Iterator[NDArray[Any]]:
        """All at once."""
        yield np.ascontiguousarray(self.array)


@dataclass(frozen=True)
class _Finite:
    """A float16 tensor that is checked while it is written: wider numbers may have become infinite."""

    tensor: Tensor

    @property
    def name(self) -> str:
        return self.tensor.name

    @property
    def dtype(self) -> str:
        return self.tensor.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.tensor.shape

    @property
    def nbytes(self) -> int:
        return self.tensor.nbytes

    def chunks(self) -> Iterator[NDArray[Any]]:
        for chunk in self.tensor.chunks():
            if not np.isfinite(chunk).all():
                raise CompileError(
                    f"weight {self.name!r} holds numbers beyond the range of float16 (65504); "
                    "use --dtype bfloat16 or float32"
                )
            yield chunk


def write_files(staging: Staging, contents: EngineContents, progress: Any) -> None:
    """Write all but engine.json and the self-test.

    Args:
        staging: where to.
        contents: what.
        progress: its ``advance`` is told the bytes of weights.
    """
    weights = safetensors_writer.order(
        [_Finite(weight) if weight.dtype == "float16" else weight for weight in contents.weights]
    )
    staging.write_stream(WEIGHTS, safetensors_writer.pieces(weights), progress.advance)
    staging.write(plan_file.NAME, plan_file.to_bytes(contents.plan))
    staging.write("graph.onnx", contents.graph)
    staging.write("recipe.json", to_json(contents.recipe))
    staging.write("report.json", to_json(contents.report))
    staging.write(lora.NAME, to_json(strict.dump(contents.linears)))
    staging.write("tokenizer/generation_config.json", to_json(contents.generation_config))
    if contents.tokenizer is not None:
        for name, content in sorted(contents.tokenizer.files.items()):
            staging.write(f"tokenizer/{name}", content)


def add_part(
    staging: Staging, contents: EngineContents, part: DraftPart, recipe: Mapping[str, Any], report: Mapping[str, Any]
) -> EngineContents:
    """Record a part whose files are there, with its sections of recipe and report."""
    contents = replace(
        contents,
        recipe={**contents.recipe, part.name: recipe},
        report={**contents.report, part.name: report},
        parts=(*contents.parts, part),
    )
    staging.write("recipe.json", to_json(contents.recipe))
    write_manifest(staging, contents)
    return contents


def write_manifest(staging: Staging, contents: EngineContents) -> None:
    """Write engine.json for the files that are there."""
    files = {name: entry for name, entry in staging.files.items() if name != manifest_file.NAME}
    manifest = Manifest(
        format=manifest_file.FORMAT,
        llmc=llmc.__version__,
        target=contents.target,
        limits=contents.limits,
        model=contents.model,
        kv_cache=contents.kv_cache,
        files=files,
        inputs_sha256=hashlib.sha256(to_json(contents.recipe)).hexdigest(),
    )
    staging.write(manifest_file.NAME, manifest.to_bytes())


def write_selftest(staging: Staging, goldens: Sequence[Golden]) -> None:
    """Write the golden prompts."""
    tensors = [ArrayTensor(name, array) for name, array in selftest.to_arrays(goldens).items()]
    staging.write_stream(selftest.NAME, safetensors_writer.pieces(safetensors_writer.order(tensors)))


def to_json(value: Mapping[str, Any]) -> bytes:
    """The same bytes for the same content."""
    return (json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n").encode()
