"""What an evaluation reads: a text that is cut into windows, and prompts that are continued freely. Never a hub."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmc.errors import RequestError, UsageError
from llmc.runtime import strict
from llmc.runtime.tokenizer import Tokenizer

MAX_FILE_BYTES = 64 << 20
"""A text is tokenized in one call."""

BUILT_IN = Path(__file__).with_name("text.txt")
"""A text of our own, which no calibration uses."""

Prompt = str | tuple[int, ...] | tuple[Mapping[str, Any], ...]
"""A text, token ids, or a chat."""

CHATS = (
    "Explain step by step how a bicycle stays upright, and why a child finds it hard at first.",
    "Write a short story about a lighthouse keeper who finds a letter in a bottle.",
    "How do I bake a loaf of bread at home? Give quantities, times and temperatures.",
    "Write a Python function that splits a line of CSV with quoted fields, and explain each part of it.",
    "Compare trains, ships and lorries for moving goods: cost, speed, and what each is bad at.",
    "Tell me about the water cycle as if I were ten years old.",
)
TEXTS = (
    "The first bicycles had no pedals at all. Riders",
    "The lighthouse keeper had not spoken to anyone for three weeks when he saw the bottle. He",
    "To bake bread at home you need flour, water, salt and time. First",
    "def split_csv(line):\n    ",
    "Goods travel by rail, by sea and by road. Each way has",
    "Rain falls on the hills, runs into streams and rivers, and in the end",
)
"""Prompts of our own, for models with a chat template and without."""

WITHOUT_TOKENIZER = 12
"""Length of the prompts for an engine without a tokenizer."""


@dataclass(frozen=True)
class Text:
    """A text or token ids, and the SHA-256 of the file's bytes."""

    name: str
    sha256: str
    content: str | tuple[int, ...]


@dataclass(frozen=True)
class Prompts:
    """Prompts, and the SHA-256 of the file's bytes."""

    sha256: str
    each: tuple[Prompt, ...]


def read_text(path: Path | None) -> Text:
    """Read a text (UTF-8), or token ids from a ``.json`` file (a list of numbers); None: the text that comes with llmc.

    Raises:
        UsageError: there is no such file, or it is neither.
    """
    content = _read(path or BUILT_IN)
    digest = hashlib.sha256(content).hexdigest()
    if path is None:
        return Text("the text that comes with llmc", digest, content.decode())
    if path.suffix == ".json":
        ids = strict.parse_json(content, str(path), UsageError)
        if not isinstance(ids, list) or not ids or not all(type(i) is int and i >= 0 for i in ids):
            raise UsageError(f"{path}: expected a list of token ids; a text has another extension than .json")
        return Text(path.name, digest, tuple(ids))
    return Text(path.name, digest, _decode(content, path))


def read_prompts(path: Path | None) -> Prompts | None:
    """Read prompts: one in each line, or in a ``.jsonl`` file objects as `llmc run --input` takes them.

    None: the prompts that come with llmc, which depend on the model.

    Raises:
        UsageError: there is no such file, or a line is no prompt.
    """
    if path is None:
        return None
    content = _read(path)
    lines = [(i, line) for i, line in enumerate(_decode(content, path).split("\n"), 1) if line.strip()]
    if not lines:
        raise UsageError(f"{path}: there is no prompt")
    if path.suffix != ".jsonl":
        each: tuple[Prompt, ...] = tuple(line.rstrip("\r") for _, line in lines)
    else:
        each = tuple(_prompt(line, f"{path}:{i}") for i, line in lines)
    return Prompts(hashlib.sha256(content).hexdigest(), each)


def token_ids(text: Text, tokenizer: Tokenizer | None, vocabulary: int) -> list[int]:
    """The tokens of a text, all in one call and without those that belong around it.

    Raises:
        UsageError: the engine has no tokenizer, or token ids are beyond its vocabulary.
    """
    if isinstance(text.content, str):
        if tokenizer is None:
            raise UsageError(f"{text.name}: the engine has no tokenizer; use token ids, a list in a .json file")
        ids = tokenizer.encode_plain(text.content)
    else:
        ids = list(text.content)
    if bad := [i for i in ids if i >= vocabulary]:
        raise UsageError(f"{text.name}: {bad[0]} is not a token id below {vocabulary}")
    return ids


def windows(ids: Sequence[int], context: int, count: int, bos: int | None) -> list[list[int]]:
    """Windows of ``context`` tokens that do not overlap, the first ``count`` (0: all); the rest at the end is dropped.

    With ``bos``, each window is that token and ``context`` - 1 of the text.

    Raises:
        UsageError: the text is too short for one window.
    """
    begin = [] if bos is None else [bos]
    step = context - len(begin)
    starts = range(0, len(ids) // step * step, step) if step > 0 else range(0)
    if not starts:
        raise UsageError(f"the text has {len(ids)} tokens, fewer than a window of {context}; use a smaller --context")
    return [begin + list(ids[s : s + step]) for s in (starts[:count] if count else starts)]


def prompt_ids(prompts: Sequence[Prompt] | None, tokenizer: Tokenizer | None, vocabulary: int) -> list[list[int]]:
    """The tokens of prompts; without any, those of the ones that come with llmc.

    Raises:
        UsageError: a prompt does not suit the model.
    """
    if prompts is None:
        if tokenizer is None:
            return [[(7919 * i + 104729 * p) % vocabulary for i in range(WITHOUT_TOKENIZER)] for p in range(len(TEXTS))]
        is_chat = tokenizer.chat_template is not None
        prompts = [({"role": "user", "content": text},) for text in CHATS] if is_chat else TEXTS
    result = []
    for number, prompt in enumerate(prompts, 1):
        if isinstance(prompt, tuple) and (not prompt or isinstance(prompt[0], int)):
            ids: list[Any] = list(prompt)
        elif tokenizer is None:
            raise UsageError(f"prompt {number}: the engine has no tokenizer; use token ids")
        else:
            try:
                ids = tokenizer.encode(prompt) if isinstance(prompt, str) else tokenizer.encode_chat(prompt)
            except RequestError as problem:
                raise UsageError(f"prompt {number}: {problem}") from None
        if not ids or max(ids) >= vocabulary:
            raise UsageError(f"prompt {number}: it has no tokens, or some that are not below {vocabulary}")
        result.append(ids)
    return result


def _read(path: Path) -> bytes:
    try:
        if (size := path.stat().st_size) > MAX_FILE_BYTES:
            raise UsageError(f"{path}: {size} bytes; at most {MAX_FILE_BYTES} are read, cut the file")
        return path.read_bytes()
    except OSError as problem:
        raise UsageError(f"{path}: can't be read ({problem.strerror})") from None


def _decode(content: bytes, path: Path) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as problem:
        raise UsageError(f"{path}: not UTF-8 text ({problem})") from None


def _prompt(line: str, where: str) -> Prompt:
    value = strict.parse_json(line.encode(), where, UsageError)
    known = ("prompt", "token_ids", "messages")
    given = [key for key in known if isinstance(value, dict) and value.get(key)]
    if len(given) != 1:
        raise UsageError(f"{where}: expected an object with one of {', '.join(known)}")
    if unknown := sorted(set(value) - {*known, "id"}):
        raise UsageError(f"{where}: unknown key {unknown[0]!r}; known: {', '.join(known)}, id")
    content = value[given[0]]
    if given[0] != "messages" and isinstance(content, str):
        return content
    if isinstance(content, list):
        kind = dict if given[0] == "messages" else int
        if all(type(item) is kind for item in content) and (kind is dict or min(content) >= 0):
            return tuple(content)
    raise UsageError(f"{where}: {given[0]}: expected a text, token ids or a list of messages")
