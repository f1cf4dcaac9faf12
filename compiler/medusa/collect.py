"""What heads learn from: texts that the model writes itself, and what goes into its output layer at each token.

Both are made by our own runtime, in pieces that are kept in the work folder as soon as they are made.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from llmc.compiler.evaluation.texts import prompt_ids, read_prompts
from llmc.compiler.medusa.invent import invent
from llmc.compiler.medusa.prompts import built_in
from llmc.compiler.medusa.settings import HeadTraining
from llmc.compiler.progress import Progress
from llmc.compiler.staging import disk_errors
from llmc.errors import UsageError
from llmc.runtime.batch import Batch, EmbeddingExecutor
from llmc.runtime.engine import Engine
from llmc.runtime.llm import LLM
from llmc.runtime.request import SamplingParams

PROMPTS = "prompts.json"
"""What the work folder calls the prompts that the model wrote."""

AT_ONCE = 64
"""Texts of a piece, which are written side by side."""

MIN_P = 0.05

KEPT = "what was made so far is kept"


@dataclass(frozen=True, eq=False)
class Features:
    """Of texts, one behind the other: row r is what went into the output layer before token ``tokens[r]`` was written.

    ``rows``: bfloat16 [R, H]. ``tokens``: int32 [R]. ``texts``: int32 [R], which text it is of.
    """

    rows: NDArray[Any]
    tokens: NDArray[np.int32]
    texts: NDArray[np.int32]

    def targets(self, heads: int) -> NDArray[np.int64]:
        """What each head should say, [R, heads]: the token 1, 2, ... after the row's own; -1: the text has ended."""
        result = np.full((len(self.tokens), heads), -1, np.int64)
        for head in range(heads):
            ahead = head + 1
            same = self.texts[ahead:] == self.texts[:-ahead]
            result[: len(same), head] = np.where(same, self.tokens[ahead:], -1)
        return result


def make_prompts(settings: HeadTraining, llm: LLM, folder: Path, progress: Progress) -> list[list[int]]:
    """The token ids of the prompts, ``settings.texts`` in all; those of a file are repeated if they are too few.

    Without a file they are ours, and for models that chat every second piece is of prompts that the model writes.

    Raises:
        UsageError: they don't suit the model, or there is no tokenizer for ours.
    """
    given, tokenizer, vocabulary = read_prompts(settings.prompts), llm.tokenizer, llm.vocab_size
    if given is not None:
        each = prompt_ids(given.each, tokenizer, vocabulary)
    elif tokenizer is None:
        raise UsageError('the model has no tokenizer; give --prompts, a .jsonl file of {"token_ids": [...]}')
    elif tokenizer.chat_template is None:
        texts = built_in(settings.texts, settings.seed)
        each = prompt_ids([f"{text}\n" for text in texts], tokenizer, vocabulary)
    else:
        texts = _in_turn(built_in(settings.texts, settings.seed), _invented(settings, llm, folder, progress))
        chats = [({"role": "user", "content": text},) for text in texts[: settings.texts]]
        each = prompt_ids(chats, tokenizer, vocabulary)
    long = next((i for i, ids in enumerate(each) if len(ids) + 2 > settings.length), None)
    if long is not None:
        raise UsageError(f"prompt {long + 1} has {len(each[long])} tokens; texts have {settings.length}, use --length")
    return [each[i % len(each)] for i in range(settings.texts)]


def _invented(settings: HeadTraining, llm: LLM, folder: Path, progress: Progress) -> list[str]:
    """Those that the model writes, which are kept."""
    path = folder / PROMPTS
    if not path.exists():
        progress.step("the model writes prompts")
        texts = invent(llm, settings.texts // 2, settings.length, settings.seed)
        write_whole(path, lambda file: file.write(json.dumps(texts).encode()))
    return list(json.loads(path.read_text()))


def _in_turn(first: Sequence[str], second: Sequence[str]) -> list[str]:
    """A piece of the first, one of the second, and so on, until the second has ended; then the rest of the first."""
    pieces = range(0, len(second), AT_ONCE)
    both = [text for i in pieces for texts in (first, second) for text in texts[i : i + AT_ONCE]]
    return both + list(first[len(pieces) * AT_ONCE :])


def write_pieces(
    llm: LLM,
    prompts: Sequence[list[int]],
    settings: HeadTraining,
    folder: Path,
    in_time: Callable[[], bool],
    kept: Callable[[], None],
    progress: Progress,
) -> None:
    """Let the model answer the prompts, and keep texts and features; pieces that are there already are not made again.

    Ends early once ``in_time`` says no, but not before there are two pieces. ``kept`` is called after each.
    """
    progress.step("the model writes text", len(prompts), "texts")
    again = _repeated(prompts)
    for number, begin in enumerate(range(0, len(prompts), AT_ONCE)):
        chosen = prompts[begin : begin + AT_ONCE]
        path = piece_path(folder, number)
        if not path.exists():
            if number > 1 and not in_time():
                progress.note(f"{begin} texts of {len(prompts)} were written within the time")
                return
            params = [
                SamplingParams(
                    max_tokens=settings.length - len(prompt),
                    temperature=settings.temperature if begin + i in again else 0,
                    min_p=MIN_P,
                    seed=settings.seed * 1_000_003 + begin + i,
                )
                for i, prompt in enumerate(chosen)
            ]
            results = llm.generate(list(chosen), params)
            answers = [list(result.token_ids) for result in results]
            rows = [_rows(llm, prompt, answer) for prompt, answer in zip(chosen, answers, strict=True)]
            _save(path, answers, rows, begin)
            kept()
        progress.advance(len(chosen))


def read_pieces(folder: Path) -> Features:
    """All that there is."""
    rows, tokens, texts = [], [], []
    number = 0
    while (path := piece_path(folder, number)).exists():
        with np.load(path, allow_pickle=False) as piece:
            rows.append(piece["rows"].view(ml_dtypes.bfloat16))
            tokens.append(piece["tokens"])
            texts.append(piece["texts"])
        number += 1
    return Features(np.concatenate(rows), np.concatenate(tokens), np.concatenate(texts))


def piece_path(folder: Path, number: int) -> Path:
    """Where a piece is kept."""
    return folder / f"texts-{number:05}.npz"


def write_whole(path: Path, write: Callable[[Any], None]) -> None:
    """A file that is there whole or not at all, after a crash too."""
    part = path.with_suffix(".part")
    with disk_errors(path, KEPT):
        with open(part, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)


def hidden_rows(executor: EmbeddingExecutor, engine: Engine, ids: Sequence[int], first: int) -> Iterator[NDArray[Any]]:
    """What goes into the output layer at the tokens of a text from ``first`` on; float32 [n, H] at a time.

    The text takes the first blocks of the executor's cache.
    """
    size = engine.kv_cache.block_size
    tables = np.arange(-(-len(ids) // size), dtype=np.int32)[None]
    for start in range(0, len(ids), engine.limits.max_batch_tokens):
        stop = min(len(ids), start + engine.limits.max_batch_tokens)
        batch = Batch(
            input_ids=np.array(ids[start:stop], np.int32),
            position_ids=np.arange(start, stop, dtype=np.int32),
            logit_rows=np.arange(max(first - start, 0), stop - start, dtype=np.int32),
            cu_seqlens=np.array([0, stop - start], np.int32),
            num_computed=np.array([start], np.int32),
            block_tables=tables,
        )
        if len(batch.logit_rows):
            yield executor.embed(batch, logits=False)[0]
        else:
            executor.step(batch)


def _repeated(prompts: Sequence[list[int]]) -> set[int]:
    """The numbers of those that came before: their first answer is greedy, and another must differ from it."""
    first: dict[tuple[int, ...], int] = {}
    return {number for number, ids in enumerate(prompts) if first.setdefault(tuple(ids), number) != number}


def _rows(llm: LLM, prompt: Sequence[int], answer: Sequence[int]) -> NDArray[Any]:
    """Those that say the tokens of an answer: from the last of the prompt on."""
    assert llm.engine is not None and isinstance(llm.executor, EmbeddingExecutor), "checked by train"
    ids = [*prompt, *answer][:-1]
    found = list(hidden_rows(llm.executor, llm.engine, ids, len(prompt) - 1))
    return np.concatenate(found).astype(ml_dtypes.bfloat16)


def _save(path: Path, answers: Sequence[Sequence[int]], rows: Sequence[NDArray[Any]], begin: int) -> None:
    arrays: dict[str, Any] = {
        "rows": np.concatenate(rows).view(np.uint16),
        "tokens": np.array([token for answer in answers for token in answer], np.int32),
        "texts": np.repeat(np.arange(begin, begin + len(answers), dtype=np.int32), [len(a) for a in answers]),
    }
    write_whole(path, lambda file: np.savez(file, **arrays))
