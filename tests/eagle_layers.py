"""EAGLE layers for tests: random checkpoints, and what they compute, in plain torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from checkpoints import safetensors_bytes
from numpy.typing import NDArray
from script_models import T0
from torch import Tensor
from torch.nn import functional

Arrays = dict[str, NDArray[Any]]


def config_of(kind: str, **changes: Any) -> dict[str, Any]:
    values: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3" if kind == "eagle3" else "LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 60,
        "intermediate_size": 76,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 5000.0,
        "vocab_size": 131,
        "max_position_embeddings": 512,
    }
    if kind == "eagle3":
        values["draft_vocab_size"] = 50
    return values | changes


def random_layer(kind: str, config: dict[str, Any], seed: int = 0) -> Arrays:
    """By the names of the checkpoints that the authors publish."""
    random, hidden, size = np.random.default_rng(seed), config["hidden_size"], config["head_dim"]
    inputs = hidden * (2 if kind == "eagle3" else 1)
    queries, keys = config["num_attention_heads"] * size, config["num_key_value_heads"] * size
    layer = "midlayer." if kind == "eagle3" else "layers.0."
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, 3 * config.get("target_hidden_size", hidden) if kind == "eagle3" else 2 * hidden),
        f"{layer}self_attn.q_proj.weight": (queries, inputs),
        f"{layer}self_attn.k_proj.weight": (keys, inputs),
        f"{layer}self_attn.v_proj.weight": (keys, inputs),
        f"{layer}self_attn.o_proj.weight": (hidden, queries),
        f"{layer}mlp.gate_proj.weight": (config["intermediate_size"], hidden),
        f"{layer}mlp.up_proj.weight": (config["intermediate_size"], hidden),
        f"{layer}mlp.down_proj.weight": (hidden, config["intermediate_size"]),
        f"{layer}post_attention_layernorm.weight": (hidden,),
    }
    if kind == "eagle3":
        shapes |= {f"{layer}{name}.weight": (hidden,) for name in ("input_layernorm", "hidden_norm")}
        shapes |= {"norm.weight": (hidden,), "lm_head.weight": (config["draft_vocab_size"], hidden)}
    else:
        shapes["fc.bias"] = (hidden,)
    arrays: Arrays = {
        name: random.normal(1 if len(shape) == 1 else 0, 0.3 if "norm" in name else 0.15, shape).astype(np.float32)
        for name, shape in shapes.items()
    }
    if kind == "eagle3":
        chosen = np.sort(random.permutation(config["vocab_size"])[: config["draft_vocab_size"]])
        arrays["d2t"] = chosen - np.arange(len(chosen))
        arrays["t2d"] = np.isin(np.arange(config["vocab_size"]), chosen)
    return arrays


def write_layer(folder: Path, arrays: Arrays, config: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    aligned = dict(sorted(arrays.items(), key=lambda item: -item[1].itemsize))
    (folder / "model.safetensors").write_bytes(safetensors_bytes(aligned))
    return folder


def good_layer(kind: str, following: dict[int, int], rows: Any, noise: float) -> tuple[dict[str, Any], dict[str, Any]]:
    """For a model whose next token follows from the last: what the row of the last token says, plus noise."""
    size = len(rows)
    config = config_of(kind) | T0 | {"num_hidden_layers": 1, "num_key_value_heads": 4}
    config |= {"draft_vocab_size": size - 4, "norm_before_residual": True}
    config["eagle_aux_hidden_state_layer_ids"] = [0, 1, 1]
    arrays = random_layer(kind, config)
    for name, array in arrays.items():
        if name != "d2t" and not name.endswith(("q_proj.weight", "k_proj.weight")):
            array[:] = 0
    eye, rng = np.eye(T0["hidden_size"], dtype=np.float32), np.random.default_rng(1)
    if kind == "eagle":
        arrays["fc.weight"][:, : len(eye)] = 20 * eye
        arrays["fc.weight"] += noise * rng.normal(size=arrays["fc.weight"].shape).astype(np.float32)
        return arrays, config
    for name in ("q", "k"):  # each row looks at itself
        arrays[f"midlayer.self_attn.{name}_proj.weight"][:] = np.concatenate([20 * eye, 0 * eye], 1)
    arrays["midlayer.self_attn.v_proj.weight"][:, : len(eye)] = eye
    arrays["midlayer.self_attn.o_proj.weight"][:] = eye
    for name in ("midlayer.input_layernorm.weight", "norm.weight"):
        arrays[name][:] = 1
    ids = np.arange(size - 4) + arrays["d2t"]
    before = {token: last for last, token in following.items()}
    arrays["lm_head.weight"] = 3 * rows[[before[token] for token in ids]]
    arrays["lm_head.weight"] += noise * rng.normal(size=arrays["lm_head.weight"].shape).astype(np.float32)
    return arrays, config


class Reference:
    """One layer on whole sequences, without a cache. ``embedding`` [V, H], ``head`` [V, H]: those of the model."""

    def __init__(self, kind: str, arrays: Arrays, config: dict[str, Any], embedding: Tensor, head: Tensor) -> None:
        self.kind, self.config = kind, config
        self.w = {n.split("layer.")[-1].removeprefix("layers.0."): torch.tensor(a) for n, a in arrays.items()}
        self.embedding, self.output = embedding, head

    def join(self, features: Tensor) -> Tensor:
        """What the layer goes on with [T, H], of what the model computed."""
        return features if self.kind == "eagle" else features @ self.w["fc.weight"].T

    def rows(self, hidden: Tensor, tokens: Tensor, positions: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Features [T, H] and logits of rows that see what ``mask`` [T, T] says."""
        embedded = self.embedding[tokens]
        if self.kind == "eagle":
            x = torch.cat([embedded, hidden], -1) @ self.w["fc.weight"].T + self.w["fc.bias"]
            residual = x
        else:
            normed = self.norm(hidden, "hidden_norm")
            x = torch.cat([self.norm(embedded, "input_layernorm"), normed], -1)
            residual = normed if self.config.get("norm_before_residual") else hidden
        total = residual + self.attend(x, positions, mask)
        y = self.norm(total, "post_attention_layernorm")
        gated = functional.silu(y @ self.w["mlp.gate_proj.weight"].T) * (y @ self.w["mlp.up_proj.weight"].T)
        features = total + gated @ self.w["mlp.down_proj.weight"].T
        if self.kind == "eagle":
            return features, features @ self.output.T
        return features, self.norm(features, "norm") @ self.w["lm_head.weight"].T

    def attend(self, x: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        count, shared, size = (self.config[n] for n in ("num_attention_heads", "num_key_value_heads", "head_dim"))
        q, k, v = (x @ self.w[f"self_attn.{n}_proj.weight"].T for n in "qkv")
        for n, part in (("q", q), ("k", k), ("v", v)):
            if f"self_attn.{n}_proj.bias" in self.w:
                part += self.w[f"self_attn.{n}_proj.bias"]
        q, k, v = q.view(-1, count, size), k.view(-1, shared, size), v.view(-1, shared, size)
        q, k = self.turn(q, positions), self.turn(k, positions)
        k, v = (part.repeat_interleave(count // shared, 1) for part in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * size**-0.5
        weights = scores.masked_fill(~mask, -torch.inf).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, v).flatten(1) @ self.w["self_attn.o_proj.weight"].T

    def turn(self, x: Tensor, positions: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        rates = self.config["rope_theta"] ** (-torch.arange(half) / half)
        angles = positions[:, None, None] * rates
        a, b = x[..., :half], x[..., half:]
        return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1)

    def norm(self, x: Tensor, name: str) -> Tensor:
        scale = x.pow(2).mean(-1, keepdim=True).add(self.config["rms_norm_eps"]).rsqrt()
        return x * scale * self.w[f"{name}.weight"]
