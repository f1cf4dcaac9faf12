"""Texts for calibration -> windows of token ids, the same for the same file, tokenizer and seed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from llmc.errors import UsageError
from llmc.quantization.statistics import spread

BUILT_IN = "builtin"
"""The source that stands for corpus.txt of this folder: prose, dialogue, code and tables, in several languages."""

SELF = "self"
"""The source that stands for text that the model writes itself; the caller makes it, and calls ``cut``."""

LARGEST_FILE = 256 << 20
"""Bytes; a few megabytes are more than any method needs."""

MOST_SAMPLES = 128
"""Windows that are taken where no number is given."""

_CORPUS = Path(__file__).with_name("corpus.txt")

Tokenize = Callable[[str], Sequence[int]]
"""Text -> token ids, without special tokens added."""

Render = Callable[[list[dict[str, Any]]], str]
"""Chat messages -> text, by the model's template."""


@dataclass(frozen=True)
class CalibrationSettings:
    """``source``: a file, "builtin" or "self". ``samples`` 0: as many as the text has, up to 128."""

    source: str = BUILT_IN
    samples: int = 0
    length: int = 512
    seed: int = 0

    def __post_init__(self) -> None:
        for name, value, low, high in (
            ("samples", self.samples, 0, 1 << 20),
            ("length", self.length, 2, 1 << 20),
            ("seed", self.seed, 0, (1 << 63) - 1),
        ):
            if not low <= value <= high:
                raise UsageError(f"calibration {name} {value}: expected a number from {low} to {high}")


@dataclass(frozen=True, eq=False)
class Calibration:
    """Token ids int32 [samples, length], and the SHA-256 of their shape and little-endian bytes."""

    tokens: npt.NDArray[np.int32]
    source: str

    @property
    def sha256(self) -> str:
        """What the report and the recipe record."""
        shape = "x".join(str(size) for size in self.tokens.shape)
        return hashlib.sha256(f"{shape}:".encode() + self.tokens.astype("<i4").tobytes()).hexdigest()


def load(
    settings: CalibrationSettings, tokenize: Tokenize, render: Render, *, vocab_size: int, prefix: Sequence[int] = ()
) -> Calibration:
    """Reads a .txt, a .jsonl (a row is {"text"}, {"messages"} or {"tokens"}) or the built-in corpus, and cuts it.

    ``prefix``: ids that each window starts with (the BOS of models that were trained with one). Raises UsageError for
    what can't be read, with the line, and for texts that are too short.
    """
    assert settings.source != SELF, "text that the model writes itself is made by the caller"
    path = _CORPUS if settings.source == BUILT_IN else Path(settings.source)
    text = _read(path)
    if path.suffix == ".txt":
        documents: list[Sequence[int]] = [tokenize(text)]
    elif path.suffix == ".jsonl":
        documents = [_row(path, number, line, tokenize, render) for number, line in enumerate(text.split("\n"), 1)]
    else:
        raise UsageError(f"--calib {path}: unknown kind of file; known: .txt, .jsonl")
    return cut(documents, settings, vocab_size=vocab_size, prefix=prefix)


def cut(
    documents: Sequence[Sequence[int]], settings: CalibrationSettings, *, vocab_size: int, prefix: Sequence[int] = ()
) -> Calibration:
    """Joins documents, cuts them into windows that don't overlap, and takes some by the seed, in their order."""
    where = f"--calib {settings.source}"
    ids = np.concatenate([np.asarray(document, np.int64) for document in documents] or [np.zeros(0, np.int64)])
    if ids.size and not (ids.min() >= 0 and ids.max() < vocab_size):
        bad = int(ids[(ids < 0) | (ids >= vocab_size)][0])
        raise UsageError(f"{where}: token id {bad} is not below the vocabulary size {vocab_size}")
    step = settings.length - len(prefix)
    if step < 1:
        raise UsageError(f"{where}: windows of {settings.length} have no room beside {len(prefix)} tokens at the start")
    available = ids.size // step
    wanted = settings.samples or min(MOST_SAMPLES, max(available, 1))
    if available < wanted:
        raise UsageError(
            f"{where}: the text has {ids.size} tokens, {wanted} samples of {settings.length} take {wanted * step}; "
            "give a longer text, fewer samples or shorter ones"
        )
    start = spread(np.array([settings.seed], np.uint64))
    order = np.argsort(spread(np.arange(available, dtype=np.uint64) + start), kind="stable")
    windows = ids[: available * step].reshape(available, step)[np.sort(order[:wanted])]
    starts = np.broadcast_to(np.asarray(prefix, np.int64), (wanted, len(prefix)))
    return Calibration(np.concatenate([starts, windows], axis=1).astype(np.int32), settings.source)


def _read(path: Path) -> str:
    """The text of a file as it is, line ends included."""
    try:
        size = path.stat().st_size
        if size > LARGEST_FILE:
            raise UsageError(f"--calib {path}: {size} bytes; cut it to {LARGEST_FILE} bytes at most")
        return path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise UsageError(f"--calib {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"--calib {path}: byte {error.start} is not UTF-8; convert the file") from error


def _row(path: Path, number: int, line: str, tokenize: Tokenize, render: Render) -> Sequence[int]:
    """The ids of a row; those of an empty line are none."""
    if not line.strip():
        return ()
    where = f"--calib {path}, line {number}"
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{where}: not JSON: {error}") from error
    if "\\u" in line and not _is_unicode(row):
        raise UsageError(f"{where}: holds half of a surrogate pair, which is no character")
    kinds = [key for key in ("text", "messages", "tokens") if isinstance(row, dict) and key in row]
    if len(kinds) != 1:
        raise UsageError(f'{where}: expected an object with one of "text", "messages" and "tokens"')
    value = row[kinds[0]]
    if kinds[0] == "text" and isinstance(value, str):
        return tokenize(value)
    if kinds[0] == "tokens" and isinstance(value, list) and all(type(token) is int for token in value):
        if wrong := [token for token in value if token.bit_length() > 31]:
            raise UsageError(f"{where}: {wrong[0]} is no token id")
        return [int(token) for token in value]
    if kinds[0] == "messages" and isinstance(value, list) and value and all(isinstance(m, dict) for m in value):
        return tokenize(render(value))
    expected = {"text": "a string", "tokens": "a list of whole numbers", "messages": "a list of objects"}[kinds[0]]
    raise UsageError(f'{where}: "{kinds[0]}" is not {expected}')


def _is_unicode(row: Any) -> bool:
    try:
        json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True
