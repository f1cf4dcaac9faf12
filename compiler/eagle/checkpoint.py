"""EAGLE layers as files: the layouts of Hugging Face checkpoints, read with strict checks.

    config.json        as of a Llama with one layer; EAGLE-3 also has draft_vocab_size, target_hidden_size (if the model
                       is wider or narrower), norm_before_residual, and which layers of the model it looks at
    model.safetensors  EAGLE-1: fc [H, 2H], layers.0.* without input_layernorm
                       EAGLE-3: fc [H, 3M], midlayer.* (or layers.0.*) with input_layernorm, hidden_norm and products
                       q, k, v of 2H columns; norm, lm_head [D, H], d2t [D], t2d [V]
                       both may have embed_tokens [V, H]

Row i of EAGLE-1 is fc(embedding of token i + 1, what went into the head of the model at token i), a decoder layer, and
the model's own head. Row i of EAGLE-3 is the layer on both norms side by side, embedding first; fc makes its feature of
what went into three layers of the model. Token d of the draft is token d + d2t[d] of the model. See arXiv:2401.15077
and arXiv:2503.01840.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmc.compiler import weights
from llmc.compiler.model_directory import ModelDirectory
from llmc.compiler.rope import SWITCHING
from llmc.compiler.safetensors_file import FileTensor, SafetensorsFile
from llmc.errors import CheckpointError
from llmc.runtime import strict

CONFIG, WEIGHTS, PICKLE = "config.json", "model.safetensors", "pytorch_model.bin"
EAGLE_1, EAGLE_3 = "eagle", "eagle3"
LAYERS = "eagle_aux_hidden_state_layer_ids"

FLOATS = ("float32", "float16", "bfloat16")
ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "relu": "relu"}
_NAME = re.compile(r"(?:model\.)?(?:(?:midlayer|layers\.0)\.)?(.+)")
_BUFFERS = frozenset(("self_attn.rotary_emb.inv_freq", "t2d"))
_NAMES = re.compile(
    r"(fc|self_attn\.[qkvo]_proj)\.(weight|bias)|mlp\.(gate|up|down)_proj\.weight|(input_layernorm|hidden_norm|"
    r"post_attention_layernorm|norm|lm_head|embed_tokens)\.weight|d2t"
)


@dataclass(frozen=True)
class Shape:
    """Sizes of a layer. ``target``: hidden size of the model. ``vocabulary``: tokens that the draft knows."""

    hidden: int
    target: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    vocabulary: int


@dataclass(frozen=True, eq=False)
class Eagle:
    """A checkpoint. ``kind``: EAGLE_1 or EAGLE_3. ``tensors``: by name, without what comes before a layer's own names.

    Attributes:
        layers: of the model, into which what goes is a part of a feature; None: the usual three, or the head of the
            model for EAGLE-1.
        token_ids: the token of the model for each of the draft's; None: they are the same.
        norm_first: what is added to the output of attention is the norm of the feature.
        files: SHA-256 and size of what was read.
    """

    path: Path
    kind: str
    shape: Shape
    function: str
    epsilon: float
    layers: tuple[int, ...] | None
    norm_first: bool
    config: Mapping[str, Any]
    tensors: Mapping[str, FileTensor]
    token_ids: NDArray[np.int32] | None
    files: Mapping[str, Mapping[str, Any]]


def read_eagle(path: Path, allow_hard_links: bool = False) -> Eagle:
    """Open a checkpoint and check all but its numbers, which are read later.

    Raises:
        CheckpointError: files are missing or pickles, or tensors are missing, left over or of another size.
    """
    directory = ModelDirectory(path, allow_hard_links)
    name = _file_name(directory)
    config = _Config(directory)
    tensors = _tensors(SafetensorsFile(directory, name), str(path / name))
    kind = EAGLE_3 if "hidden_norm.weight" in tensors else EAGLE_1
    if (count := config.size("num_hidden_layers", 1)) != 1:
        raise CheckpointError(f"{config.where}: num_hidden_layers is {count}; only drafts of one layer are supported")
    activation = config.value("hidden_act", "silu")
    if activation not in ACTIVATIONS:
        raise CheckpointError(f"{config.where}: hidden_act {activation!r}; known: {', '.join(ACTIVATIONS)}")
    ropes = config.value("rope_parameters", config.value("rope_scaling", {}))
    rope = ropes.get("rope_type", ropes.get("type")) if isinstance(ropes, dict) else ropes
    if rope in SWITCHING:
        raise CheckpointError(f"{config.where}: rope {rope!r} of a draft layer is not supported")
    epsilon = config.value("rms_norm_eps", 1e-6)
    if not isinstance(epsilon, float) or not 0 < epsilon < 1:
        raise CheckpointError(f"{config.where}: rms_norm_eps is {json.dumps(epsilon)}, expected a small number")
    shape = _shape(config, kind, tensors)
    _check(tensors, kind, shape, config, str(path / name))
    ids = None if kind == EAGLE_1 else _token_ids(tensors, shape, config.size("vocab_size"), str(path / name))
    layers = None if kind == EAGLE_1 else _layers(config)
    first = config.value("norm_before_residual", False) is True
    files = {n: {"sha256": directory.sha256(n), "size": directory.size(n)} for n in directory.used}
    return Eagle(path, kind, shape, ACTIVATIONS[activation], epsilon, layers, first, config.values, tensors, ids, files)


class _Config:
    def __init__(self, directory: ModelDirectory) -> None:
        self.where = str(directory.path / CONFIG)
        values = strict.parse_json(directory.read(CONFIG), self.where, CheckpointError)
        if not isinstance(values, dict):
            raise CheckpointError(f"{self.where}: expected an object")
        self.values: dict[str, Any] = values

    def value(self, key: str, default: Any) -> Any:
        found = self.values.get(key)
        return default if found is None else found

    def size(self, key: str, default: int | None = None) -> int:
        value = self.value(key, default)
        if type(value) is not int or not 1 <= value < 1 << 31:
            raise CheckpointError(f"{self.where}: {key} is {json.dumps(value)}, expected a positive number")
        return value


def _file_name(directory: ModelDirectory) -> str:
    if directory.has(WEIGHTS):
        return WEIGHTS
    if directory.has(PICKLE):
        raise CheckpointError(
            f"{directory.path / PICKLE}: a pickle, which may run code when it is opened, and is not read. Convert it "
            f'where you trust it: safetensors.torch.save_file(torch.load(FILE, weights_only=True), "{WEIGHTS}")'
        )
    raise CheckpointError(f"{directory.path}: there is no {WEIGHTS}; is this an EAGLE layer?")


def _tensors(file: SafetensorsFile, where: str) -> dict[str, FileTensor]:
    """By the names that both layouts share; buffers that follow from others are left away."""
    found: dict[str, FileTensor] = {}
    for name in file.header.tensors:
        match = _NAME.fullmatch(name)
        short = name if match is None else match[1]
        if short in _BUFFERS:
            continue
        if not _NAMES.fullmatch(short):
            raise CheckpointError(f"{where}: tensor {name!r} is none of an EAGLE layer (EAGLE-1 or EAGLE-3)")
        if short in found:
            raise CheckpointError(f"{where}: tensor {name!r} is there under two names")
        found[short] = file.tensor(name)
    return found


def _shape(config: _Config, kind: str, tensors: Mapping[str, FileTensor]) -> Shape:
    hidden, heads = config.size("hidden_size"), config.size("num_attention_heads")
    vocabulary = config.size("vocab_size")
    return Shape(
        hidden=hidden,
        target=config.size("target_hidden_size", hidden) if kind == EAGLE_3 else hidden,
        heads=heads,
        kv_heads=config.size("num_key_value_heads", heads),
        head_dim=config.size("head_dim", hidden // heads),
        inner=config.size("intermediate_size"),
        vocabulary=config.size("draft_vocab_size", vocabulary) if kind == EAGLE_3 else vocabulary,
    )


def _check(tensors: Mapping[str, FileTensor], kind: str, shape: Shape, config: _Config, where: str) -> None:
    """That there are all tensors, of the right sizes, and no others."""
    hidden, inputs = shape.hidden, (1 if kind == EAGLE_1 else 2) * shape.hidden
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    if shape.heads % shape.kv_heads or shape.head_dim % 2:
        raise CheckpointError(f"{config.where}: {shape.heads} heads of {shape.head_dim} share {shape.kv_heads} keys")
    expected: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, 2 * hidden if kind == EAGLE_1 else 3 * shape.target),
        "self_attn.q_proj.weight": (queries, inputs),
        "self_attn.k_proj.weight": (keys, inputs),
        "self_attn.v_proj.weight": (keys, inputs),
        "self_attn.o_proj.weight": (hidden, queries),
        "mlp.gate_proj.weight": (shape.inner, hidden),
        "mlp.up_proj.weight": (shape.inner, hidden),
        "mlp.down_proj.weight": (hidden, shape.inner),
        "post_attention_layernorm.weight": (hidden,),
    }
    if kind == EAGLE_3:
        expected |= {f"{name}.weight": (hidden,) for name in ("input_layernorm", "hidden_norm", "norm")}
    optional: dict[str, tuple[int, ...]] = {
        "embed_tokens.weight": (config.size("vocab_size"), hidden),
        "lm_head.weight": (shape.vocabulary, hidden),
        "fc.bias": (hidden,),
        "self_attn.o_proj.bias": (hidden,),
    }
    biases = [f"self_attn.{name}_proj.bias" for name in "qkv"]
    if any(name in tensors for name in biases):
        expected |= dict(zip(biases, ((queries,), (keys,), (keys,)), strict=True))
    if kind == EAGLE_3:
        optional["d2t"] = (shape.vocabulary,)
    for name, size in (expected | optional).items():
        tensor = tensors.get(name)
        if tensor is None and name in expected:
            raise CheckpointError(f"{where}: {name} is missing, which {kind} has")
        if tensor is not None and tensor.shape != size:
            raise CheckpointError(
                f"{where}: {name} has shape {list(tensor.shape)}, expected {list(size)} by {CONFIG} ({kind})"
            )
        if tensor is not None and name != "d2t" and tensor.dtype not in FLOATS:
            raise CheckpointError(f"{where}: {name} is {tensor.dtype}; expected {', '.join(FLOATS)}")
    for name in tensors:
        if name not in expected and name not in optional:
            raise CheckpointError(f"{where}: {name} is left over; {kind} has none")


def _token_ids(
    tensors: Mapping[str, FileTensor], shape: Shape, vocabulary: int, where: str
) -> NDArray[np.int32] | None:
    if shape.vocabulary == vocabulary:
        return None
    tensor = tensors.get("d2t")
    if tensor is None or tensor.dtype not in ("int64", "int32"):
        raise CheckpointError(
            f"{where}: {shape.vocabulary} of {vocabulary} tokens are drafted, but there is no d2t of integers that "
            "says which"
        )
    ids = np.arange(shape.vocabulary) + weights.read(tensor)
    if ids.min() < 0 or ids.max() >= vocabulary or len(np.unique(ids)) != len(ids):
        raise CheckpointError(f"{where}: d2t names no {len(ids)} different tokens of {vocabulary}")
    result: NDArray[np.int32] = ids.astype(np.int32)
    return result


def _layers(config: _Config) -> tuple[int, ...] | None:
    """By what goes into them. In ``eagle_config``, layers are named by what comes out of them."""
    nested = config.value("eagle_config", {})
    found, more = config.value(LAYERS, None), 0
    if found is None and isinstance(nested, dict):
        found, more = nested.get(LAYERS), 1
    if found is None:
        return None
    if not isinstance(found, list) or len(found) != 3 or any(type(n) is not int or n < 0 for n in found):
        raise CheckpointError(f"{config.where}: {LAYERS} is {json.dumps(found)}, expected three numbers of layers")
    return tuple(number + more for number in found)
