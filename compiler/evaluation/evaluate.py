"""Evaluates an engine: windows of a text, token by token with the true text before it, then free generation."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from llmc.compiler.evaluation.figures import Comparison, Continuation, Figures, Generation, Position, mean
from llmc.compiler.evaluation.generation import equal_prefix, repetition
from llmc.compiler.evaluation.scores import Float64, PairScores, RowScores, compare, score
from llmc.compiler.evaluation.subject import EngineSubject, Subject
from llmc.compiler.evaluation.texts import Prompts, Text, prompt_ids, read_prompts, read_text, token_ids, windows
from llmc.compiler.progress import Progress
from llmc.errors import GateError, UsageError
from llmc.runtime.engine import Engine
from llmc.runtime.tokenizer import Tokenizer, tokenizer_of

CONTEXT, SHORT_CONTEXT, ENOUGH_WINDOWS = 2048, 512, 8
"""Tokens of a window, by default: the first, or the second where a text has not enough windows of the first."""

DEFAULT_TOKENS = 256

WORST = 10
"""Positions that are told apart."""

BEFORE = 12
"""Tokens that are shown before such a position."""


@dataclass(frozen=True)
class Evaluation:
    """What to evaluate on. ``text``, ``prompts`` None: those that come with llmc.

    ``windows`` 0: all of the text. ``context`` None: 2048, or 512 for a text of less than 8 such windows; less if the
    engine or the text is shorter. ``tokens`` of free generation, 0: none; None: 256, less for engines of short
    sequences.
    """

    text: Path | None = None
    windows: int = 8
    context: int | None = None
    tokens: int | None = None
    prompts: Path | None = None

    def read(self) -> Inputs:
        """Read the files.

        Raises:
            UsageError: one can't be read.
        """
        if self.prompts is not None and self.tokens == 0:
            raise UsageError("prompts are given, but no tokens are to be generated")
        return Inputs(self, read_text(self.text), read_prompts(self.prompts))


@dataclass(frozen=True)
class Inputs:
    """An evaluation whose files have been read."""

    evaluation: Evaluation
    text: Text
    prompts: Prompts | None

    def described(self) -> dict[str, Any]:
        """Which inputs these are, without paths."""
        return {
            "text": self.text.name,
            "text_sha256": self.text.sha256,
            "windows": self.evaluation.windows,
            "context": self.evaluation.context,
            "tokens": self.evaluation.tokens,
            "prompts_sha256": None if self.prompts is None else self.prompts.sha256,
        }


@dataclass(frozen=True)
class Tokens:
    """The same for one engine."""

    context: int
    bos: bool
    windows: Sequence[Sequence[int]]
    windows_of: int
    prompts: Sequence[Sequence[int]]
    limit: int
    """Tokens to generate."""

    @property
    def room(self) -> int:
        """Tokens of the longest sequence."""
        return max(self.context, max((len(p) for p in self.prompts), default=0) + self.limit)


def tokens_for(engine: Engine, inputs: Inputs) -> Tokens:
    """Tokenize, and cut into windows.

    Raises:
        UsageError: the text is too short, or does not suit the engine.
    """
    evaluation, tokenizer = inputs.evaluation, tokenizer_of(engine)
    vocabulary = engine.model.vocab_size
    ids = token_ids(inputs.text, tokenizer, vocabulary)
    bos = engine.model.bos_token_id if engine.model.add_bos else None
    extra = 0 if bos is None else 1
    context = evaluation.context
    if context is None:
        usual = CONTEXT if len(ids) >= ENOUGH_WINDOWS * CONTEXT else SHORT_CONTEXT
        context = min(usual, engine.limits.max_seq_len, len(ids) + extra)
    if context < 2:
        raise UsageError(f"a window of {context} tokens has none to predict; a text of at least 2 tokens is needed")
    cut = windows(ids, context, evaluation.windows, bos)
    limit = evaluation.tokens
    if limit is None:
        limit = max(1, min(DEFAULT_TOKENS, engine.limits.max_seq_len // 2))
    prompts = (
        prompt_ids(None if inputs.prompts is None else inputs.prompts.each, tokenizer, vocabulary) if limit else []
    )
    if inputs.prompts is None:  # ours are cut for engines of short sequences; others are an error there
        prompts = [p[: max(1, engine.limits.max_seq_len - limit)] for p in prompts]
    return Tokens(context, bos is not None, cut, len(ids) // (context - extra), prompts, limit)


def evaluate(
    engine: EngineSubject, reference: Subject | None, inputs: Inputs, tokens: Tokens, progress: Progress
) -> Figures:
    """Measure.

    Raises:
        GateError: the engine's numbers are not finite.
        UsageError: the two have different vocabularies.
    """
    if reference is not None and reference.vocab_size != engine.vocab_size:
        raise UsageError(
            f"{engine.name} has {engine.vocab_size} tokens and {reference.name} {reference.vocab_size}: they are not "
            "the same model"
        )
    tokenizer = engine.tokenizer
    progress.step("scoring the text", len(tokens.windows), "windows")
    parts = []
    for number, window in enumerate(tokens.windows):
        parts.append(_score_window(engine, reference, window, number))
        progress.advance(1)
    generation = None
    if tokens.limit:
        progress.step("generating", len(tokens.prompts), "prompts")
        generation = _generate(engine, reference, tokens, tokenizer, progress)
    own = [part.model for part in parts]
    held = None if reference is None else [part.reference for part in parts]
    return Figures(
        text=inputs.text.name,
        text_sha256=inputs.text.sha256,
        context=tokens.context,
        bos=tokens.bos,
        windows=len(tokens.windows),
        windows_of=tokens.windows_of,
        scored=sum(len(part.model.nll) for part in parts),
        perplexity=_perplexity(own),
        window_perplexities=tuple(_perplexity([scores]) for scores in own),
        worst=tuple(_worst(parts, tokens, tokenizer, reference is not None)),
        comparison=None if held is None else _comparison(parts, own, held, isinstance(reference, EngineSubject)),
        reference_window_perplexities=() if held is None else tuple(_perplexity([scores]) for scores in held),
        generation=generation,
    )


def _score_window(engine: EngineSubject, reference: Subject | None, ids: Sequence[int], number: int) -> PairScores:
    """All tokens but the first; without a reference it stands for its own."""
    subjects = [engine] if reference is None else [engine, reference]
    step = min(subject.max_rows for subject in subjects)
    count = len(ids) - 1  # nothing follows the last one
    for subject in subjects:
        subject.begin(ids[:count])
    found = []
    for start in range(0, count, step):
        stop = min(start + step, count)
        targets = np.array(ids[start + 1 : stop + 1])
        logits = engine.logits(start, stop)
        if reference is None:
            alone = score(logits, targets)
            found.append(PairScores(alone, alone, np.zeros(stop - start)))
        else:
            found.append(compare(logits, reference.logits(start, stop), targets))
        _check_finite(found[-1], engine.name, number, start)
    return PairScores(
        _joined([part.model for part in found]),
        _joined([part.reference for part in found]),
        np.concatenate([part.divergence for part in found]),
    )


def _joined(parts: Sequence[RowScores]) -> RowScores:
    return RowScores(np.concatenate([part.nll for part in parts]), np.concatenate([part.top for part in parts]))


def _check_finite(scores: PairScores, name: str, window: int, start: int) -> None:
    for what, values in (
        (f"{name}: the logits", scores.model.nll),
        ("the reference: its logits", scores.reference.nll),
        (f"{name}: the distance from the reference", scores.divergence),
    ):
        bad = np.flatnonzero(~np.isfinite(values))
        if len(bad):
            raise GateError(f"{what} of window {window}, token {start + int(bad[0])} are not finite")


def _perplexity(scores: Sequence[RowScores]) -> float:
    return float(np.exp(np.concatenate([part.nll for part in scores]).mean()))


def _comparison(
    parts: Sequence[PairScores], own: Sequence[RowScores], held: Sequence[RowScores], is_engine: bool
) -> Comparison:
    divergence = np.concatenate([part.divergence for part in parts])
    difference = np.concatenate([a.nll - b.nll for a, b in zip(own, held, strict=True)])
    equal = np.concatenate([a.top == b.top for a, b in zip(own, held, strict=True)])
    ratio = float(np.exp(difference.mean()))
    error = ratio * float(difference.std()) / len(difference) ** 0.5
    median, p99 = (float(q) for q in np.quantile(divergence, (0.5, 0.99)))
    return Comparison(
        reference="engine" if is_engine else "model",
        perplexity=_perplexity(held),
        ratio=ratio,
        ratio_error=error,
        kl=float(divergence.mean()),
        kl_median=median,
        kl_p99=p99,
        kl_max=float(divergence.max()),
        top1=float(equal.mean()),
    )


def _worst(parts: Sequence[PairScores], tokens: Tokens, tokenizer: Tokenizer | None, compared: bool) -> list[Position]:
    """By distance, or without a reference by how unlikely the text was; the worst one first."""

    def values(part: PairScores) -> Float64:
        return part.divergence if compared else part.model.nll

    candidates = [
        (float(values(part)[row]), -number, -int(row))
        for number, part in enumerate(parts)
        for row in np.argsort(-values(part), kind="stable")[:WORST]
    ]
    result = []
    for _, negative_number, negative_row in heapq.nlargest(WORST, candidates):
        number, row = -negative_number, -negative_row
        part, ids = parts[number], tokens.windows[number]
        result.append(
            Position(
                window=number,
                position=row + 1,
                divergence=float(part.divergence[row]) if compared else None,
                nll=float(part.model.nll[row]),
                before=_text(tokenizer, ids[max(0, row + 1 - BEFORE) : row + 1]),
                token=_text(tokenizer, ids[row + 1 : row + 2]),
                top=_text(tokenizer, [int(part.model.top[row])]),
                reference_top=_text(tokenizer, [int(part.reference.top[row])]) if compared else None,
            )
        )
    return result


def _generate(
    engine: EngineSubject, reference: Subject | None, tokens: Tokens, tokenizer: Tokenizer | None, progress: Progress
) -> Generation:
    ends: Collection[int] = engine.engine.model.eos_token_ids
    own = engine.generate(tokens.prompts, tokens.limit, ends)
    held: list[list[int] | None] = []
    for prompt, guess in zip(tokens.prompts, own, strict=True):
        held.append(None if reference is None else _continue(reference, prompt, guess, tokens.limit, ends))
        progress.advance(1)
    found = [_continuation(prompt, a, b, tokenizer) for prompt, a, b in zip(tokens.prompts, own, held, strict=True)]
    repeated = [c.repetition for c in found]
    generation = Generation(tokens.limit, mean(repeated), max(repeated), tuple(found))
    if reference is None:
        return generation
    shares = [c.divergence / max(1, c.tokens, c.reference_tokens) for c in found]  # type: ignore[operator,type-var]
    return Generation(
        tokens.limit,
        mean(repeated),
        max(repeated),
        tuple(found),
        reference_repetition=mean([c.reference_repetition or 0.0 for c in found]),
        divergence=mean([float(c.divergence or 0) for c in found]),
        prefix=mean([float(share) for share in shares]),
    )


def _continue(
    reference: Subject, prompt: Sequence[int], guess: Sequence[int], limit: int, ends: Collection[int]
) -> list[int]:
    """What the reference writes: as far as it agrees with a guess, one pass tells; only the rest is generated."""
    written: list[int] = []
    for token in _best_successors(reference, [*prompt, *guess], len(prompt)):
        written.append(token)
        if token in ends or len(written) == limit:
            return written
        if token != guess[len(written) - 1]:
            break
    [rest] = reference.generate([[*prompt, *written]], limit - len(written), ends)
    return written + rest


def _best_successors(subject: Subject, ids: Sequence[int], start: int) -> Iterator[int]:
    """The most likely token at each place from ``start`` to the last one of ``ids``."""
    subject.begin(ids[:-1])
    for begin in range(0, len(ids) - 1, subject.max_rows):
        stop = min(begin + subject.max_rows, len(ids) - 1)
        best = subject.logits(begin, stop).argmax(1)
        yield from best[max(0, start - 1 - begin) :].tolist()


def _continuation(
    prompt: Sequence[int], own: Sequence[int], held: Sequence[int] | None, tokenizer: Tokenizer | None
) -> Continuation:
    one = Continuation(_text(tokenizer, prompt), _text(tokenizer, own), len(own), repetition(own))
    if held is None:
        return one
    return Continuation(
        one.prompt,
        one.text,
        one.tokens,
        one.repetition,
        reference_text=_text(tokenizer, held),
        reference_tokens=len(held),
        reference_repetition=repetition(held),
        divergence=equal_prefix(own, held),
    )


def _text(tokenizer: Tokenizer | None, ids: Sequence[int]) -> str:
    """Without a tokenizer, the numbers."""
    if tokenizer is None:
        return " ".join(map(str, ids))
    return tokenizer.decode(ids, skip_special_tokens=False)
