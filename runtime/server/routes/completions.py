"""/v1/completions."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from llmc.errors import RequestError
from llmc.runtime.constraints import ConstraintSpec
from llmc.runtime.output import Completion, RequestOutput
from llmc.runtime.request import SamplingParams
from llmc.runtime.server import shapes
from llmc.runtime.server.body import read
from llmc.runtime.server.errors import ApiError, JsonResponse, from_request_error
from llmc.runtime.server.job import Job
from llmc.runtime.server.models import Model, Models
from llmc.runtime.server.routes.chat import finish_first, ticket_options
from llmc.runtime.server.schema.completions import CompletionRequest
from llmc.runtime.server.settings import MAX_SEQUENCES_OF_A_REQUEST
from llmc.runtime.server.stream import EventStream, finish
from llmc.runtime.tokenizer import Tokenizer


async def completions(request: Request) -> Response:
    """Continue prompts."""
    models: Models = request.app.state.models
    body = await read(request, models, CompletionRequest)
    model = models.find(body.model)
    spec, names = body.constraint()
    params = _params(body, spec)
    if len(body.prompt) * params.num_choices > MAX_SEQUENCES_OF_A_REQUEST:
        message = f"{len(body.prompt)} prompts with {params.num_choices} choices each are more than"
        raise ApiError(400, f"{message} {MAX_SEQUENCES_OF_A_REQUEST} sequences", param="n")
    compiled = await models.compile(model, spec, names)
    prompts = await encode_prompts(models, model, body.prompt)
    options = ticket_options(request, body, compiled, chat=False)
    job = models.submit(model, prompts, params, options)
    answer = _Answer(model, body, prompts)
    if not body.stream:
        outputs = await finish(request, job, job.results())
        if body.logprobs is None and body.prompt_logprobs is None:
            return JsonResponse(answer.whole(job, outputs))
        return await models.in_thread(lambda: JsonResponse(answer.whole(job, outputs)))  # may be millions of numbers
    await finish_first(request, job)
    return EventStream(job, answer.chunks(job))


async def encode_prompts(models: Models, model: Model, prompts: list[str | list[int]]) -> list[list[int]]:
    """The tokens of each.

    Raises:
        ApiError: 400, a text is not valid, or the model has no tokenizer.
    """
    tokenizer = model.tokenizer if any(isinstance(prompt, str) for prompt in prompts) else None
    return await models.in_thread(lambda: [_encode(tokenizer, prompt) for prompt in prompts])


def _encode(tokenizer: Tokenizer | None, prompt: str | list[int]) -> list[int]:
    return tokenizer.encode(prompt) if tokenizer is not None and isinstance(prompt, str) else list(prompt)  # type: ignore[arg-type]


def _params(body: CompletionRequest, constraint: ConstraintSpec | None) -> SamplingParams:
    if body.stream and body.best_of is not None and body.best_of > (body.n or 1):
        raise ApiError(400, "choices are ranked at the end; best_of can't be streamed", param="best_of")
    scored = body.logprobs if body.echo else None
    values = body.sampling() | {
        "max_tokens": body.max_tokens,
        "best_of": body.best_of,
        "constraint": constraint,
        "logprobs": body.logprobs,
        "prompt_logprobs": body.prompt_logprobs if body.prompt_logprobs is not None else scored,
    }
    try:
        return SamplingParams(**values)
    except RequestError as problem:
        raise from_request_error(problem) from None


class _Answer:
    """The answer to one request, whole or in chunks."""

    def __init__(self, model: Model, body: CompletionRequest, prompts: list[list[int]]) -> None:
        self._body, self._prompts, self._tokenizer = body, prompts, model.llm.tokenizer
        self._head = {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model.name,
            "system_fingerprint": model.fingerprint,
        }

    def whole(self, job: Job, outputs: list[RequestOutput]) -> dict[str, Any]:
        """All of it."""
        choices = [
            self._choice(number, output, choice) for number, output in enumerate(outputs) for choice in output.choices
        ]
        return self._head | {"choices": choices, "usage": shapes.usage(job)}

    def _choice(self, number: int, output: RequestOutput, choice: Completion) -> dict[str, Any]:
        empty = self._body.max_tokens == 0  # what the prompt is scored for is no answer
        text, tokens, entries = choice.text, list(choice.token_ids), list(choice.logprobs or ())
        if self._body.echo:
            text = self._prompt_text(number) + text
            if self._body.logprobs is not None:
                tokens = [*self._prompts[number], *tokens]
                entries = [*(output.prompt_logprobs or ()), *entries]  # type: ignore[list-item]
        logprobs = None if self._body.logprobs is None else shapes.CompletionLogprobs(self._tokenizer)
        result: dict[str, Any] = {
            "index": number * (self._body.n or 1) + choice.index,
            "text": text,
            "logprobs": None if logprobs is None else logprobs.take(entries, tokens),
            "finish_reason": "length" if empty else str(choice.finish_reason),
            "stop_reason": choice.stop_reason,
        }
        if self._body.prompt_logprobs is not None:
            result["prompt_logprobs"] = shapes.prompt_logprobs(output, self._tokenizer)
        return result

    async def chunks(self, job: Job) -> AsyncIterator[dict[str, Any]]:
        """The events of a stream."""
        states: dict[int, shapes.CompletionLogprobs] = {}
        async for number, delta in job.deltas():
            index = number * (self._body.n or 1) + delta.choice
            if index not in states:
                states[index] = shapes.CompletionLogprobs(self._tokenizer)
                if self._body.echo:
                    request = job.tickets[number].request
                    scored = list(request.prompt_logprobs) if request is not None else []
                    parts = states[index].take(scored, self._prompts[number])
                    yield self._chunk(index, self._prompt_text(number), parts)
            logprobs = states[index].take(delta.logprobs or (), delta.token_ids)
            if delta.text or delta.logprobs or delta.finish_reason is not None:
                reason = shapes.finish_reason(delta.finish_reason)
                yield self._chunk(index, delta.text, logprobs, reason, delta.stop_reason)
        if self._body.wants_usage:
            yield self._head | {"choices": [], "usage": shapes.usage(job)}

    def _chunk(
        self, index: int, text: str, logprobs: dict[str, Any], reason: str | None = None, stop: Any = None
    ) -> dict[str, Any]:
        choice = {
            "index": index,
            "text": text,
            "logprobs": None if self._body.logprobs is None else logprobs,
            "finish_reason": reason,
            "stop_reason": stop,
        }
        chunk = self._head | {"choices": [choice]}
        return chunk | {"usage": None} if self._body.wants_usage else chunk

    def _prompt_text(self, number: int) -> str:
        prompt = self._body.prompt[number]
        if isinstance(prompt, str):
            return prompt
        if self._tokenizer is None:
            raise ApiError(400, "this model has no tokenizer, so there is no text to echo", param="echo")
        return self._tokenizer.decode(prompt)
