"""Write a model of a given shape with random weights: a Hugging Face directory, and a GGUF file of the same weights."""

import json
from pathlib import Path

import gguf
import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from peers.workloads import MODELS, Shape

CONTEXT = 8192


def tensors(shape: Shape) -> dict[str, tuple[str, tuple[int, ...]]]:
    """{Hugging Face name: (GGUF name, shape)}."""
    head = shape.hidden // shape.heads
    kv = shape.kv_heads * head
    found = {"model.embed_tokens.weight": ("token_embd.weight", (shape.vocabulary, shape.hidden))}
    for i in range(shape.layers):
        theirs, ours = f"model.layers.{i}.", f"blk.{i}."
        for name, short, rows in (("q", "q", shape.hidden), ("k", "k", kv), ("v", "v", kv)):
            found[f"{theirs}self_attn.{name}_proj.weight"] = (f"{ours}attn_{short}.weight", (rows, shape.hidden))
            if shape.qkv_bias:
                found[f"{theirs}self_attn.{name}_proj.bias"] = (f"{ours}attn_{short}.bias", (rows,))
        found[theirs + "self_attn.o_proj.weight"] = (ours + "attn_output.weight", (shape.hidden, shape.hidden))
        for name in ("gate", "up"):
            found[f"{theirs}mlp.{name}_proj.weight"] = (f"{ours}ffn_{name}.weight", (shape.intermediate, shape.hidden))
        found[theirs + "mlp.down_proj.weight"] = (ours + "ffn_down.weight", (shape.hidden, shape.intermediate))
        found[theirs + "input_layernorm.weight"] = (ours + "attn_norm.weight", (shape.hidden,))
        found[theirs + "post_attention_layernorm.weight"] = (ours + "ffn_norm.weight", (shape.hidden,))
    found["model.norm.weight"] = ("output_norm.weight", (shape.hidden,))
    return found


def write(name: str, folder: Path) -> tuple[Path, Path]:
    """Make FOLDER/NAME/ and FOLDER/NAME.gguf, or find them; returns both paths."""
    shape, directory, file = MODELS[name], folder / name, folder / f"{name}.gguf"
    if (directory / "done").exists():
        return directory, file
    directory.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    weights: dict[str, NDArray[np.generic]] = {}
    for theirs, (_, size) in tensors(shape).items():
        values = rng.standard_normal(size, dtype=np.float32) * 0.02 + ("norm" in theirs)
        weights[theirs] = values.astype(ml_dtypes.bfloat16)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    _write_config(shape, directory)
    _write_gguf(shape, weights, file)
    (directory / "done").touch()
    return directory, file


def _write_config(shape: Shape, directory: Path) -> None:
    config = {
        "architectures": ["LlamaForCausalLM" if shape.architecture == "llama" else "Qwen2ForCausalLM"],
        "model_type": shape.architecture,
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "intermediate_size": shape.intermediate,
        "vocab_size": shape.vocabulary,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-5,
        "rope_theta": shape.rope_theta,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    (directory / "config.json").write_text(json.dumps(config))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<s>", "</s>", *alphabet])}
    vocabulary |= {f"<{i}>": i for i in range(len(vocabulary), shape.vocabulary)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))


def _write_gguf(shape: Shape, weights: dict[str, NDArray[np.generic]], file: Path) -> None:
    writer = gguf.GGUFWriter(file, shape.architecture)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(shape.hidden)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.intermediate)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(shape.rope_theta)
    writer.add_rope_dimension_count(shape.hidden // shape.heads)
    writer.add_vocab_size(shape.vocabulary)
    writer.add_tokenizer_model("no_vocab")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    for theirs, (ours, size) in tensors(shape).items():
        if len(size) == 1:
            writer.add_tensor(ours, weights[theirs].astype(np.float32))
        else:
            raw = weights[theirs].view(np.uint8)
            writer.add_tensor(ours, raw, raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
