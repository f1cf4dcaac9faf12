"""Reads LoRA adapters in PEFT's format: adapter_config.json and adapter_model.safetensors.

Low-rank adaptation (https://arxiv.org/abs/2106.09685): a linear gives y = W x + scale * B (A x), with A [rank, K] and
B [N, rank]; scale = alpha / rank, or with rslora (https://arxiv.org/abs/2312.03732) alpha / sqrt(rank).
"""

from __future__ import annotations

import hashlib
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmc.errors import CheckpointError
from llmc.runtime import strict
from llmc.runtime.safetensors_file import TensorInfo, read_header

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
MAX_CONFIG_BYTES, MAX_RANK = 1 << 20, 1024
PREFIX = "base_model.model."

MEANINGLESS = frozenset(
    (
        *("auto_mapping", "base_model_name_or_path", "revision", "inference_mode", "task_type", "lora_dropout"),
        *("init_lora_weights", "layers_pattern", "layers_to_transform", "target_modules", "exclude_modules", "r"),
        *("loftq_config", "eva_config", "corda_config", "megatron_config", "megatron_core", "peft_version"),
        *("qalora_group_size", "ensure_weight_tying", "lora_ga_config", "modules_to_save"),
    )
)
"""Keys that matter for training or loading only: the tensors say what is adapted, and by what rank."""

KNOWN = frozenset(
    (
        *("peft_type", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "bias", "fan_in_fan_out"),
        "target_parameters",
    )
)

PART = re.compile(r"(?P<module>.+)\.lora_(?P<kind>embedding_)?(?P<half>[AB])(?:\.default)?(?:(?(kind)|\.weight))")
"""The name of one of two matrices: of an embedding they are parameters, otherwise modules with a weight."""

OTHER_BASE = ("pissa", "olora", "loftq", "corda", "lora_ga")
"""Initialisations that change the weights of the base model."""

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class LowRank:
    """What is added to one linear: ``b`` [N, rank], the scale in it, times ``a`` [rank, K]."""

    a: Floats
    b: Floats


@dataclass(frozen=True)
class ParameterPair:
    """What is added to one of the ``parameters`` (their names in ``module``), whichever it fits.

    ``a`` [experts * rank, K] has the ranks of an expert one below the other; ``b`` [N, rank * experts], the scale in
    it, has the experts of a rank side by side.
    """

    module: str
    parameters: tuple[str, ...]
    a: Floats
    b: Floats


@dataclass(frozen=True)
class AdapterFile:
    """An adapter. ``modules``: by the path of the linear in the model. ``files``: the checksum and size of each.

    The rest can only be merged. ``embeddings``: as ``modules``, but a row of the weight is a token. ``parameters``: of
    no linear. ``replaced``: weights that were trained whole, by the name of the parameter.
    """

    path: Path
    modules: Mapping[str, LowRank]
    embeddings: Mapping[str, LowRank]
    parameters: tuple[ParameterPair, ...]
    replaced: Mapping[str, Floats]
    transposed: bool
    """Whether the adapted weights are stored as [K, N]."""
    files: Mapping[str, Mapping[str, Any]]

    @property
    def merged_only(self) -> list[str]:
        """What can't be adapted beside an engine."""
        pairs = (f"{pair.module}.{'/'.join(pair.parameters)}" for pair in self.parameters)
        return [*self.embeddings, *pairs, *self.replaced]

    @property
    def digest(self) -> str:
        """Of the content."""
        return hashlib.sha256("".join(str(entry["sha256"]) for entry in self.files.values()).encode()).hexdigest()


def read_adapter(path: Path | str) -> AdapterFile:
    """Open a directory that PEFT has saved.

    Raises:
        CheckpointError: it is damaged, or asks for something that is not supported; says what.
    """
    path = Path(path)
    config_bytes = _read(path / CONFIG, MAX_CONFIG_BYTES)
    config = strict.parse_json(config_bytes, str(path / CONFIG), CheckpointError)
    if not isinstance(config, dict):
        raise CheckpointError(f"{path / CONFIG}: expected an object")
    _check_config(config, str(path / CONFIG))
    tensors, weights_entry = _read_tensors(path / WEIGHTS)
    content = _content(tensors, config, str(path / WEIGHTS))
    entry = {"sha256": hashlib.sha256(config_bytes).hexdigest(), "size": len(config_bytes)}
    return AdapterFile(path, *content, bool(config.get("fan_in_fan_out")), {CONFIG: entry, WEIGHTS: weights_entry})


def _read(path: Path, limit: int) -> bytes:
    try:
        with path.open("rb") as file:
            content = file.read(limit + 1)
    except OSError as problem:
        raise CheckpointError(f"{path}: can't be read ({problem.strerror}); expected a LoRA adapter of PEFT") from None
    if len(content) > limit:
        raise CheckpointError(f"{path}: more than the {limit} bytes that are read")
    return content


def _check_config(config: Mapping[str, Any], where: str) -> None:
    """Whatever could change the result and is not known is refused."""
    if config.get("peft_type") != "LORA":
        raise CheckpointError(f"{where}: peft_type {config.get('peft_type')!r} is not supported; supported: LORA")
    start = config.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(OTHER_BASE):
        raise CheckpointError(
            f"{where}: init_lora_weights {start!r} changes the base model; save the adapter with "
            "path_initial_model_for_weight_conversion, which makes an ordinary one"
        )
    if config.get("bias", "none") != "none":
        raise CheckpointError(f"{where}: bias {config['bias']!r} is not supported: biases of the model must stay")
    targets = config.get("target_parameters") or []
    if not isinstance(targets, list) or not all(isinstance(t, str) and "." in t for t in targets):
        raise CheckpointError(f"{where}: target_parameters must be a list of names such as experts.down_proj")
    for key, value in config.items():
        if key not in MEANINGLESS and key not in KNOWN and value not in (None, False, [], {}, ""):
            raise CheckpointError(f"{where}: {key} {value!r:.80} is not supported")
    patterns = config.get("alpha_pattern") or {}
    if not isinstance(patterns, dict):
        raise CheckpointError(f"{where}: alpha_pattern must be an object")
    alphas = [config.get("lora_alpha"), *patterns.values()]
    if not all(isinstance(a, int | float) and not isinstance(a, bool) and abs(a) < 1e9 for a in alphas):
        raise CheckpointError(f"{where}: lora_alpha and alpha_pattern must be numbers")
    if targets and not (
        type(config.get("r")) is int and 1 <= config["r"] <= MAX_RANK and not config.get("rank_pattern")
    ):
        raise CheckpointError(f"{where}: target_parameters need one rank r, from 1 to {MAX_RANK}, and no rank_pattern")


def _read_tensors(path: Path) -> tuple[dict[str, Floats], dict[str, Any]]:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as problem:
        raise CheckpointError(f"{path}: can't be opened ({problem.strerror}); only safetensors are read") from None
    with os.fdopen(fd, "rb") as file:
        header = read_header(fd, str(path), CheckpointError)
        content = file.read()
    tensors = {name: _floats(content, tensor, str(path)) for name, tensor in header.tensors.items()}
    return tensors, {"sha256": hashlib.sha256(content).hexdigest(), "size": len(content)}


def _floats(content: bytes, tensor: TensorInfo, where: str) -> Floats:
    data = np.frombuffer(content, np.uint8)[tensor.begin : tensor.end]
    if tensor.dtype == "bfloat16":
        values = (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    elif tensor.dtype in ("float32", "float16"):
        values = data.view(tensor.dtype).astype(np.float32)
    else:
        raise CheckpointError(f"{where}: tensor {tensor.name!r} has dtype {tensor.dtype}; expected floats")
    if not np.isfinite(values).all():
        raise CheckpointError(f"{where}: tensor {tensor.name!r} holds numbers that are not finite")
    return values.reshape(tensor.shape)


Content = tuple[dict[str, LowRank], dict[str, LowRank], tuple[ParameterPair, ...], dict[str, Floats]]


def _content(tensors: Mapping[str, Floats], config: Mapping[str, Any], where: str) -> Content:
    """What there is for linears, embeddings and other parameters, and what is replaced."""
    halves: dict[tuple[str, str], dict[str, Floats]] = {}
    replaced: dict[str, Floats] = {}
    for name, tensor in tensors.items():
        path = name.removeprefix(PREFIX)
        if (match := PART.fullmatch(path)) is not None:
            halves.setdefault((match["kind"] or "", match["module"]), {})[match["half"]] = tensor
        elif "lora_" not in path and path.endswith((".weight", ".bias")):
            replaced[path.replace(".base_layer.", ".")] = tensor
        else:
            raise CheckpointError(
                f"{where}: tensor {name!r} is not supported; expected lora_A and lora_B, lora_embedding_A and "
                "lora_embedding_B, or the weight of a module that was trained whole"
            )
    if not halves and not replaced:
        raise CheckpointError(f"{where}: the adapter is empty")
    modules: dict[str, LowRank] = {}
    embeddings: dict[str, LowRank] = {}
    parameters: list[ParameterPair] = []
    for (kind, path), pair in sorted(halves.items()):
        module = path.replace(".base_layer", "")
        targets = _parameters_of(module, config)
        low = _pair(path, pair, config, where, None if not targets else int(config["r"]))
        if kind:
            embeddings[module] = low
        elif targets:
            parameters.append(ParameterPair(module, targets, low.a, low.b))
        else:
            modules[module] = low
    return modules, embeddings, tuple(parameters), replaced


def _pair(module: str, pair: Mapping[str, Floats], config: Mapping[str, Any], where: str, rank: int | None) -> LowRank:
    """Both halves, the scale in one of them. ``rank``: if it is not that of the halves, which hold several experts."""
    if set(pair) != {"A", "B"}:
        raise CheckpointError(f"{where}: {module} has lora_{min(pair)} only")
    a, b = pair["A"], pair["B"]
    rows = a.shape[0] if a.ndim == 2 else 0
    if b.ndim != 2 or rows != b.shape[1] or not rows or rows % (rank or 1) or (rank is None and rows > MAX_RANK):
        raise CheckpointError(
            f"{where}: {module} has lora_A {list(a.shape)} and lora_B {list(b.shape)}; expected [rank, K] and "
            f"[N, rank], rank at most {MAX_RANK}" + (f", for each expert {rank}" if rank else "")
        )
    alpha = _pattern_value(config.get("alpha_pattern") or {}, module, config["lora_alpha"])
    rank = rank or rows
    scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    return LowRank(a, b * np.float32(scale))


def _parameters_of(module: str, config: Mapping[str, Any]) -> tuple[str, ...]:
    """The names in the module that target_parameters has."""
    targets = (str(target).rpartition(".") for target in config.get("target_parameters") or ())
    return tuple(sorted({name for parent, _, name in targets if f".{module}".endswith(f".{parent}")}))


def _pattern_value(patterns: Mapping[str, Any], module: str, otherwise: Any) -> Any:
    """The value of the first name that is a path's end. PEFT also takes patterns; one from a file can take for ever."""
    for name, value in patterns.items():
        if not re.fullmatch(r"[\w.]+", name):
            raise CheckpointError(f"{CONFIG}: alpha_pattern: {name!r:.80} is not the name of a module; write those out")
        if module == name or module.endswith(f".{name}"):
            return value
    return otherwise
