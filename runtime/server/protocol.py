"""The connections: uvicorn's HTTP/1.1 with deadlines for clients that are slow to send or to read, and a limit."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import h11
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from llmc.runtime.server.errors import PHRASES, ApiError, to_bytes
from llmc.runtime.server.settings import Settings

REFUSAL_SECONDS = 1.0
"""How long a connection beyond the limit may take to say something."""

MESSAGES = {
    400: "this is not valid HTTP",
    408: "the head of the request came too slowly",
    431: PHRASES[431],
    503: "too many connections",
}


def protocol_class(settings: Settings) -> type[asyncio.Protocol]:
    """The class of the connections of a listener with these settings."""
    return type("Connection", (_Connection,), {"settings": settings})


class _Connection(H11Protocol):
    """One connection."""

    settings: Settings

    def __init__(self, *arguments: Any, **values: Any) -> None:
        super().__init__(*arguments, **values)
        answer = self.app

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            scope["llmc.connection"] = self
            await answer(scope, receive, send)

        self.app = app
        self._too_many = False
        self._head_timer: asyncio.TimerHandle | None = None
        self._send_timer: asyncio.TimerHandle | None = None

    # -- for the app --------------------------------------------------------------------------------------------------

    def close_after_answer(self) -> None:
        """Take no further request."""
        self.cycle.keep_alive = False

    def drop(self) -> None:
        """End it now, whatever is unsent."""
        self.transport.abort()

    # -- deadlines ----------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take a connection, or refuse it."""
        super().connection_made(transport)
        self._too_many = len(self.connections) > self.settings.max_connections
        if self._too_many:  # what is unread when a connection is closed resets it: let the request come in first
            self._head_timer = self.loop.call_later(REFUSAL_SECONDS, self._refuse, 503)
        else:
            self._watch_head()

    def data_received(self, data: bytes) -> None:
        """Bytes have come in."""
        if self.transport.is_closing():
            return
        if self._too_many:
            self._refuse(503)
            return
        super().data_received(data)
        self._watch_head()

    def on_response_complete(self) -> None:
        """An answer is complete."""
        super().on_response_complete()
        self._watch_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """It has ended."""
        super().connection_lost(exc)
        for timer in (self._head_timer, self._send_timer, self.timeout_keep_alive_task):
            if timer is not None:
                timer.cancel()

    def pause_writing(self) -> None:
        """The client does not read as fast as it is sent to."""
        super().pause_writing()
        if self._send_timer is None:
            self._watch_send(self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        """It has caught up."""
        super().resume_writing()
        if self._send_timer is not None:
            self._send_timer.cancel()
            self._send_timer = None

    def send_400_response(self, msg: str) -> None:
        """Not HTTP, or too large a head."""
        problem = sys.exc_info()[1]
        status = getattr(problem, "error_status_hint", 400)
        self._refuse(status if status in MESSAGES else 400)

    def _watch_head(self) -> None:
        """Between two requests uvicorn waits for the first byte; from then on, and for the first request, this does."""
        answering = self.cycle is not None and not self.cycle.response_complete
        if answering or self.timeout_keep_alive_task is not None or self.transport.is_closing():
            if self._head_timer is not None:
                self._head_timer.cancel()
                self._head_timer = None
        elif self._head_timer is None:
            self._head_timer = self.loop.call_later(self.settings.header_timeout, self._refuse, 408)

    def _watch_send(self, unsent: int) -> None:
        def look() -> None:
            left = self.transport.get_write_buffer_size()
            if left >= unsent:
                self.drop()
            else:
                self._watch_send(left)

        self._send_timer = self.loop.call_later(self.settings.send_timeout, look)

    def _refuse(self, status: int) -> None:
        """Answer by ourselves, and close."""
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
        if self.transport.is_closing():
            return
        message = MESSAGES.get(status, MESSAGES[400])
        body = to_bytes(ApiError(status, message).to_json())
        headers = [("content-type", "application/json"), ("content-length", str(len(body))), ("connection", "close")]
        try:
            parts = [
                self.conn.send(h11.Response(status_code=status, headers=headers)),
                self.conn.send(h11.Data(data=body)),
                self.conn.send(h11.EndOfMessage()),
            ]
        except h11.LocalProtocolError:  # in the middle of an answer
            self.drop()
            return
        self.transport.write(b"".join(part for part in parts if part))
        self.transport.close()
