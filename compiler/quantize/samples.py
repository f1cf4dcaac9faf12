"""The tokens that calibration runs on: from a file, from the text that comes with llmc, or written by the model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmc.compiler.config import BuildConfig
from llmc.compiler.progress import Progress
from llmc.compiler.tokenizer import FrozenTokenizer
from llmc.errors import UsageError
from llmc.quantization.calibration import SELF, Calibration, CalibrationSettings, cut, load
from llmc.runtime.chat_template import ChatTemplate

if TYPE_CHECKING:
    from llmc.compiler.api import Compiled
    from llmc.compiler.engine_writer import EngineContents


def calibration_tokens(
    settings: CalibrationSettings,
    config: BuildConfig,
    compiled: Compiled,
    tokenizer: FrozenTokenizer | None,
    unquantized: Callable[[], EngineContents],
    engine: Path,
    progress: Progress,
) -> Calibration:
    """Windows of token ids.

    Args:
        settings: source, number, length and seed.
        config: what of that the user chose.
        compiled: the model.
        tokenizer: of the model.
        unquantized: makes the content of an engine with the weights as they are, to write text with.
        engine: the engine that is being built.
        progress: told what is done.

    Raises:
        UsageError: the file can't be read, is too short, or the model has no tokenizer for it.
    """
    longest = compiled.limits.max_seq_len
    if config.calib_length is None and config.recipe is None and config.locked is None:
        settings = replace(settings, length=min(settings.length, longest))
    if settings.length > longest:
        raise UsageError(f"--calib-length {settings.length}: the engine takes sequences of up to {longest} tokens")
    vocabulary = compiled.lowered.plan.value(compiled.lowered.plan.logits).shape[1].constant
    prefix = () if tokenizer is None else tokenizer.prefix_ids
    if settings.source == SELF:
        from llmc.compiler.quantize.self_text import write_texts

        documents = write_texts(settings, unquantized(), engine, progress)
        return cut(documents, settings, vocab_size=vocabulary, prefix=prefix)
    reader = _Reader(tokenizer, settings.source)
    return load(settings, reader.tokenize, reader.render, vocab_size=vocabulary, prefix=prefix)


class _Reader:
    """Texts and chats as token ids, by the model's tokenizer."""

    def __init__(self, tokenizer: FrozenTokenizer | None, source: str) -> None:
        self._files = {} if tokenizer is None else tokenizer.files
        self._source = source
        self._tokenizer: Any = None

    def tokenize(self, text: str) -> Sequence[int]:
        """Ids without special tokens around them."""
        if "tokenizer.json" not in self._files:
            raise UsageError(
                f"--calib {self._source}: the model has no tokenizer; give token ids, a .jsonl file of "
                '{"tokens": [...]}'
            )
        if self._tokenizer is None:
            from tokenizers import Tokenizer

            self._tokenizer = Tokenizer.from_str(self._files["tokenizer.json"].decode())
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def render(self, messages: list[dict[str, Any]]) -> str:
        """A chat by the model's template."""
        if "chat_template.jinja" not in self._files:
            raise UsageError(f"--calib {self._source}: has chats, but the model has no chat template")
        import json

        special = json.loads(self._files.get("special_tokens.json", b"{}"))
        template = ChatTemplate(self._files["chat_template.jinja"].decode(), special)
        try:
            return template.render(messages, add_generation_prompt=False)
        finally:
            template.close()
