"""/v1/chat/completions."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from llmc.errors import RequestError
from llmc.runtime.constraints import ConstraintSpec
from llmc.runtime.constraints.base import TokenConstraint
from llmc.runtime.output import Completion, RequestOutput
from llmc.runtime.request import FinishReason, SamplingParams
from llmc.runtime.server import shapes
from llmc.runtime.server.body import read
from llmc.runtime.server.errors import ApiError, JsonResponse, from_request_error
from llmc.runtime.server.job import Job, TicketOptions
from llmc.runtime.server.models import Model, Models
from llmc.runtime.server.schema.chat import ChatRequest, Message
from llmc.runtime.server.schema.constraints import arguments_of
from llmc.runtime.server.stream import EventStream, finish, unless_disconnected
from llmc.runtime.server.tools import CallReader, ToolUse

NAMES = {"template_variables": "chat_template_kwargs", "prompt": "messages"}
"""What fields of the engine are called here."""


async def chat_completions(request: Request) -> Response:
    """Answer a chat."""
    models: Models = request.app.state.models
    body = await read(request, models, ChatRequest)
    model = models.find(body.model)
    tools = ToolUse(body, model.tokenizer, models.settings.tool_parser)
    spec, names = body.constraint()
    if (calls := tools.constraint()) is not None:
        if spec is not None:
            raise ApiError(400, "a call and another form of the answer can't both be required", param="tool_choice")
        spec, names = calls, {"grammar": "tools"}
    params = _params(body, spec, tools)
    compiled = await models.compile(model, spec, names)
    prompt = await encode(models, model, body, tools.offered)
    options = ticket_options(request, body, compiled, chat=True)
    job = models.submit(model, [prompt], params, options)
    answer = _Answer(model, body, tools)
    if not body.stream:
        outputs = await finish(request, job, job.results())
        if not body.logprobs:
            return JsonResponse(answer.whole(job, outputs))
        return await models.in_thread(lambda: JsonResponse(answer.whole(job, outputs)))  # may be millions of numbers
    await finish_first(request, job)
    return EventStream(job, answer.chunks(job))


def salt(request: Request, own: str | None) -> str:
    """Who shares the prefix cache with whom: the clients of one key, or of one salt among these."""
    return f"{request.scope.get('llmc.key', '')}/{own or ''}"


def ticket_options(request: Request, body: Any, compiled: TokenConstraint | None, *, chat: bool) -> TicketOptions:
    """What the body of a chat, of prompts or of a response says besides parameters."""
    return TicketOptions(
        chat=chat,
        streams=bool(body.stream),
        salt=salt(request, body.cache_salt),
        constraint=compiled,
        priority=body.priority or 0,
        timeout=body.timeout,
    )


async def finish_first(request: Request, job: Job) -> None:
    """Wait for the first increment, so that what fails before has a status of its own.

    Raises:
        ApiError: the job fails.
        DisconnectedError: the client has gone.
    """
    try:
        await unless_disconnected(request.receive, job.begun())
    except BaseException:
        job.close()
        raise


async def encode(models: Models, model: Model, body: Any, tools: list[dict[str, Any]] | None = None) -> list[int]:
    """The tokens of the messages of a chat or of /tokenize.

    Raises:
        ApiError: 400, the template refuses them.
    """
    tokenizer = model.tokenizer
    template = tokenizer.chat_template
    if template is None:
        raise ApiError(400, "this model has no chat template; use /v1/completions", param="messages")
    messages = messages_for(template.source, body.messages)
    add = getattr(body, "add_generation_prompt", None)
    try:
        return await models.in_thread(
            lambda: tokenizer.encode_chat(
                messages, tools=tools, add_generation_prompt=add is not False, variables=body.chat_template_kwargs
            ),
            NAMES,
        )
    except ApiError as problem:
        if problem.param == "messages" and problem.message not in template.source:
            raise ApiError(400, _known(problem.message), param="messages") from None
        raise


def messages_for(source: str, messages: list[Message]) -> list[dict[str, Any]]:
    """As templates expect them: arguments of calls are objects, and ``developer`` is the system."""
    result = []
    for message in messages:
        values = message.for_template()
        if values["role"] == "developer" and "developer" not in source:
            values["role"] = "system"
        for call in values.get("tool_calls", ()):
            call["function"]["arguments"] = arguments_of(call["function"]["arguments"])
        result.append(values)
    return result


def _known(message: str) -> str:
    """A template may put a prompt into its error; only texts that are fixed are passed on."""
    fixed = ("the chat template needed", "the chat template wrote", "the chat template did", "not valid text")
    return message if message.startswith(fixed) else "the chat template refused the messages, or failed"


def _params(body: ChatRequest, constraint: ConstraintSpec | None, tools: ToolUse) -> SamplingParams:
    if body.top_logprobs is not None and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs: true", param="top_logprobs")
    values = body.sampling() | {"max_tokens": body.max_completion_tokens or body.max_tokens}
    values["constraint"] = constraint
    if not tools.skip_special_tokens:
        values["skip_special_tokens"] = False
    if body.logprobs:
        values["logprobs"] = body.top_logprobs or 0
    try:
        return SamplingParams(**values)
    except RequestError as problem:
        raise from_request_error(problem) from None


class _Answer:
    """The answer to one request, whole or in chunks."""

    def __init__(self, model: Model, body: ChatRequest, tools: ToolUse) -> None:
        self._body, self._tokenizer, self._tools = body, model.tokenizer, tools
        self._head = {
            "id": f"chatcmpl-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model.name,
            "system_fingerprint": model.fingerprint,
        }

    def whole(self, job: Job, outputs: list[RequestOutput]) -> dict[str, Any]:
        """All of it."""
        choices = [self._choice(choice) for choice in outputs[0].choices]
        return self._head | {"object": "chat.completion", "choices": choices, "usage": shapes.usage(job)}

    def _choice(self, choice: Completion) -> dict[str, Any]:
        reader = self._tools.reader()
        text, calls = reader.feed(choice.text, final=True)
        message: dict[str, Any] = {"role": "assistant", "content": text or None if calls else text, "refusal": None}
        if calls:
            message["tool_calls"] = [{k: v for k, v in call.items() if k != "index"} for call in calls]
        return {
            "index": choice.index,
            "message": message,
            "logprobs": shapes.chat_logprobs(choice.logprobs, self._tokenizer),
            "finish_reason": _reason(choice.finish_reason, reader),
            "stop_reason": choice.stop_reason,
        }

    async def chunks(self, job: Job) -> AsyncIterator[dict[str, Any]]:
        """The events of a stream."""
        readers: dict[int, CallReader] = {}
        async for _, delta in job.deltas():
            if delta.choice not in readers:
                readers[delta.choice] = self._tools.reader()
                yield self._chunk(delta.choice, {"role": "assistant", "content": "", "refusal": None})
            reader = readers[delta.choice]
            text, calls = reader.feed(delta.text, final=delta.finish_reason is not None)
            if text or delta.logprobs:
                logprobs = shapes.chat_logprobs(delta.logprobs, self._tokenizer)
                yield self._chunk(delta.choice, {"content": text}, logprobs)
            if calls:
                yield self._chunk(delta.choice, {"tool_calls": calls})
            if delta.finish_reason is not None:
                reason = _reason(delta.finish_reason, reader)
                yield self._chunk(delta.choice, {}, None, reason, delta.stop_reason)
        if self._body.wants_usage:
            yield self._head | {"object": "chat.completion.chunk", "choices": [], "usage": shapes.usage(job)}

    def _chunk(
        self, index: int, delta: dict[str, Any], logprobs: Any = None, reason: str | None = None, stop: Any = None
    ) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        if reason is not None:
            choice["stop_reason"] = stop
        chunk = self._head | {"object": "chat.completion.chunk", "choices": [choice]}
        return chunk | {"usage": None} if self._body.wants_usage else chunk


def _reason(reason: FinishReason, reader: CallReader) -> str:
    return "tool_calls" if reader.found and reason is FinishReason.STOP else str(reason)
