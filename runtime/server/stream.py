"""Answers that end with their client: server-sent events, and waiting that a disconnect interrupts."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from llmc.runtime.server.errors import ApiError, to_bytes

if TYPE_CHECKING:
    from llmc.runtime.server.job import Job

T = TypeVar("T")
DONE = b"data: [DONE]\n\n"

log = logging.getLogger("llmc.serve")


class DisconnectedError(Exception):
    """The client has gone; nobody is left to be told."""


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of the work, which is cancelled if the client goes away.

    Raises:
        DisconnectedError: it has.
    """
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise DisconnectedError
    finally:
        for future in (task, watch):
            future.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def finish(request: Request, job: Job, work: Coroutine[Any, Any, T]) -> T:
    """The result of a job that is not streamed; the job ends with it, or with its client.

    Raises:
        ApiError: the job fails.
        DisconnectedError: the client has gone.
    """
    with contextlib.closing(job):
        return await unless_disconnected(request.receive, work)


class Gone(Response):
    """What is left to say to a client that has gone: nothing. The connection is closed already."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Nothing."""
        await send({"type": "http.response.start", "status": 499, "headers": []})
        await send({"type": "http.response.body", "body": b""})


class EventStream(Response):
    """Server-sent events of a job. An error is the last event; the connection is closed after it, without [DONE].

    ``names``: whether events have names (their ``type``), as in the responses API; that has no [DONE] either.
    """

    media_type = "text/event-stream"

    def __init__(self, job: Job, events: AsyncIterator[dict[str, Any]], *, names: bool = False) -> None:
        super().__init__()
        del self.headers["content-length"]
        self.headers["x-accel-buffering"] = "no"
        self._job, self._events, self._names = job, events, names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send them as they come."""
        try:
            with contextlib.closing(self._job), contextlib.suppress(DisconnectedError):
                await unless_disconnected(receive, self._send(scope, send))
        finally:
            await self._events.aclose()  # type: ignore[attr-defined]

    async def _send(self, scope: Scope, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        try:
            async for event in self._events:
                await send({"type": "http.response.body", "body": self._format(event), "more_body": True})
            last = b"" if self._names else DONE
        except ApiError as problem:
            last = self._failed(problem, scope)
        except Exception:
            log.exception("request %s failed in its stream", scope.get("llmc.request_id"))
            last = self._failed(ApiError(500, "the server failed to answer this request"), scope)
        await send({"type": "http.response.body", "body": last})

    def _failed(self, problem: ApiError, scope: Scope) -> bytes:
        scope["llmc.connection"].close_after_answer()
        error = problem.to_json()
        return self._format({**error["error"], "type": "error"} if self._names else error)

    def _format(self, event: dict[str, Any]) -> bytes:
        name = f"event: {event['type']}\n".encode() if self._names else b""
        return name + b"data: " + to_bytes(event) + b"\n\n"
