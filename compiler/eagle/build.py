"""Puts an EAGLE layer into an engine that is being built: its plan, its weights and what it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir

from llmc.compiler import weights
from llmc.compiler.checkpoint import Checkpoint
from llmc.compiler.eagle.checkpoint import EAGLE_1, EAGLE_3, Eagle, read_eagle
from llmc.compiler.eagle.lowering import lower_eagle
from llmc.compiler.engine_writer import DraftPart, EngineContents, add_part, to_json
from llmc.compiler.features import HEAD, add_features, usual_layers
from llmc.compiler.lower import LoweredGraph
from llmc.compiler.lowering.builder import PackedWeight
from llmc.compiler.medusa.lowering import describe, embedding_step, output_factors, output_step
from llmc.compiler.progress import Progress
from llmc.compiler.quantize import locked
from llmc.compiler.quantize.build import predicted
from llmc.compiler.staging import Staging
from llmc.compiler.weights import Array
from llmc.errors import CheckpointError, UsageError
from llmc.runtime import strict
from llmc.runtime.eagle import PLAN, SPEC, TOKEN_IDS, WEIGHTS, EagleSpec

if TYPE_CHECKING:
    from llmc.compiler.api import Compiled
    from llmc.compiler.config import BuildConfig
    from llmc.compiler.weights import WeightSource
    from llmc.quantization.base import Method
    from llmc.runtime.lora import Linears

EMBEDDING = "embed_tokens.weight"
TITLES = {EAGLE_1: "EAGLE-1", EAGLE_3: "EAGLE-3"}


@dataclass(eq=False)
class EagleToBuild:
    """A checkpoint, and the layers of the model that it looks at; none: at what goes into the head."""

    eagle: Eagle
    layers: Sequence[int] = ()

    def add_outputs(self, graph: ir.Graph) -> None:
        """Let a graph return what the layer goes on with, and remember the layers.

        Raises:
            CompileError: the model has no such layers.
        """
        if self.eagle.kind == EAGLE_3:
            self.layers = self.eagle.layers or usual_layers(graph)
        add_features(graph, self.layers or [HEAD])


def open_eagle(config: BuildConfig) -> EagleToBuild | None:
    """Read the layer that the build is asked to include, before the model; None if it isn't.

    Raises:
        CheckpointError: it is damaged.
        UsageError: the build can't have one.
    """
    section = None if config.locked is None else locked.read(config.locked).get("eagle")
    if config.eagle is None:
        if section is not None:
            raise UsageError(f"--locked {config.locked}: that engine has an EAGLE layer; give it with --eagle DIR")
        return None
    if config.locked is not None and section is None:
        raise UsageError(f"--eagle: the build of {config.locked} had no such layer; leave the option away")
    return EagleToBuild(read_eagle(config.eagle, config.allow_hard_links))


def check_model(wanted: EagleToBuild, steps: LoweredGraph) -> None:
    """Refuse a layer of another model.

    Raises:
        CheckpointError: sizes differ.
        CompileError: the model has no product that makes the logits.
    """
    eagle, last = wanted.eagle, output_step(steps)
    widths = {view.shape[1].constant for view in steps.features}
    assert last.inputs[0] is not None, "a product has an input"
    width, vocabulary = last.inputs[0].shape[-1].constant, last.outputs[0].shape[-1].constant
    where = f"{eagle.path}: this {TITLES[eagle.kind]} layer is of another model:"
    if widths != {eagle.shape.target}:
        raise CheckpointError(f"{where} it goes on with rows of {eagle.shape.target} numbers, the model's have {width}")
    tokens, has_head = eagle.config["vocab_size"], "lm_head.weight" in eagle.tensors
    needs_all = EMBEDDING in eagle.tensors or not has_head
    if tokens > vocabulary or (needs_all and tokens != vocabulary):
        raise CheckpointError(f"{where} it has {tokens} tokens, the model {vocabulary}")
    if not has_head and (eagle.shape.vocabulary, eagle.shape.hidden) != (vocabulary, width):
        raise CheckpointError(
            f"{eagle.path}: has no lm_head.weight, and can't use the model's; add it to the checkpoint"
        )
    if EMBEDDING not in eagle.tensors and (embedding_step(steps) is None or eagle.shape.hidden != width):
        raise CheckpointError(f"{eagle.path}: has no {EMBEDDING}, and can't use the model's; add it to the checkpoint")


def add_eagle(
    wanted: EagleToBuild,
    staging: Staging,
    contents: EngineContents,
    compiled: Compiled,
    config: BuildConfig,
    progress: Progress,
) -> EngineContents:
    """Write the files of the layer into an engine that is complete otherwise; what is recorded of it is added.

    Raises:
        CompileError, CheckpointError: the layer can't be lowered.
    """
    progress.step("adding the EAGLE layer")
    eagle = wanted.eagle
    part, method, shares = eagle_part(wanted, compiled, config, contents.linears)
    lowered, sizes = part.write(staging, compiled.target, {tensor.name for tensor in contents.weights})
    staging.write(SPEC, to_json(strict.dump(EagleSpec(eagle.kind, compiled.dtype))))
    title, layers = TITLES[eagle.kind], list(wanted.layers)
    looks = f"goes on with what goes into layers {', '.join(map(str, layers))}" if layers else "goes on with the last"
    tokens = "" if eagle.token_ids is None else f", {len(eagle.token_ids)} tokens"
    report: dict[str, Any] = {
        "kind": eagle.kind,
        "layers": layers,
        "shown": f"{title}, {looks}{tokens}",
        "shares_embedding": shares,
        "quantization": describe(method),
        **sizes,
        "kv_bytes_per_token": part.kept_bytes(lowered),
    }
    return add_part(staging, contents, part, {"kind": eagle.kind, "layers": layers}, report)


def eagle_part(
    wanted: EagleToBuild, compiled: Compiled, config: BuildConfig, linears: Linears | None = None
) -> tuple[DraftPart, Method | None, bool]:
    """The layer as a plan of its own, how its weights are quantized, and whether it has the model's embeddings.

    ``linears``: as of `medusa.build.heads_part`.

    Raises:
        CompileError, CheckpointError: the layer can't be lowered.
    """
    eagle = wanted.eagle
    recipe = config.quantization_recipe
    method = None if recipe is None else recipe.method
    shares = EMBEDDING not in eagle.tensors or _is_the_models(eagle.tensors[EMBEDDING], compiled)
    graph = lower_eagle(
        eagle,
        compiled.steps,
        output_factors(compiled.steps, linears),
        shares,
        compiled.dtype,
        method,
        config.compute,
        compiled.limits.max_seq_len,
    )
    ids = () if eagle.token_ids is None else (PackedWeight(TOKEN_IDS, Array(eagle.token_ids)),)
    return DraftPart("eagle", (PLAN, WEIGHTS), graph, compiled.limits, compiled.dtype, ids), method, shares


def eagle_bytes(compiled: Compiled, config: BuildConfig) -> tuple[int, int]:
    """Of the layer's own weights, before anything is quantized or written, and of each token; 0: there is none."""
    if compiled.eagle is None:
        return 0, 0
    steps = compiled.steps if compiled.planned is None else predicted(compiled.planned)
    part, _, _ = eagle_part(compiled.eagle, replace(compiled, steps=steps), config)
    return part.sizes(compiled.target, steps.weights)


def _is_the_models(table: WeightSource, compiled: Compiled) -> bool:
    """Whether a table of embeddings holds the numbers of the model's, in the dtype of the engine."""
    step = embedding_step(compiled.steps)
    name = None if step is None or step.inputs[1] is None else step.inputs[1].buffer.name
    stored = compiled.steps.weights.get(str(name))
    source = stored.source if isinstance(stored, PackedWeight) else _source(compiled.checkpoint, str(name))
    if source is None or source.shape != table.shape:
        return False
    pieces = (weights.stream(weights.Cast(s, "float32"), 1 << 24) for s in (source, table))
    rounded = partial(np.ndarray.astype, dtype=weights.numpy_dtype(compiled.dtype))
    return all(np.array_equal(rounded(a), rounded(b)) for a, b in zip(*pieces, strict=True))


def _source(checkpoint: Checkpoint, name: str) -> WeightSource | None:
    return checkpoint.weight(name) if name in checkpoint.names else None
