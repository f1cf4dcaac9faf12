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
        *("qalora_group_size", "ensure_weight_tying", "lora_ga_config"),
    )
)
"""Keys that matter for training or loading only: the tensors say what is adapted, and by what rank."""

KNOWN = frozenset(("peft_type", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "bias", "fan_in_fan_out"))

OTHER_BASE = ("pissa", "olora", "loftq", "corda", "lora_ga")
"""Initialisations that change the weights of the base model."""

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class LowRank:
    """What is added to one linear: ``b`` [N, rank], the scale in it, times ``a`` [rank, K]."""

    a: Floats
    b: Floats


@dataclass(frozen=True)
class AdapterFile:
    """An adapter. ``modules``: by the path of the linear in the model. ``files``: the checksum and size of each."""

    path: Path
    modules: Mapping[str, LowRank]
    transposed: bool
    """Whether the adapted weights are stored as [K, N]."""
    files: Mapping[str, Mapping[str, Any]]

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
    modules = _pairs(tensors, config, str(path / WEIGHTS))
    entry = {"sha256": hashlib.sha256(config_bytes).hexdigest(), "size": len(config_bytes)}
    return AdapterFile(path, modules, bool(config.get("fan_in_fan_out")), {CONFIG: entry, WEIGHTS: weights_entry})


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
    if config.get("target_parameters"):
        raise CheckpointError(
            f"{where}: target_parameters {config['target_parameters']!r:.200}: parameters that are no linears, such as "
            "those of stacked experts, can't be adapted beside an engine or merged; merge them with PEFT and build that"
        )
    for key, value in config.items():
        if key not in MEANINGLESS and key not in KNOWN and value not in (None, False, [], {}, ""):
            raise CheckpointError(f"{where}: {key} {value!r:.80} is not supported")
    patterns = config.get("alpha_pattern") or {}
    if not isinstance(patterns, dict):
        raise CheckpointError(f"{where}: alpha_pattern must be an object")
    alphas = [config.get("lora_alpha"), *patterns.values()]
    if not all(isinstance(a, int | float) and not isinstance(a, bool) and abs(a) < 1e9 for a in alphas):
        raise CheckpointError(f"{where}: lora_alpha and alpha_pattern must be numbers")


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


def _pairs(tensors: Mapping[str, Floats], config: Mapping[str, Any], where: str) -> dict[str, LowRank]:
    halves: dict[str, dict[str, Floats]] = {}
    for name, tensor in tensors.items():
        match = re.fullmatch(r"(.+)\.lora_([AB])(?:\.default)?\.weight", name)
        if (embedding := re.fullmatch(r"(.+)\.lora_embedding_[AB](?:\.default)?", name)) is not None:
            raise CheckpointError(
                f"{where}: {embedding[1].removeprefix(PREFIX)} is an embedding; only linears can be adapted. Train "
                "without it in target_modules"
            )
        if match is None:
            raise CheckpointError(
                f"{where}: tensor {name!r} is not supported; expected lora_A and lora_B of linears (PEFT saves no "
                "others with save_embedding_layers=False)"
            )
        halves.setdefault(match[1].removeprefix(PREFIX), {})[match[2]] = tensor
    if not halves:
        raise CheckpointError(f"{where}: the adapter is empty")
    modules = {}
    for module, pair in sorted(halves.items()):
        if set(pair) != {"A", "B"}:
            raise CheckpointError(f"{where}: {module} has lora_{min(pair)} only")
        a, b = pair["A"], pair["B"]
        if a.ndim != 2 or b.ndim != 2 or a.shape[0] != b.shape[1] or not 1 <= a.shape[0] <= MAX_RANK:
            raise CheckpointError(
                f"{where}: {module} has lora_A {list(a.shape)} and lora_B {list(b.shape)}; expected [rank, K] and "
                f"[N, rank], rank at most {MAX_RANK}"
            )
        alpha = _pattern_value(config.get("alpha_pattern") or {}, module, config["lora_alpha"])
        rank = a.shape[0]
        scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
        modules[module] = LowRank(a, b * np.float32(scale))
    return modules


def _pattern_value(patterns: Mapping[str, Any], module: str, otherwise: Any) -> Any:
    """The value of the first name that is a path's end. PEFT also takes patterns; one from a file can take for ever."""
    for name, value in patterns.items():
        if not re.fullmatch(r"[\w.]+", name):
            raise CheckpointError(f"{CONFIG}: alpha_pattern: {name!r:.80} is not the name of a module; write those out")
        if module == name or module.endswith(f".{name}"):
            return value
    return otherwise
