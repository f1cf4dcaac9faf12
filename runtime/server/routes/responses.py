"""/v1/responses: text only, nothing is stored."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from llmc.errors import RequestError
from llmc.runtime.constraints import ConstraintSpec
from llmc.runtime.request import FinishReason, SamplingParams
from llmc.runtime.server import shapes
from llmc.runtime.server.body import read
from llmc.runtime.server.errors import JsonResponse, from_request_error
from llmc.runtime.server.job import Job
from llmc.runtime.server.models import Model, Models
from llmc.runtime.server.routes.chat import encode, finish_first, ticket_options
from llmc.runtime.server.schema.responses import ResponseRequest
from llmc.runtime.server.stream import EventStream, finish


async def responses(request: Request) -> Response:
    """Answer a text or a chat."""
    models: Models = request.app.state.models
    body = await read(request, models, ResponseRequest)
    model = models.find(body.model)
    spec, params = _params(body)
    compiled = await models.compile(model, spec, {"json_schema": "text", "json_object": "text"})
    prompt = await encode(models, model, body)
    options = ticket_options(request, body, compiled, chat=True)
    job = models.submit(model, [prompt], params, options)
    answer = _Answer(model, body)
    if not body.stream:
        (output,) = await finish(request, job, job.results())
        return JsonResponse(answer.whole(job, output.text, output.finish_reason))
    await finish_first(request, job)
    return EventStream(job, answer.events(job), names=True)


def _params(body: ResponseRequest) -> tuple[ConstraintSpec | None, SamplingParams]:
    form = None if body.text is None else body.text.format
    kinds: dict[str, Any] = {}
    if form is not None and form.type != "text":
        kinds[form.type] = True if form.type == "json_object" else form.schema_ or {}
    values = {"temperature": 1.0 if body.temperature is None else body.temperature, "top_p": body.top_p}
    try:
        spec = ConstraintSpec.of(kinds)
        return spec, SamplingParams(max_tokens=body.max_output_tokens, constraint=spec, **values)  # type: ignore[arg-type]
    except RequestError as problem:
        raise from_request_error(problem, {"json_schema": "text", "json_object": "text"}) from None


class _Answer:
    """The response object, at each stage."""

    def __init__(self, model: Model, body: ResponseRequest) -> None:
        self._item, self._number = f"msg_{uuid.uuid4().hex}", 0
        self._head: dict[str, Any] = {
            "id": f"resp_{uuid.uuid4().hex}",
            "object": "response",
            "created_at": int(time.time()),
            "model": model.name,
            "instructions": body.instructions,
            "metadata": body.metadata or {},
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "max_output_tokens": body.max_output_tokens,
            "parallel_tool_calls": False,
            "tool_choice": "none",
            "tools": [],
            "error": None,
            "store": False,
        }

    def whole(self, job: Job, text: str, reason: FinishReason | None) -> dict[str, Any]:
        """When it is complete."""
        cut = reason is FinishReason.LENGTH
        usage = shapes.usage(job)
        return self._head | {
            "status": "incomplete" if cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": [self._message(text, "incomplete" if cut else "completed")],
            "usage": {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": usage["prompt_tokens_details"],
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage["total_tokens"],
            },
        }

    async def events(self, job: Job) -> AsyncIterator[dict[str, Any]]:
        """As OpenAI names them."""
        begun = self._head | {"status": "in_progress", "incomplete_details": None, "output": [], "usage": None}
        place = {"item_id": self._item, "output_index": 0, "content_index": 0}
        yield self._event("response.created", response=begun)
        yield self._event("response.in_progress", response=begun)
        yield self._event(
            "response.output_item.added", output_index=0, item=self._message("", "in_progress") | {"content": []}
        )
        yield self._event("response.content_part.added", **place, part=_part(""))
        text, reason = "", None
        async for _, delta in job.deltas():
            text, reason = text + delta.text, delta.finish_reason
            if delta.text:
                yield self._event("response.output_text.delta", **place, delta=delta.text, logprobs=[])
        response = self.whole(job, text, reason)
        yield self._event("response.output_text.done", **place, text=text, logprobs=[])
        yield self._event("response.content_part.done", **place, part=_part(text))
        yield self._event("response.output_item.done", output_index=0, item=response["output"][0])
        yield self._event(f"response.{response['status']}", response=response)

    def _event(self, kind: str, **values: Any) -> dict[str, Any]:
        self._number += 1
        return {"type": kind, "sequence_number": self._number - 1, **values}

    def _message(self, text: str, status: str) -> dict[str, Any]:
        return {"type": "message", "id": self._item, "status": status, "role": "assistant", "content": [_part(text)]}


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
