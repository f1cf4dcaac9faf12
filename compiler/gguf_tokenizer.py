"""The tokenizer of a GGUF file: rebuilt by transformers from the metadata, with what its loader leaves out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmc.compiler.tokenizer import FrozenTokenizer, freeze
from llmc.errors import CheckpointError

DIGITS_THEN_GPT2 = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b")
"""Each digit is a token of its own, then GPT-2's rule splits."""

GPT2 = ("gpt-2", "olmo", "mpt", "phi-2", "jais", "trillion", "roberta-bpe")
"""GPT-2's rule, which transformers applies where it knows nothing else."""

NFC = ("qwen2", "deepseek-r1-qwen")
"""Text is normalised to NFC first."""

SPECIAL = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


def freeze_gguf(metadata: Mapping[str, Any], where: str) -> FrozenTokenizer | None:
    """The tokenizer that the metadata describe; None if they describe none.

    Raises:
        CheckpointError: its kind or pre-tokenizer is not supported.
    """
    if "tokenizer.ggml.tokens" not in metadata:
        return None
    from transformers import TokenizersBackend
    from transformers.integrations.gguf import GGUF_TOKENIZER_MAPPING, convert_gguf_tokenizer

    renames = GGUF_TOKENIZER_MAPPING["tokenizer"]
    values = {name: metadata[f"tokenizer.{key}"] for key, name in renames.items() if f"tokenizer.{key}" in metadata}
    _check_pre_tokenizer(values, where)
    try:
        backend, _ = convert_gguf_tokenizer(metadata["general.architecture"], values)
        _complete(backend, values)
        tokenizer = TokenizersBackend(tokenizer_object=backend, **_settings(metadata, values, where))
    except CheckpointError:
        raise
    except Exception as problem:
        raise CheckpointError(f"{where}: transformers can't rebuild the tokenizer: {problem}") from problem
    return freeze(tokenizer, where)


def _check_pre_tokenizer(values: Mapping[str, Any], where: str) -> None:
    """The file names it by a keyword only: one that is not known would split text in a wrong way, unnoticed."""
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    if values.get("tokenizer_type") != "gpt2":
        return  # sentencepiece has none
    known = {*GGUF_PRE_TOKENIZER_SPLITS, *DIGITS_THEN_GPT2, *GPT2}
    if (name := values.get("pre_tokenizer_type")) not in known:
        raise CheckpointError(
            f"{where}: the pre-tokenizer {name!r} is not supported; supported: {', '.join(sorted(known))}. "
            "Build from the Hugging Face directory of the model instead"
        )


def _complete(backend: Any, values: Mapping[str, Any]) -> None:
    from tokenizers import normalizers, pre_tokenizers

    name = values.get("pre_tokenizer_type")
    if values.get("tokenizer_type") != "gpt2":
        return
    if name in DIGITS_THEN_GPT2:
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )
    if name in NFC:
        backend.normalizer = normalizers.NFC()


def _settings(metadata: Mapping[str, Any], values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """What a tokenizer_config.json would say."""
    tokens = values["tokens"]
    settings: dict[str, Any] = {
        # Sentencepiece vocabularies of files without the flag get a BOS, as in llama.cpp.
        "add_bos_token": metadata.get("tokenizer.ggml.add_bos_token", values.get("tokenizer_type") == "llama"),
        "add_eos_token": metadata.get("tokenizer.ggml.add_eos_token", False),
        "clean_up_tokenization_spaces": False,
    }
    for name, key in SPECIAL.items():
        token_id = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if token_id is not None and not 0 <= token_id < len(tokens):
            raise CheckpointError(
                f"{where}: tokenizer.ggml.{key}_token_id {token_id} is not among the {len(tokens)} tokens"
            )
        settings[name] = None if token_id is None else tokens[token_id]
    template = metadata.get("tokenizer.chat_template")
    if template is not None:
        settings["chat_template"] = template
    return settings
