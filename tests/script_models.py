"""Models whose greedy text is known: the next token is a fixed permutation of the last one.

o_proj and down_proj are zero, rows of the embedding have unit length, and row next(i) of the head is row i of the
embedding.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from checkpoints import llama_arrays, write_model
from numpy.typing import NDArray

T0 = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 384,
    "max_position_embeddings": 512,
}
FILLER = 24
"""Tokens without an end that follow each chain."""


def next_tokens(chains: Sequence[Sequence[int]], size: int) -> dict[int, int]:
    """One cycle through the vocabulary that contains the chains, each followed by tokens of no meaning."""
    used = {token for chain in chains for token in chain}
    free = [i for i in range(size - 1, -1, -1) if i not in used]
    cycle: list[int] = []
    for chain in chains:
        cycle += [*chain, *free[:FILLER]]
        del free[:FILLER]
    cycle += free
    return dict(pairwise([*cycle, cycle[0]]))


def script_rows() -> NDArray[np.float32]:
    """The embeddings of the tokens."""
    rows = np.random.default_rng(0).normal(size=(T0["vocab_size"], T0["hidden_size"])).astype(np.float32)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def write_script_model(
    folder: Path,
    chains: Sequence[Sequence[int]],
    spec: dict[str, Any] | None = None,
    template: str = "",
    add_bos: bool = False,
    **config: Any,
) -> Path:
    """``spec``: of the tokenizer; None: there is none."""
    arrays = llama_arrays(**T0)
    arrays["model.embed_tokens.weight"] = rows = script_rows()
    head = arrays["lm_head.weight"] = np.empty_like(rows)
    for token, following in next_tokens(chains, len(rows)).items():
        head[following] = rows[token]
    for name, array in arrays.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            array[:] = 0
        elif array.ndim == 1:
            array[:] = 1
    write_model(folder, arrays, **T0, **config)
    if spec is None:
        return folder
    if add_bos:
        post = [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
        tokens = {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}}
        spec["post_processor"] = {
            "type": "TemplateProcessing",
            "single": post,
            "pair": [*post, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": tokens,
        }
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "add_bos_token": add_bos,
        "chat_template": template,
    }
    (folder / "tokenizer.json").write_text(json.dumps(spec))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder
