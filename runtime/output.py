"""What a request gives back: increments while it runs (`Delta`), and the whole at its end (`RequestOutput`)."""

from __future__ import annotations

from collections.abc import Sequence as ListOf
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmc.runtime.request import FinishReason, Request, Sequence
from llmc.runtime.sampling import TokenLogprob


@dataclass(slots=True)
class Delta:
    """What came since the last one of this choice. ``text`` may be empty; the last one has a ``finish_reason``."""

    request_id: int
    choice: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    embedding: NDArray[np.float32] | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Completion:
    """One choice. ``token_ids`` include the end token; ``logprobs``: one entry for each, None if not asked for."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop_reason: int | str | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None
    error: str | None = None

    def to_json(self) -> dict[str, Any]:
        """As the command line prints it."""
        result: dict[str, Any] = {
            "index": self.index,
            "text": self.text,
            "token_ids": list(self.token_ids),
            "finish_reason": str(self.finish_reason),
        }
        if self.stop_reason is not None:
            result["stop_reason"] = self.stop_reason
        if self.logprobs is not None:
            result["logprobs"] = [_logprob_json(entry) for entry in self.logprobs]
        if self.error is not None:
            result["error"] = self.error
        return result


@dataclass(frozen=True)
class Usage:
    """Tokens. ``cached_tokens``: of the prompt, found in the prefix cache when the request began."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        """Both."""
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True)
class RequestOutput:
    """A finished request. ``text``, ``token_ids``, ``finish_reason`` and the like are those of the first choice.

    ``seed`` gives the same draws again; None if nothing was drawn.
    """

    request_id: int
    prompt_token_ids: tuple[int, ...]
    choices: tuple[Completion, ...]
    usage: Usage
    seed: int | None = None
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None

    @property
    def text(self) -> str:
        """Generated text, without the prompt."""
        return self.choices[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Generated tokens."""
        return self.choices[0].token_ids

    @property
    def logprobs(self) -> tuple[TokenLogprob, ...] | None:
        """One for each generated token."""
        return self.choices[0].logprobs

    @property
    def finish_reason(self) -> FinishReason:
        """Why it ended."""
        return self.choices[0].finish_reason

    @property
    def error(self) -> str | None:
        """What went wrong, if finish_reason is ERROR."""
        return self.choices[0].error

    def to_json(self) -> dict[str, Any]:
        """As the command line prints it."""
        result: dict[str, Any] = {
            "choices": [choice.to_json() for choice in self.choices],
            "usage": {
                "prompt_tokens": self.usage.prompt_tokens,
                "completion_tokens": self.usage.completion_tokens,
                "total_tokens": self.usage.total_tokens,
            },
        }
        if self.seed is not None:
            result["seed"] = self.seed
        if self.prompt_logprobs is not None:
            result["prompt_logprobs"] = [None if e is None else _logprob_json(e) for e in self.prompt_logprobs]
        return result


def request_output(request: Request) -> RequestOutput:
    """The result of a finished request: of ``best_of`` choices the n with the highest mean log-probability."""
    sequences: ListOf[Sequence] = request.sequences
    if len(sequences) > request.params.n:
        ranked = sorted(sequences, key=lambda s: -s.cumulative_logprob / max(1, s.num_generated))
        sequences = ranked[: request.params.n]
    return RequestOutput(
        request_id=request.id,
        prompt_token_ids=tuple(request.prompt),
        choices=tuple(_completion(index, sequence) for index, sequence in enumerate(sequences)),
        usage=Usage(
            len(request.prompt), sum(s.num_generated for s in request.sequences), request.num_cached_tokens or 0
        ),
        seed=request.seed if request.params.temperature else None,
        prompt_logprobs=None if request.params.prompt_logprobs is None else tuple(request.prompt_logprobs),
    )


def _completion(index: int, sequence: Sequence) -> Completion:
    assert sequence.finish_reason is not None, "only finished requests have a result"
    return Completion(
        index=index,
        text="" if sequence.text is None else sequence.text.text,
        token_ids=tuple(sequence.tokens[sequence.num_prompt :]),
        finish_reason=sequence.finish_reason,
        stop_reason=sequence.stop_reason,
        logprobs=None if sequence.request.params.logprobs is None else tuple(sequence.logprobs),
        error=sequence.error,
    )


def _logprob_json(entry: TokenLogprob) -> dict[str, Any]:
    result: dict[str, Any] = {"token_id": entry.token, "logprob": entry.logprob}
    if entry.top:
        result["top"] = [{"token_id": token, "logprob": logprob} for token, logprob in entry.top]
    return result


def next_delta(sequence: Sequence) -> Delta:
    """What came since the last one, which is then reported."""
    first, sequence.num_reported = sequence.num_reported, sequence.num_generated
    return Delta(
        request_id=sequence.request.id,
        choice=sequence.choice,
        text="" if sequence.text is None else sequence.text.take(),
        token_ids=tuple(sequence.tokens[sequence.num_prompt + first :]),
        logprobs=None if sequence.request.params.logprobs is None else tuple(sequence.logprobs[first:]),
        finish_reason=sequence.finish_reason,
        stop_reason=sequence.stop_reason,
        error=sequence.error,
        embedding=sequence.request.embedding,
    )
