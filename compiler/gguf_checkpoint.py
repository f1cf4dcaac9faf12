"""A GGUF file as a Hugging Face checkpoint: config, and tensors under transformers' names and in its layouts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmc.compiler.conversion import permute_rows
from llmc.compiler.gguf_blocks import quantized
from llmc.compiler.gguf_file import BLOCKS, BlockTensor, GgufFile
from llmc.compiler.model_config import make_config
from llmc.compiler.model_directory import ModelDirectory
from llmc.compiler.weights import Concat, Elementwise, Reshape, Transpose, WeightSource, read
from llmc.errors import CheckpointError, CompileError

Values = dict[str, Any]
Tensors = dict[str, WeightSource]

SAME_MATRIX = 0.2
"""Two quantizations of one matrix differ by 5 to 10 % of its norm; two trained matrices by more than 100 %."""

SAMPLED_ROWS = 256

LLAMA_KEYS = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.key_length": "head_dim",
    "rope.freq_base": "rope_theta",
}
"""Metadata key without the architecture's name: field of the config. Nearly all decoders use these."""

GEMMA_KEYS = LLAMA_KEYS | {
    "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
MOE_KEYS = LLAMA_KEYS | {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}
IGNORED_KEYS = (
    "vocab_size",
    "attention.value_length",
    "rope.dimension_count",
    "tensor_data_layout",
    "attention.causal",
)
"""Checked against the tensors or the config instead, or without a meaning for it."""

LLAMA3_ROPE = tuple((factor, 1.0, 4.0, 8192) for factor in (8.0, 16.0, 32.0))
"""(factor, low_freq_factor, high_freq_factor, original length) of the models that were published with this rope."""


@dataclass(frozen=True)
class Architecture:
    """How llama.cpp stores a model type.

    ``keys`` maps metadata to the config, ``fix`` completes the config, ``undo`` restores a tensor. A key of the
    architecture that is not listed is an error.
    """

    model_type: str
    model: str
    keys: Mapping[str, str]
    fix: Callable[[Values, GgufFile], None] = lambda values, file: None
    undo: Callable[[str, WeightSource, Any], WeightSource] = lambda name, source, config: source
    defaults: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Shifted(Elementwise):
    """A tensor plus a constant."""

    by: float

    def rows(self, start: int, stop: int) -> NDArray[Any]:
        """Rows with the constant added."""
        return self.source.rows(start, stop).astype(np.float32) + np.float32(self.by)


@dataclass(frozen=True)
class GgufCheckpoint:
    """What a file says about the model, and its tensors."""

    file: GgufFile
    architecture: Architecture
    config: Any
    generation_config: Mapping[str, Any]
    warnings: list[str]

    @property
    def dtype(self) -> str:
        """The dtype that matrices are stored in; bfloat16 for quantized blocks."""
        kinds = {name: size for name, size in self.file.types.items() if name != "F32"}
        if not kinds:
            return "float32"
        return "float16" if max(sorted(kinds), key=lambda name: kinds[name]) == "F16" else "bfloat16"

    @property
    def quantized(self) -> list[str]:
        """The types of its blocks."""
        return [name for name in self.file.types if name in BLOCKS]

    def tensors(self, model: Any, dequantize: bool = False) -> Tensors:
        """Every tensor under the name of its parameter; one that has none keeps its own.

        Blocks give their codes too, unless ``dequantize``.
        """
        return _rename(self, model, dequantize)


def read_gguf(directory: ModelDirectory, name: str) -> GgufCheckpoint:
    """Open a GGUF file and make a config of its metadata.

    Raises:
        CheckpointError: it is damaged.
        CompileError: its architecture, or something that it asks for, is not supported.
    """
    file = GgufFile.open(directory, name)
    kind = file.metadata.get("general.architecture")
    if not isinstance(kind, str) or kind not in ARCHITECTURES:
        raise CompileError(
            f"{file.where}: GGUF architecture {kind!r} is not supported; supported: {', '.join(ARCHITECTURES)}. "
            "Build from the Hugging Face directory of the model instead"
        )
    if file.metadata.get("split.count", 1) > 1:
        raise CompileError(
            f"{file.where}: one part of a split file; join the parts with llama-gguf-split --merge first"
        )
    architecture = ARCHITECTURES[kind]
    values, warnings = _config_values(file, kind, architecture)
    config = make_config(values, file.where)
    _check_sizes(file, kind, config)
    return GgufCheckpoint(file, architecture, config, _generation_config(file), warnings)


def _config_values(file: GgufFile, kind: str, architecture: Architecture) -> tuple[Values, list[str]]:
    values: Values = {
        "model_type": architecture.model_type,
        "architectures": [architecture.model],
        "tie_word_embeddings": "output.weight" not in file.tensors,
        **architecture.defaults,
    }
    for key, value in file.metadata.items():
        name = key.removeprefix(f"{kind}.")
        if name == key or name in IGNORED_KEYS or name.startswith("rope.scaling."):
            continue
        if name not in architecture.keys:
            raise CompileError(f"{file.where}: the metadata key {key!r} ({value!r:.60}) is not supported for {kind}")
        if isinstance(value, list):
            raise CompileError(f"{file.where}: {key} differs by layer, which is not supported")
        values[architecture.keys[name]] = value
    if "token_embd.weight" not in file.tensors:
        raise CheckpointError(f"{file.where}: there is no tensor token_embd.weight")
    values["vocab_size"] = file.tensors["token_embd.weight"].shape[0]
    for name in ("bos", "eos"):
        values[f"{name}_token_id"] = file.metadata.get(f"tokenizer.ggml.{name}_token_id")
    values["pad_token_id"] = file.metadata.get("tokenizer.ggml.padding_token_id")
    _rope(values, file, kind)
    architecture.fix(values, file)
    return values, _tied_twice(values, file)


def _rope(values: Values, file: GgufFile, kind: str) -> None:
    """``rope_parameters`` from rope.freq_base, rope.scaling.* and the tensor of factors that Llama 3 brings."""
    rope: Values = {"rope_type": "default"}
    if "rope_theta" in values:
        rope["rope_theta"] = values.pop("rope_theta")
    prefix = f"{kind}.rope.scaling."
    scaling = {key.removeprefix(prefix): value for key, value in file.metadata.items() if key.startswith(prefix)}
    known = {"type", "factor", "original_context_length", "finetuned"}
    if unknown := sorted(set(scaling) - known):
        raise CompileError(f"{file.where}: the metadata key {prefix + unknown[0]!r} is not supported")
    kind_of_scaling = scaling.get("type", "none")
    if kind_of_scaling in ("linear", "yarn"):
        rope |= {"rope_type": kind_of_scaling, "factor": float(scaling.get("factor", 1.0))}
        if kind_of_scaling == "yarn":
            rope["original_max_position_embeddings"] = scaling.get("original_context_length")
    elif kind_of_scaling != "none":
        raise CompileError(f"{file.where}: rope scaling {kind_of_scaling!r} is not supported")
    if "rope_freqs.weight" in file.tensors:
        rope |= _llama3_rope(values, rope, file)
    values["rope_parameters"] = rope


def _llama3_rope(values: Values, rope: Values, file: GgufFile) -> Values:
    """llama.cpp stores what Llama 3's rope divides each frequency by; transformers wants the formula's parameters."""
    factors = read(file.tensors["rope_freqs.weight"]).astype(np.float64)
    head_dim = values.get("head_dim") or values["hidden_size"] // values["num_attention_heads"]
    if factors.shape == (head_dim // 2,):
        wavelengths = 2 * np.pi * float(rope.get("rope_theta", 10000.0)) ** (np.arange(0, head_dim, 2) / head_dim)
        for factor, low, high, original in LLAMA3_ROPE:
            smooth = np.clip((original / wavelengths - low) / (high - low), 0, 1)
            expected = 1 / ((1 - smooth) / factor + smooth)
            if np.allclose(factors, expected, rtol=1e-4):
                return {
                    "rope_type": "llama3",
                    "factor": factor,
                    "low_freq_factor": low,
                    "high_freq_factor": high,
                    "original_max_position_embeddings": original,
                }
    raise CompileError(f"{file.where}: the frequency factors in rope_freqs.weight are of no rope that is known")


def _tied_twice(values: Values, file: GgufFile) -> list[str]:
    """Quantizers may store the one matrix of tied embeddings twice, in two types: use the better copy for both."""
    if values["tie_word_embeddings"]:
        return []
    embedding, output = file.tensors["token_embd.weight"], file.tensors["output.weight"]
    if embedding.shape != output.shape:
        return []
    step = max(1, embedding.shape[0] // SAMPLED_ROWS)
    difference = norm = 0.0
    for row in range(0, embedding.shape[0], step):
        a, b = (t.rows(row, row + 1).astype(np.float64) for t in (embedding, output))
        difference += float(np.square(a - b).sum())
        norm += float(np.square(b).sum())
    if difference > SAME_MATRIX**2 * norm:
        return []
    values["tie_word_embeddings"] = True
    return ["token_embd.weight and output.weight are two quantizations of one matrix: the finer one is used for both"]


def _check_sizes(file: GgufFile, kind: str, config: Any) -> None:
    """What llama.cpp states besides, and transformers takes from elsewhere."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    for name in ("attention.value_length", "rope.dimension_count"):
        found = file.metadata.get(f"{kind}.{name}", head_dim)
        if found != head_dim:
            raise CompileError(f"{file.where}: {kind}.{name} is {found}, but heads have {head_dim} dimensions")


def _generation_config(file: GgufFile) -> Values:
    """All ids that end a turn: the file may have one for the end of a text and others for that of a turn."""
    get = file.metadata.get
    ends = [get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    values = {
        "eos_token_id": list(dict.fromkeys(i for i in ends if i is not None)) or None,
        "bos_token_id": get("tokenizer.ggml.bos_token_id"),
        "pad_token_id": get("tokenizer.ggml.padding_token_id"),
    }
    return {key: value for key, value in values.items() if value is not None}


def _rename(checkpoint: GgufCheckpoint, model: Any, dequantize: bool) -> Tensors:
    """The gguf library knows the names that llama.cpp derives from transformers' ones."""
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    file, architecture, config = checkpoint.file, checkpoint.architecture, checkpoint.config
    kind = next(arch for arch, name in MODEL_ARCH_NAMES.items() if name == file.metadata["general.architecture"])
    names = get_tensor_name_map(kind, config.num_hidden_layers)
    left: Tensors = {
        name: quantized(source) if isinstance(source, BlockTensor) and not dequantize else source
        for name, source in file.tensors.items()
    }
    left.pop("rope_freqs.weight", None)
    finer = _finer_of_tied(left) if config.tie_word_embeddings else None
    if finer is not None:
        left["token_embd.weight"] = finer
        left.pop("output.weight")
    result: Tensors = {}
    for name in model.state_dict():
        stem, _, suffix = name.rpartition(".")
        if suffix not in ("weight", "bias"):
            stem, suffix = name, "weight"  # stacked experts are bare parameters
        if name.endswith(".experts.gate_up_proj"):
            layer = name.split(".")[2]
            parts = [left.pop(f"blk.{layer}.ffn_{part}_exps.weight", None) for part in ("gate", "up")]
            if parts[0] is not None and parts[1] is not None:
                result[name] = Concat((parts[0], parts[1]), 1)
            continue
        found = names.get_name(stem)
        if found is not None and f"{found}.{suffix}" in left:
            result[name] = architecture.undo(name, left.pop(f"{found}.{suffix}"), config)
    return result | left


def _finer_of_tied(tensors: Tensors) -> WeightSource | None:
    """Of two copies of the embedding, the one whose type takes more bytes."""
    if "output.weight" not in tensors:
        return None
    copies = [tensors["output.weight"], tensors["token_embd.weight"]]
    return max(copies, key=lambda copy: getattr(copy, "row_bytes", copy.nbytes // copy.shape[0]))


def _undo_llama(name: str, source: WeightSource, config: Any) -> WeightSource:
    """llama.cpp interleaves the rows of q and k, for its rope."""
    if ".q_proj." in name:
        return permute_rows(source, config.num_attention_heads)
    return permute_rows(source, config.num_key_value_heads) if ".k_proj." in name else source


def _undo_gemma(name: str, source: WeightSource, config: Any) -> WeightSource:
    """Gemma multiplies by 1 + w; llama.cpp stores the sum."""
    return Shifted(source, -1.0) if name.endswith("norm.weight") else source


def _undo_gpt2(name: str, source: WeightSource, config: Any) -> WeightSource:
    """Conv1D of transformers keeps [in, out]."""
    return Transpose(source, (1, 0)) if name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")) else source


def _undo_moe(name: str, source: WeightSource, config: Any) -> WeightSource:
    """The gate of the shared expert is a matrix with one row."""
    if name.endswith("shared_expert_gate.weight") and len(source.shape) == 1:
        return Reshape(source, (1, *source.shape))
    return source


def _fix_llama(values: Values, file: GgufFile) -> None:
    values["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
    values["mlp_bias"] = "blk.0.ffn_gate.bias" in file.tensors


def _fix_qwen3(values: Values, file: GgufFile) -> None:
    values["attention_bias"] = "blk.0.attn_q.bias" in file.tensors


def _fix_gemma2(values: Values, file: GgufFile) -> None:
    _gemma_scale(values, layers_of_27b=46)


def _fix_gemma3(values: Values, file: GgufFile) -> None:
    """Local layers have their own rope, which the file does not mention; scaling is for the global ones."""
    _gemma_scale(values, layers_of_27b=62)
    values["rope_parameters"] = {
        "full_attention": values["rope_parameters"],
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    }


def _gemma_scale(values: Values, layers_of_27b: int) -> None:
    """The 27B models scale scores by hidden size / heads, not by head_dim; llama.cpp tells them by their layers."""
    big = values["num_hidden_layers"] == layers_of_27b
    values["query_pre_attn_scalar"] = (
        values["hidden_size"] // values["num_attention_heads"] if big else values["head_dim"]
    )


ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture("llama", "LlamaForCausalLM", LLAMA_KEYS, _fix_llama, _undo_llama),
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM", LLAMA_KEYS),
    "qwen3": Architecture("qwen3", "Qwen3ForCausalLM", LLAMA_KEYS, _fix_qwen3),
    "qwen2moe": Architecture("qwen2_moe", "Qwen2MoeForCausalLM", MOE_KEYS, undo=_undo_moe),
    "qwen3moe": Architecture(
        "qwen3_moe", "Qwen3MoeForCausalLM", MOE_KEYS, _fix_qwen3, _undo_moe, defaults={"norm_topk_prob": True}
    ),
    "gemma2": Architecture("gemma2", "Gemma2ForCausalLM", GEMMA_KEYS, _fix_gemma2, _undo_gemma),
    "gemma3": Architecture("gemma3_text", "Gemma3ForCausalLM", GEMMA_KEYS, _fix_gemma3, _undo_gemma),
    "starcoder2": Architecture(
        "starcoder2", "Starcoder2ForCausalLM", LLAMA_KEYS | {"attention.layer_norm_epsilon": "norm_epsilon"}
    ),
    "gpt2": Architecture(
        "gpt2",
        "GPT2LMHeadModel",
        {
            "context_length": "n_positions",
            "block_count": "n_layer",
            "embedding_length": "n_embd",
            "feed_forward_length": "n_inner",
            "attention.head_count": "n_head",
            "attention.layer_norm_epsilon": "layer_norm_epsilon",
        },
        undo=_undo_gpt2,
    ),
}
"""GGUF's name of an architecture: how it is read."""
