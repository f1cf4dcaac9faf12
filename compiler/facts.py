"""What an engine records about its model and its build."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from concurrent.futures import CancelledError, ThreadPoolExecutor
from dataclasses import asdict
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray

import llmc
from llmc.compiler.checkpoint import Checkpoint
from llmc.compiler.config import BuildConfig, Limits
from llmc.compiler.estimate import Estimate
from llmc.compiler.lower import LoweredModel
from llmc.compiler.model_config import eos_token_ids, generation_defaults, token_id
from llmc.compiler.quantize import locked
from llmc.compiler.quantize.decisions import method_text
from llmc.compiler.tokenizer import FrozenTokenizer
from llmc.compiler.weights import WeightSource, stream
from llmc.errors import CheckpointError, UsageError
from llmc.runtime.adapter_file import read_adapter
from llmc.runtime.manifest import ModelFacts
from llmc.runtime.plan import Plan

if TYPE_CHECKING:
    from llmc.compiler.eagle.build import EagleToBuild
    from llmc.compiler.medusa.build import HeadsToBuild

POSITION_LIMITS = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "n_ctx",
    "seq_length",
    "max_sequence_length",
)
"""What configs call the number of positions that a model was made for."""

ANY_LENGTH = ("bloom", "mpt")
"""Model types without rotary embeddings whose positions have no table either (ALiBi)."""

PACKAGES = ("torch", "transformers", "onnx-ir", "numpy", "ml-dtypes", "tokenizers", "gguf")
"""Those whose version may change what a build makes."""


def model_limit(config: Any) -> int | None:
    """Positions that the model was made for; None if its config names none."""
    text = config.get_text_config()
    for name in POSITION_LIMITS:
        if isinstance(value := getattr(text, name, None), int) and value > 0:
            return value
    return None


def limits(config: Any, build: BuildConfig) -> Limits:
    """The limits of the engine.

    Raises:
        UsageError: the model has a table of positions that is shorter than --max-seq-len.
    """
    longest = model_limit(config)
    result = build.limits(longest)
    text = config.get_text_config()
    rotary = getattr(text, "rope_parameters", None) or getattr(text, "alibi", False) or text.model_type in ANY_LENGTH
    if longest is not None and result.max_seq_len > longest and not rotary:
        raise UsageError(
            f"--max-seq-len {result.max_seq_len}: the model has a table of {longest} positions and can't go beyond it"
        )
    return result


class InputHashes:
    """Size and SHA-256 of every file that the build depends on, computed by a thread of its own.

    It looks for weights that are NaN or infinite, too: codes of quantized ones, and what they stand for, excepted.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._directory = checkpoint.directory
        self._names = checkpoint.directory.used
        self._stop = threading.Event()
        self._pool = ThreadPoolExecutor(1)
        self._future = self._pool.submit(self._hash_all)

    def result(self) -> dict[str, dict[str, Any]]:
        """Wait for them: {name: {"sha256": ..., "size": ...}}. Raises CheckpointError: a weight is not finite."""
        return self._future.result()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._pool.shutdown()

    def _hash_all(self) -> dict[str, dict[str, Any]]:
        seen: set[int] = set()
        for name in self._checkpoint.names:
            source = self._checkpoint.weight(name)
            if id(source) not in seen and not hasattr(source, "quantized_rows"):
                self._check_numbers(name, source)
            seen.add(id(source))  # of tied ones the first is looked at
        return {
            n: {"sha256": self._directory.sha256(n, self._check), "size": self._directory.size(n)} for n in self._names
        }

    def _check_numbers(self, name: str, source: WeightSource) -> None:
        row = 0
        for chunk in map(np.atleast_1d, stream(source)):
            self._check(0)
            if not _finite(chunk):
                first = np.argwhere(~np.isfinite(chunk))[0].tolist()
                place = [row + first[0], *first[1:]]
                raise CheckpointError(
                    f"{self._checkpoint.path}: numbers of {name} are not finite, the first at {place}; "
                    "the checkpoint is damaged: get it again"
                )
            row += len(chunk)

    def _check(self, count: int) -> None:
        if self._stop.is_set():
            raise CancelledError


def _finite(array: NDArray[Any]) -> bool:
    if array.dtype.name == "bfloat16":  # isfinite() of ml_dtypes takes six times as long
        return not bool(((array.view(np.uint16) & 0x7F80) == 0x7F80).any())
    return array.dtype.kind in "iub" or bool(np.isfinite(array).all())


def model_facts(
    checkpoint: Checkpoint, notes: Mapping[str, str], plan: Plan, tokenizer: FrozenTokenizer | None, dtype: str
) -> ModelFacts:
    """What the runtime has to know."""
    config, generation, where = checkpoint.config, checkpoint.generation_config, str(checkpoint.path)
    ends = eos_token_ids(config, generation, where)
    bos = token_id("bos_token_id", config, generation, where)
    pad = token_id("pad_token_id", config, generation, where)
    return ModelFacts(
        architecture=config.architectures[0],
        model_type=config.model_type,
        parameters=checkpoint.parameters,
        dtype=dtype,
        vocab_size=plan.value(plan.logits).shape[1].constant,
        max_position_embeddings=model_limit(config),
        eos_token_ids=ends,
        bos_token_id=bos,
        pad_token_id=pad if pad is not None else (ends[0] if ends else None),
        add_bos=tokenizer is not None and bos is not None and bos in tokenizer.prefix_ids,
        add_eos=tokenizer is not None and any(i in tokenizer.suffix_ids for i in ends),
        rope="; ".join(f"{key}: {value}" for key, value in sorted(notes.items())),
    )


def generation_config(checkpoint: Checkpoint) -> dict[str, Any]:
    """Defaults of sampling."""
    return generation_defaults(checkpoint.generation_config, f"{checkpoint.path}: generation_config.json")


def recipe(config: BuildConfig, limits: Limits, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """All that is needed to build the engine again: options, versions, inputs."""
    options = {name: getattr(config, name) for name in locked.OPTIONS} | {"max_seq_len": limits.max_seq_len}
    recipe = config.quantization_recipe
    options["quantization"] = method_text(None if recipe is None else recipe.method)
    return {"options": options, "versions": versions(), "inputs": dict(inputs)}


def versions() -> dict[str, str]:
    """What an engine may depend on besides its inputs."""
    return {"llmc": llmc.__version__} | {name: version(name) for name in PACKAGES}


def report(
    checkpoint: Checkpoint,
    lowered: LoweredModel,
    sizes: Estimate,
    tokenizer: FrozenTokenizer | None,
    notes: Mapping[str, str],
) -> dict[str, Any]:
    """Sizes, memory, every weight with its dtype, and all that a user was warned of."""
    return {
        "sizes": {name: size for name, size in asdict(sizes).items() if name != "work_bytes"},  # it is gone by then
        "stored_in_checkpoint": dict(checkpoint.stored),
        "weights": weights(lowered),
        "ignored_tensors": list(checkpoint.ignored),
        "warnings": [*checkpoint.warnings, *(tokenizer.warnings if tokenizer else ())],
        "notes": dict(notes),
        "tokenizer_size": tokenizer.size if tokenizer else None,
    }


def weights(lowered: LoweredModel) -> dict[str, Any]:
    """All that are stored, by name."""
    return {
        weight.name: {"dtype": weight.dtype, "shape": list(weight.shape), "bytes": weight.nbytes}
        for weight in lowered.weights.values()
    }


def notes(checkpoint: Checkpoint, limits: Limits, dtype: str, kv_dtype: str) -> list[str]:
    """What a user is told before anything is built."""
    found, longest = [], model_limit(checkpoint.config)
    if longest is not None and limits.max_seq_len > longest:
        found.append(
            f"--max-seq-len {limits.max_seq_len} is more than the {longest} positions that the model was made for"
        )
    if dtype == "float16" != checkpoint.dtype:
        found.append(
            "activations stay float32, so those beyond the range of float16 (65504) are kept; "
            f"keys and values are stored as {kv_dtype}"
        )
    return found


def added_files(
    config: BuildConfig, heads: HeadsToBuild | None, eagle: EagleToBuild | None
) -> dict[str, dict[str, Any]]:
    """Hashes of what is put into the engine besides the model: an adapter, Medusa heads, an EAGLE layer."""
    lists: dict[str, Mapping[str, Mapping[str, Any]]] = {
        "lora": {} if config.lora is None else read_adapter(config.lora).files,
        "medusa": {} if heads is None else heads.heads.files,
        "eagle": {} if eagle is None else eagle.eagle.files,
    }
    return {f"{kind}/{name}": dict(entry) for kind, files in lists.items() for name, entry in files.items()}
