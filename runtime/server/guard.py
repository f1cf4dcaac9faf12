"""Stands before every route: whom it lets in, what it counts and logs, and how errors look."""

from __future__ import annotations

import base64
import binascii
import ipaddress
import logging
import time
import uuid
from collections.abc import Callable
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from llmc.runtime.server.errors import PHRASES, ApiError
from llmc.runtime.server.metrics import Metrics
from llmc.runtime.server.settings import MAX_HEADER_BYTES, MAX_HEADER_LINES, Keys, Settings, is_loopback

if TYPE_CHECKING:
    from llmc.runtime.server.tracing import Tracing

OPEN = {b"/livez", b"/readyz", b"/health"}
"""Answer everybody, to GET and HEAD; their bodies are constant."""

CHALLENGE = {"www-authenticate": 'Basic realm="llmc", charset="UTF-8"'}

log = logging.getLogger("llmc.serve")


class Guard:
    """Middleware; nothing passes but what is allowed.

    Args:
        host: what the listener is bound to: names of a loopback listener are checked, since a web page can reach it.
        is_draining: whether new work is refused.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        keys: Keys,
        host: str,
        settings: Settings,
        metrics: Metrics,
        is_draining: Callable[[], bool],
        tracing: Tracing | None = None,
    ) -> None:
        self.app, self._keys, self._metrics, self._is_draining = app, keys, metrics, is_draining
        self._tracing = tracing
        self._checks_host = is_loopback(host) or not keys
        self._hosts = {name.lower() for name in settings.allowed_host}
        self._origins = {name.lower().rstrip("/") for name in settings.allowed_origin}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or have the app answer it."""
        if scope["type"] != "http":
            return
        begin, status, request_id = time.monotonic(), 0, uuid.uuid4().hex
        scope["llmc.request_id"] = request_id
        echoed = _header(scope, b"x-request-id")
        traced = None if self._tracing is None or scope["raw_path"] in OPEN else self._tracing.begin()

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), *_headers(scope, echoed)]
            await send(message)

        try:
            await self._answer(scope, receive, watched)
        except Exception as problem:
            if status:
                log.exception("request %s failed after its answer had begun", request_id)
                scope["llmc.connection"].drop()
            else:
                await _error(problem, request_id).response()(scope, receive, watched)
        finally:
            self._report(scope, request_id, status, time.monotonic() - begin)
            if self._tracing is not None and traced is not None:
                self._tracing.end(scope, traced, status)

    def _report(self, scope: Scope, request_id: str, status: int, seconds: float) -> None:
        route = scope.get("llmc.route", "other")
        self._metrics.request(route, status, seconds)
        fields = {"id": request_id, "method": scope["method"], "route": route, "status": status}
        level = logging.DEBUG if route.encode() in OPEN else logging.INFO
        log.log(level, "request", extra={"fields": fields | {"seconds": round(seconds, 4)}})

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        size = sum(len(name) + len(value) + 4 for name, value in scope["headers"])
        if len(scope["headers"]) > MAX_HEADER_LINES or size + len(scope["raw_path"]) > MAX_HEADER_BYTES:
            raise ApiError(431, PHRASES[431])
        self._check_host(_header(scope, b"host"))
        is_probe = scope["raw_path"] in OPEN and scope["method"] in ("GET", "HEAD")
        if self._keys and not is_probe:
            scope["llmc.key"] = self._check_key(_header(scope, b"authorization"))
        self._check_origin(_header(scope, b"origin"), _header(scope, b"host"))
        if self._is_draining() and scope["method"] == "POST":
            raise ApiError(503, "the server is shutting down", code="draining", headers={"retry-after": "5"})
        await self.app(scope, receive, send)

    def _check_host(self, value: bytes) -> None:
        """Against DNS rebinding. No browser leaves the header out; old health checks do."""
        if not self._checks_host or not value:
            return
        name = _hostname(value.decode("latin-1"))
        if not (name in self._hosts or name == "localhost" or _is_address(name)):
            raise ApiError(403, "this name of the server is not allowed; see --allowed-host")

    def _check_origin(self, value: bytes, host: bytes) -> None:
        if not value:
            return
        origin = value.decode("latin-1").lower()
        try:
            netloc = urlsplit(origin).netloc
        except ValueError:
            netloc = ""
        same = netloc != "" and _hostname(netloc) == _hostname(host.decode("latin-1"))
        if not (same or origin.rstrip("/") in self._origins):
            raise ApiError(403, "web pages of this origin may not send requests; see --allowed-origin")

    def _check_key(self, value: bytes) -> str:
        scheme, _, credentials = value.strip().partition(b" ")
        key = b""
        if scheme.lower() == b"bearer":
            key = credentials.strip()
        elif scheme.lower() == b"basic":
            try:
                key = base64.b64decode(credentials.strip(), validate=True).partition(b":")[2]
            except binascii.Error:
                key = b""
        found = self._keys.find(key)
        if found is None:
            raise ApiError(401, "a valid API key is needed", code="invalid_api_key", headers=CHALLENGE)
        return found


def _error(problem: Exception, request_id: str) -> ApiError:
    if isinstance(problem, ApiError):
        return problem
    if isinstance(problem, HTTPException):
        headers = {k.lower(): v for k, v in (problem.headers or {}).items()}
        return ApiError(problem.status_code, PHRASES.get(problem.status_code, "the request failed"), headers=headers)
    log.exception("request %s failed", request_id)
    return ApiError(500, "the server failed to answer this request")


def _headers(scope: Scope, request_id: bytes) -> list[tuple[bytes, bytes]]:
    """For every answer. The client's id of the request is echoed if it is plain text; it has no other use."""
    headers = [(b"x-content-type-options", b"nosniff"), (b"cache-control", b"no-store")]
    if request_id and len(request_id) <= 128 and all(32 < c < 127 for c in request_id):
        headers.append((b"x-request-id", request_id))
    return headers


def _header(scope: Scope, name: bytes) -> bytes:
    return next((value for key, value in scope["headers"] if key == name), b"")


def _hostname(value: str) -> str:
    """Of HOST, HOST:PORT or [V6]:PORT."""
    value = value.strip().lower()
    if value.startswith("["):
        return value[1:].partition("]")[0]
    return value.partition(":")[0] if value.count(":") <= 1 else value


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
