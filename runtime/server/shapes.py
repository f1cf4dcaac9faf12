"""Log-probabilities and usage in the shapes of OpenAI's two APIs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from llmc.runtime.output import RequestOutput
from llmc.runtime.sampling import TokenLogprob
from llmc.runtime.server.job import Job
from llmc.runtime.tokenizer import Tokenizer


def usage(job: Job) -> dict[str, Any]:
    """Tokens of all prompts and choices that have finished."""
    outputs = job.outputs
    prompt = sum(output.usage.prompt_tokens for output in outputs)
    completion = sum(output.usage.completion_tokens for output in outputs)
    cached = sum(output.usage.cached_tokens for output in outputs)
    job.metrics.prompt(prompt)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def finish_reason(value: Any) -> str | None:
    """As text."""
    return None if value is None else str(value)


def chat_logprobs(entries: Iterable[TokenLogprob] | None, tokenizer: Tokenizer) -> dict[str, Any] | None:
    """A list: each token with its alternatives, though two may have the same text."""
    if entries is None:
        return None
    content = [
        _chat_entry(e.token, e.logprob, tokenizer)
        | {"top_logprobs": [_chat_entry(token, logprob, tokenizer) for token, logprob in e.top]}
        for e in entries
    ]
    return {"content": content, "refusal": None}


class CompletionLogprobs:
    """The four lists of a choice, part by part. ``offset``: characters of the text before the next part."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer, self.offset = tokenizer, 0

    def take(self, entries: Sequence[TokenLogprob | None], tokens: Sequence[int]) -> dict[str, Any]:
        """The lists for these tokens; an entry of None is a token that has no probability, the first of a prompt."""
        texts = [_text(token, self._tokenizer) for token in tokens]
        offsets = []
        for token, text in zip(tokens, texts, strict=True):
            offsets.append(self.offset)
            if self._tokenizer is not None and token not in self._tokenizer.vocabulary.special_ids:
                self.offset += len(text)
        return {
            "tokens": texts,
            "token_logprobs": [None if e is None else e.logprob for e in entries],
            "top_logprobs": [None if e is None or not e.top else self._map(e.top) for e in entries],
            "text_offset": offsets,
        }

    def _map(self, top: Iterable[tuple[int, float]]) -> dict[str, float]:
        result: dict[str, float] = {}
        for token, logprob in top:
            text = _text(token, self._tokenizer)
            result[f"token_id:{token}" if text in result else text] = logprob
        return result


def prompt_logprobs(output: RequestOutput, tokenizer: Tokenizer | None) -> list[dict[str, Any] | None] | None:
    """For each token of the prompt: what it is, and the alternatives, by id."""
    if output.prompt_logprobs is None:
        return None
    return [
        None
        if entry is None
        else {
            str(token): {"logprob": logprob, "decoded_token": _text(token, tokenizer)}
            for token, logprob in dict([(entry.token, entry.logprob), *entry.top]).items()
        }
        for entry in output.prompt_logprobs
    ]


def _chat_entry(token: int, logprob: float, tokenizer: Tokenizer) -> dict[str, Any]:
    piece = tokenizer.vocabulary.piece(token)
    return {"token": piece.decode(errors="replace"), "logprob": logprob, "bytes": list(piece)}


def _text(token: int, tokenizer: Tokenizer | None) -> str:
    return f"token_id:{token}" if tokenizer is None else tokenizer.vocabulary.piece(token).decode(errors="replace")
