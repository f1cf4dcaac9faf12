"""What `llmc inspect` tells of a model that is not compiled yet."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from llmc.compiler.checkpoint import Checkpoint
from llmc.compiler.facts import model_limit
from llmc.compiler.model_config import eos_token_ids


def describe_model(path: Path) -> dict[str, Any]:
    """Architecture, numbers, files, and about how large an engine would be."""
    checkpoint = Checkpoint.open(path)
    weights = {name: checkpoint.weight(name) for name in checkpoint.names}
    distinct = {id(source): source for source in weights.values()}.values()
    item = 4 if checkpoint.dtype == "float32" else 2
    sizes = [math.prod(source.shape) * (item if len(source.shape) > 1 else 4) for source in distinct]
    config = checkpoint.config
    return {
        "architecture": config.architectures[0],
        "model_type": config.model_type,
        "parameters": checkpoint.parameters,
        "dtype": checkpoint.dtype,
        "stored": dict(checkpoint.stored),
        "model_limit": model_limit(config),
        "eos_token_ids": list(eos_token_ids(config, checkpoint.generation_config, str(path))),
        "weight_bytes": sum(sizes),
        "largest_weight_bytes": max(sizes),
        "files": {name: checkpoint.directory.size(name) for name in checkpoint.directory.used},
        "ignored_tensors": list(checkpoint.ignored),
        "warnings": list(checkpoint.warnings),
        "tensors": {name: {"dtype": source.dtype, "shape": list(source.shape)} for name, source in weights.items()},
    }
