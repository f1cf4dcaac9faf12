"""Medusa heads for tests, of models of script_models."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from checkpoints import safetensors_bytes
from script_models import T0, next_tokens, script_rows

HEADS, HIDDEN, VOCABULARY = 3, T0["hidden_size"], T0["vocab_size"]
TOKENS = np.random.default_rng(2).permutation(VOCABULARY)[:100].astype(np.int32)
"""The most frequent first."""


def write_heads(folder: Path, *, right: bool) -> Path:
    """Heads that leave their input as it is, with output layers of their own, or random ones, which share the model's.

    The first are always right. The others see the model's token, too.
    """
    random, following = np.random.default_rng(0), next_tokens([], VOCABULARY)
    tensors: dict[str, Any] = {}
    places = ahead = np.array([following[token] for token in range(VOCABULARY)])
    for head in range(HEADS):
        scale = 0.0 if right else 1.0
        tensors[f"{head}.0.linear.weight"] = (scale * random.normal(size=(HIDDEN, HIDDEN))).astype(np.float32)
        tensors[f"{head}.0.linear.bias"] = (scale * random.normal(size=HIDDEN)).astype(np.float32)
        ahead = places[ahead]
        if not right:
            tensors[f"{head}.token.weight"] = random.normal(size=(HIDDEN, HIDDEN)).astype(np.float32)
        if right:
            tensors[f"{head}.1.weight"] = output = np.empty((VOCABULARY, HIDDEN), np.float32)
            output[ahead] = script_rows()
    folder.mkdir()
    (folder / "medusa_lm_head.safetensors").write_bytes(safetensors_bytes(tensors))
    (folder / "tokens.safetensors").write_bytes(safetensors_bytes({"token_ids": TOKENS}))
    (folder / "config.json").write_text(json.dumps({"medusa_num_heads": HEADS, "medusa_num_layers": 1}))
    return folder
