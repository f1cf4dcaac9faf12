"""Freezes a model's tokenizer into files that the runtime reads without transformers.

Whatever a model brings (tokenizer.json, a sentencepiece or tiktoken model, the metadata of a GGUF file), transformers
loads it, and what it loaded is kept: one tokenizer.json, one chat template, and the texts of the special tokens.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

from llmc.compiler.model_config import CODE_KEYS, read_json
from llmc.compiler.model_directory import ModelDirectory
from llmc.compiler.staging import disk_errors
from llmc.errors import CheckpointError

VOCABULARIES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer.model.v3",
    "spiece.model",
    "sentencepiece.bpe.model",
    "spm.model",
    "vocab.json",
    "vocab.txt",
    "tiktoken.model",
    "tekken.json",
)
"""Any one of these makes a tokenizer; files named ``*.tiktoken`` do as well."""

OTHER_FILES = (
    "merges.txt",
    "added_tokens.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
)

PROBES = (
    "The 3 cafe\u0301s won't open before 10:45; naïve Größe costs 1234.5€ (about $1,300).",
    "  two spaces before, one after \r\n\n\tif x_1 != y:    # 中文, 한국어 🙂\u200d\u00a0\uff21\uff22 \u0130",
)
"""Texts with the things that tokenizers disagree about: digits, blanks, case, accents, width, emoji."""

MARKER = "a"
"""A text whose tokens show what a tokenizer puts around every text."""


@dataclass(frozen=True)
class FrozenTokenizer:
    """The content of an engine's tokenizer directory, and what is put around a text (BOS, EOS) when it is encoded."""

    files: Mapping[str, bytes]
    size: int
    prefix_ids: tuple[int, ...]
    suffix_ids: tuple[int, ...]
    warnings: Sequence[str]


def freeze_directory(directory: ModelDirectory, config: Any) -> FrozenTokenizer | None:
    """The tokenizer of a model directory; None if there is no vocabulary in it.

    Raises:
        CheckpointError: transformers can't load it.
    """
    if not any(n in VOCABULARIES or n.endswith(".tiktoken") for n in directory.names):
        return None
    from transformers import AutoTokenizer

    with tempfile.TemporaryDirectory(prefix="llmc-tokenizer-") as folder:
        with disk_errors(Path(folder)):
            _copy(directory, Path(folder))
        try:
            tokenizer = AutoTokenizer.from_pretrained(
                folder, config=config, trust_remote_code=False, local_files_only=True
            )
        except Exception as problem:
            raise CheckpointError(f"{directory.path}: transformers can't load the tokenizer: {problem}") from problem
    frozen = freeze(tokenizer, str(directory.path))
    if not directory.has("tokenizer.json"):
        return frozen
    difference = _difference(tokenizer.backend_tokenizer, directory.read("tokenizer.json"))
    return replace(frozen, warnings=[*frozen.warnings, difference]) if difference else frozen


def _copy(directory: ModelDirectory, folder: Path) -> None:
    """Let transformers see checked copies, and no key that asks for code."""
    for name in directory.names:
        if name in VOCABULARIES or name in OTHER_FILES or name.endswith(".tiktoken"):
            (folder / name).write_bytes(directory.read(name))
    if directory.has("tokenizer_config.json"):
        values = read_json(directory, "tokenizer_config.json")
        kept = {key: value for key, value in values.items() if key not in CODE_KEYS}
        (folder / "tokenizer_config.json").write_text(json.dumps(kept), encoding="utf-8")


def freeze(tokenizer: Any, where: str) -> FrozenTokenizer:
    """Keep what a loaded transformers tokenizer does.

    Raises:
        CheckpointError: it has no fast backend, or adds something around texts that depends on the text.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise CheckpointError(f"{where}: {type(tokenizer).__name__} has no fast tokenizer, which llmc needs")
    backend.no_truncation()
    backend.no_padding()
    prefix, suffix = _around(tokenizer, where)
    special = {key: str(value) for key, value in tokenizer.special_tokens_map.items() if not isinstance(value, list)}
    files = {"tokenizer.json": backend.to_str().encode(), "special_tokens.json": _json(special)}
    template, warnings = _chat_template(tokenizer)
    if template is not None:
        files["chat_template.jinja"] = template.encode()
    return FrozenTokenizer(files, len(tokenizer), prefix, suffix, warnings)


def _around(tokenizer: Any, where: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    bare = tokenizer(MARKER, add_special_tokens=False).input_ids
    full = tokenizer(MARKER, add_special_tokens=True).input_ids
    for start in range(len(full) - len(bare) + 1):
        if full[start : start + len(bare)] == bare:
            return tuple(full[:start]), tuple(full[start + len(bare) :])
    raise CheckpointError(f"{where}: with special tokens {MARKER!r} becomes {full}, which does not contain {bare}")


def _chat_template(tokenizer: Any) -> tuple[str | None, list[str]]:
    """A model may have several, by name: the one that transformers uses if none is asked for is kept."""
    template = tokenizer.chat_template
    if not isinstance(template, dict):
        return template, []
    kept = template.get("default")
    others = sorted(set(template) - {"default"})
    if kept is None:
        return None, [f"the chat templates {', '.join(others)} are left out, since none is called default"]
    return kept, [f"the chat template called default is kept; left out: {', '.join(others)}"] if others else []


def _json(value: Any) -> bytes:
    return (json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False) + "\n").encode()


def _difference(backend: Any, original: bytes) -> str:
    """Where the model's own tokenizer.json, read as it is, gives other tokens than transformers does; "" if nowhere."""
    from tokenizers import Tokenizer

    as_it_is = Tokenizer.from_str(original.decode())
    for probe in PROBES:
        ours, theirs = (t.encode(probe, add_special_tokens=False).tokens for t in (backend, as_it_is))
        for a, b in zip_longest(ours, theirs):
            if a != b:
                return (
                    f"tokenizer.json read as it is splits {probe[:20]!r}... differently from transformers, whose way "
                    f"is kept: {b!r} instead of {a!r}"
                )
    return ""
