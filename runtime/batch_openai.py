"""Lines of OpenAI's batch format, answered by the routes of the server: same fields, errors and shapes, no socket."""

from __future__ import annotations

import asyncio
import json
import logging
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmc.errors import LlmcError, RequestError, UsageError
from llmc.runtime import strict

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message

    from llmc.runtime.llm import LLM

URLS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings")
NEVER = 1e6
"""Seconds: nobody waits for a batch."""
KEYS = {"custom_id", "method", "url", "body"}


def is_openai(line: bytes) -> bool:
    """Whether a line is of OpenAI's format rather than of our own."""
    try:
        value = strict.parse_json(line, "line", RequestError)
    except RequestError:
        return False
    return isinstance(value, dict) and "body" in value and ("custom_id" in value or "url" in value)


def run_openai(llm: LLM, lines: Iterable[bytes], start: int, ahead: int) -> Iterator[dict[str, Any]]:
    """One record for each line, in order, ``ahead`` of them in flight; ``start`` is the number of the first line.

    With adapters, a body's model is one of them, or the name of the engine's directory.

    A line that is no request has an ``error``; a request that fails has a ``response`` with its status and error.

    Raises:
        LlmcError: the engine has failed, not only a request.
        UsageError: the extra for it is not installed.
    """
    loop = asyncio.new_event_loop()
    queue: deque[asyncio.Task[dict[str, Any]]] = deque()
    app, models = loop.run_until_complete(_server(llm))
    numbered = enumerate(lines, start)
    try:
        while True:
            while len(queue) < ahead and (item := next(numbered, None)) is not None:
                queue.append(loop.create_task(_answer(app, bool(llm.adapters), *item)))
            if not queue:
                break
            yield loop.run_until_complete(queue.popleft())
    finally:
        loop.run_until_complete(_end(queue, models))
        loop.close()


async def _server(llm: LLM) -> tuple[ASGIApp, Any]:
    try:
        from llmc.runtime.server.app import make_app
        from llmc.runtime.server.metrics import Metrics
        from llmc.runtime.server.models import NAME, Models
        from llmc.runtime.server.settings import Keys, Settings
    except ImportError:
        raise UsageError("OpenAI's batch format needs the server: install llmc-engine[serve]") from None
    settings = Settings(max_queue=1 << 20, queue_timeout=NEVER, request_timeout=NEVER, stall_timeout=NEVER)
    logging.getLogger("llmc.serve").setLevel(logging.WARNING)
    path = Path("." if llm.engine is None else llm.engine.path)
    name = path.resolve().name if NAME.fullmatch(path.resolve().name) else "engine"
    models = Models({name: path}, lambda _: llm, settings, Metrics())
    await models.load(models.all[name])
    return make_app(models, Keys(()), settings, "127.0.0.1"), models


async def _end(queue: Iterable[asyncio.Task[Any]], models: Any) -> None:
    for task in queue:
        task.cancel()
    await asyncio.gather(*queue, return_exceptions=True)
    await models.close()


async def _answer(app: ASGIApp, adapters: bool, index: int, line: bytes) -> dict[str, Any]:
    record: dict[str, Any] = {"id": f"batch_req_{index}", "custom_id": None, "response": None, "error": None}
    try:
        values = strict.parse_json(line, "line", RequestError)
        if isinstance(values, dict):
            record["custom_id"] = values.get("custom_id")
        url, body = _checked(values)
    except RequestError as problem:
        record["error"] = {"code": "invalid_line", "message": str(problem)}
        return record
    if not adapters:  # there is one model, whatever the file calls it
        body.pop("model", None)
    status, text = await _post(app, url, json.dumps(body).encode())
    if status == 503:  # nothing was asked too early or too much, so this is the engine
        raise LlmcError("the engine has failed; the same command goes on from what is done")
    record["response"] = {"status_code": status, "request_id": record["id"], "body": json.loads(text)}
    return record


def _checked(values: Any) -> tuple[str, dict[str, Any]]:
    """URL and body."""
    if not isinstance(values, dict):
        raise RequestError("expected an object with custom_id, method, url and body")
    if unknown := set(values) - KEYS:
        raise RequestError(f"unknown field; known are {', '.join(sorted(KEYS))}", min(unknown))
    if not isinstance(values.get("custom_id"), str) or not values["custom_id"]:
        raise RequestError("expected a text", "custom_id")
    if values.get("method", "POST") != "POST":
        raise RequestError("expected POST", "method")
    if values.get("url") not in URLS:
        raise RequestError(f"expected one of {', '.join(URLS)}", "url")
    body = values.get("body")
    if not isinstance(body, dict):
        raise RequestError("expected an object", "body")
    if body.get("stream"):
        raise RequestError("a batch has no streams", "body.stream")
    return values["url"], body


async def _post(app: ASGIApp, url: str, body: bytes) -> tuple[int, bytes]:
    """Status and body of the answer."""
    requests = [{"type": "http.request", "body": body, "more_body": False}]
    status, parts = 500, bytearray()

    async def receive() -> Message:
        if requests:
            return requests.pop()
        await asyncio.Event().wait()  # the client stays
        raise AssertionError

    async def send(message: Message) -> None:
        nonlocal status
        status = message.get("status", status)
        parts.extend(message.get("body", b""))

    scope: dict[str, Any] = {"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST"}
    scope |= {"scheme": "http", "path": url, "raw_path": url.encode(), "query_string": b"", "root_path": ""}
    scope |= {"headers": [(b"host", b"localhost"), (b"content-type", b"application/json")]}
    await app(scope | {"client": ("127.0.0.1", 0), "server": ("127.0.0.1", 0)}, receive, send)
    return status, bytes(parts)
