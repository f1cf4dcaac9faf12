"""Reads the body of a request within its limits of size, time and nesting, into a model of its schema."""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request

from llmc.errors import RequestError
from llmc.runtime import strict
from llmc.runtime.server.errors import ApiError, from_validation
from llmc.runtime.server.settings import MAX_NESTING

if TYPE_CHECKING:
    from llmc.runtime.server.models import Models

M = TypeVar("M", bound=BaseModel)

LARGE = 1 << 16
"""Bytes beyond which a body is parsed beside the event loop."""

BRACKETS = re.compile(rb'"(?:[^"\\]|\\.)*"|[\[{]+|[\]}]+', re.DOTALL)


async def read(request: Request, models: Models, schema: type[M]) -> M:
    """The body as a model of the schema.

    Raises:
        ApiError: 400, 408, 413, 415.
    """
    if request.headers.get("content-type", "").split(";")[0].strip().lower() != "application/json":
        raise ApiError(415, "send the body as content-type: application/json")
    text = await _bytes(request, models.settings.max_body_bytes, models.settings.body_timeout)
    if len(text) <= LARGE:
        return _parse(text, schema)
    return await models.in_thread(lambda: _parse(text, schema))


def parse_json(text: bytes) -> Any:
    """Strict JSON of limited depth.

    Raises:
        ApiError: 400.
    """
    if not text.strip():
        raise ApiError(400, "the body is empty; send JSON")
    depth = 0
    for match in BRACKETS.finditer(text):
        run = match.group()
        if run[:1] in b"[{":
            depth += len(run)
            if depth > MAX_NESTING:
                raise ApiError(400, f"the body is nested deeper than {MAX_NESTING} levels")
        elif run[:1] in b"]}":
            depth -= len(run)
    try:
        return strict.parse_json(text, "the body", RequestError)
    except RequestError as problem:
        raise ApiError(400, str(problem)[:300]) from None


def _parse(text: bytes, schema: type[M]) -> M:
    value = parse_json(text)
    if not isinstance(value, dict):
        raise ApiError(400, "the body: expected an object")
    try:
        return schema.model_validate(value)
    except ValidationError as problem:
        raise from_validation(problem, value) from None


async def _bytes(request: Request, limit: int, seconds: float) -> bytes:
    too_large = ApiError(413, f"the body is larger than {limit} bytes", headers={"connection": "close"})
    declared = request.headers.get("content-length", "0")
    if declared.isdecimal() and int(declared[:20]) > limit:
        raise too_large
    parts, size = [], 0
    try:
        async with asyncio.timeout(seconds):
            async for part in request.stream():
                size += len(part)
                if size > limit:
                    raise too_large
                parts.append(part)
    except TimeoutError:
        raise ApiError(408, "the body came too slowly", headers={"connection": "close"}) from None
    except ClientDisconnect:
        raise ApiError(400, "the client has gone") from None
    return b"".join(parts)
