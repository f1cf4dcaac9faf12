"""Errors in the shape of OpenAI's API, with fixed texts: no path, traceback or prompt is ever in one."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError
from starlette.responses import Response

from llmc.errors import RequestError

TYPES = {400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error"}
TYPES |= {429: "rate_limit_error"}
PHRASES = {
    404: "there is no such address here; see /docs",
    405: "this address does not take this method; see /docs",
    431: "the head of the request is too large",
}


class ApiError(Exception):
    """What a client is told. ``param`` names the field of the request that is to blame, if any."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers or {})

    def to_json(self) -> dict[str, Any]:
        """The body."""
        default = "server_error" if self.status >= 500 else "invalid_request_error"
        kind = TYPES.get(self.status, default)
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        """The answer."""
        return JsonResponse(self.to_json(), self.status, self.headers)


class JsonResponse(Response):
    """JSON in UTF-8; a surrogate that a client sent comes back as a question mark, not as an exception."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """The bytes."""
        return to_bytes(content)


def to_bytes(content: Any) -> bytes:
    """Strict JSON: no NaN, no Infinity."""
    return json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode("utf-8", "replace")


def overloaded(message: str, seconds: int = 1) -> ApiError:
    """429: try again later."""
    return ApiError(429, message, code="queue_full", headers={"retry-after": str(seconds)})


def unavailable(message: str, code: str, seconds: int = 5) -> ApiError:
    """503: try again later, or elsewhere."""
    return ApiError(503, message, code=code, headers={"retry-after": str(seconds)})


def from_request_error(problem: RequestError, names: Mapping[str, str] | None = None) -> ApiError:
    """400. ``names``: fields that are called otherwise in this API."""
    field = problem.field
    message = str(problem) if field is None else str(problem).removeprefix(f"{field}: ")
    field = (names or {}).get(field or "", field)
    code = "context_length_exceeded" if "do not fit the context" in message else None
    return ApiError(400, message[:500], param=field, code=code)


def from_validation(problem: ValidationError, body: Any) -> ApiError:
    """400, naming the first field that is wrong."""
    errors = problem.errors(include_url=False, include_input=False, include_context=False)
    first = next((e for e in errors if e["type"] == "extra_forbidden"), max(errors, key=lambda e: _depth(e, body)))
    path = _path(first["loc"], body, first["type"] in ("missing", "extra_forbidden"))
    messages = {"extra_forbidden": "unknown or unsupported field", "missing": "this field is required"}
    return ApiError(400, f"{path}: {messages.get(first['type'], first['msg'])}"[:500], param=path or None)


def _depth(error: Any, body: Any) -> int:
    return len(_steps(error["loc"], body))


def _path(location: Sequence[str | int], body: Any, with_last: bool) -> str:
    """As in the request: messages[0].content. Locations also name branches of unions, which the request knows not."""
    steps = _steps(location, body)
    if with_last and (not steps or steps[-1] != location[-1]):
        steps.append(location[-1])
    text = ""
    for step in steps:
        text += f"[{step}]" if isinstance(step, int) else f".{step}" if text else str(step)
    return text[:100]


def _steps(location: Sequence[str | int], body: Any) -> list[str | int]:
    steps: list[str | int] = []
    for step in location:
        in_object = isinstance(body, dict) and isinstance(step, str) and step in body
        in_list = isinstance(body, list) and isinstance(step, int) and 0 <= step < len(body)
        if in_object or in_list:
            body = body[step]
            steps.append(step)
    return steps
