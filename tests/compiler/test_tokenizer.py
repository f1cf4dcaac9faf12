"""Tokenizers of all kinds are frozen as transformers loads them."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from checkpoints import write_llama

from llmc.compiler.checkpoint import Checkpoint
from llmc.compiler.tokenizer import PROBES, FrozenTokenizer
from llmc.errors import CheckpointError, ResourceError

TEXTS = ("hello there", "  two  spaces", "a\nb", "Größe 123", *PROBES)


def frozen(folder: Path) -> FrozenTokenizer:
    tokenizer = Checkpoint.open(folder).tokenizer()
    assert tokenizer is not None
    return tokenizer


def library(tokenizer: FrozenTokenizer) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_str(tokenizer.files["tokenizer.json"].decode())


def bpe() -> tokenizers.Tokenizer:
    """A small byte-level tokenizer."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, special_tokens=["<s>", "</s>"])
    tokenizer.train_from_iterator(["hello there, hello again", "the other two"], trainer)
    return tokenizer


def with_config(folder: Path, **values: Any) -> Path:
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | values))
    return folder


def test_none(tmp_path: Path) -> None:
    assert Checkpoint.open(write_llama(tmp_path)).tokenizer() is None


def test_tokenizer_json(tmp_path: Path) -> None:
    folder = with_config(write_llama(tmp_path))
    bpe().save(str(folder / "tokenizer.json"))
    found = frozen(folder)
    assert found.prefix_ids == found.suffix_ids == () and found.size == bpe().get_vocab_size() and not found.warnings
    for text in TEXTS:
        assert library(found).encode(text).ids == bpe().encode(text).ids
    assert json.loads(found.files["special_tokens.json"]) == {"bos_token": "<s>", "eos_token": "</s>"}
    assert "chat_template.jinja" not in found.files


@pytest.mark.parametrize(("template", "prefix", "suffix"), [("<s> $A", (0,), ()), ("<s> $A </s>", (0,), (1,))])
def test_what_is_put_around_a_text(tmp_path: Path, template: str, prefix: Any, suffix: Any) -> None:
    folder = with_config(write_llama(tmp_path))
    tokenizer = bpe()
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(template, None, [("<s>", 0), ("</s>", 1)])
    tokenizer.save(str(folder / "tokenizer.json"))
    found = frozen(folder)
    assert (found.prefix_ids, found.suffix_ids) == (prefix, suffix)


def test_vocabulary_and_merges_only(tmp_path: Path) -> None:
    folder = write_llama(tmp_path)
    tokenizer = bpe()
    tokenizer.model.save(str(folder))
    with_config(folder, tokenizer_class="GPT2Tokenizer", unk_token="</s>")
    found = library(frozen(folder))
    for text in TEXTS:
        assert found.encode(text).ids == tokenizer.encode(text).ids


def test_a_sentencepiece_model_only(tmp_path: Path) -> None:
    sentencepiece = pytest.importorskip("sentencepiece")
    folder = write_llama(tmp_path)
    texts = tmp_path / "texts.txt"
    texts.write_text("hello there, hello again\nthe other two\n" * 20)
    sentencepiece.SentencePieceTrainer.train(
        input=str(texts),
        model_prefix=str(folder / "tokenizer"),
        vocab_size=300,
        model_type="bpe",
        byte_fallback=True,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    (folder / "tokenizer.vocab").unlink()
    texts.unlink()
    with_config(folder, tokenizer_class="LlamaTokenizer", add_bos_token=True, unk_token="<unk>")
    original = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    found = frozen(folder)
    assert found.prefix_ids == (original.bos_id(),)
    for text in ("hello there", "the other two", "ä hello"):
        assert library(found).encode(text, add_special_tokens=False).ids == original.encode(text)


def test_chat_templates(tmp_path: Path) -> None:
    folder = with_config(write_llama(tmp_path), chat_template="{{ one }}")
    bpe().save(str(folder / "tokenizer.json"))
    assert frozen(folder).files["chat_template.jinja"] == b"{{ one }}"
    several = [{"name": "default", "template": "{{ two }}"}, {"name": "tool_use", "template": "{{ three }}"}]
    found = frozen(with_config(folder, chat_template=several))
    assert found.files["chat_template.jinja"] == b"{{ two }}" and "tool_use" in found.warnings[0]
    found = frozen(with_config(folder, chat_template=several[1:]))
    assert "chat_template.jinja" not in found.files and "tool_use" in found.warnings[0]
    with_config(folder)
    (folder / "chat_template.jinja").write_text("{{ four }}")
    assert frozen(folder).files["chat_template.jinja"] == b"{{ four }}"


def test_a_tokenizer_that_transformers_changes_is_warned_of(tmp_path: Path) -> None:
    """GPT2Tokenizer rebuilds its parts from vocabulary and merges: a normalizer in the file is lost."""
    folder = with_config(write_llama(tmp_path), tokenizer_class="GPT2Tokenizer", unk_token="</s>")
    tokenizer = bpe()
    tokenizer.normalizer = tokenizers.normalizers.Lowercase()
    tokenizer.save(str(folder / "tokenizer.json"))
    found = frozen(folder)
    same = all(library(found).encode(text).ids == tokenizer.encode(text).ids for text in PROBES)
    assert same == (not found.warnings)


@pytest.mark.parametrize("text", ["{", "{}", '{"model": {"type": "Launch"}}'])
def test_a_broken_tokenizer_is_named(tmp_path: Path, text: str) -> None:
    folder = with_config(write_llama(tmp_path))
    (folder / "tokenizer.json").write_text(text)
    with pytest.raises(CheckpointError, match="tokenizer"):
        frozen(folder)


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = with_config(write_llama(tmp_path))
    bpe().save(str(folder / "tokenizer.json"))

    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(ResourceError, match="the disk is full"):
        frozen(folder)
