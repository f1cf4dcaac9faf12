"""The routes of --admin-listen: what only the operator may do."""

from __future__ import annotations

import logging

from starlette.requests import Request
from starlette.responses import Response

from llmc.errors import LlmcError, ResourceError
from llmc.runtime.server.app import Endpoint
from llmc.runtime.server.errors import ApiError, JsonResponse, unavailable
from llmc.runtime.server.models import Models
from llmc.runtime.server.routes.models import livez, metrics, readyz

ROOM = "; for a moment there are two: start the server with less gpu_memory or kv_memory, or with --reload-in-place"
log = logging.getLogger("llmc.serve")


async def pause(request: Request) -> Response:
    """Stop all engines between two steps; requests wait."""
    return _pause(request, True)


async def resume(request: Request) -> Response:
    """Go on."""
    return _pause(request, False)


async def reset_cache(request: Request) -> Response:
    """Forget the prefixes of prompts."""
    models: Models = request.app.state.models
    for model in models.all.values():
        model.running.call(lambda llm: llm.scheduler.kv_cache.clear())
    return JsonResponse({"status": "reset"})


async def reload(request: Request) -> Response:
    """Load all engine directories anew; requests that run end on the old engines."""
    models: Models = request.app.state.models
    if models.draining:
        raise unavailable("the server is shutting down", "draining")
    if not await reload_all(models):
        raise ApiError(500, "an engine can't be loaded; the log says why")
    return JsonResponse({"status": "reloaded"})


async def reload_all(models: Models) -> bool:
    """Load all engine directories anew; whether all could be; see `Models.load`."""
    good = True
    for model in models.all.values():
        try:
            await models.load(model)
        except (LlmcError, MemoryError, OSError) as problem:
            room = ROOM if isinstance(problem, ResourceError) and model.engine is not None else ""
            goes_on = "there is no engine any more" if model.engine is None else "the old engine goes on"
            log.error("%s: can't be reloaded, %s: %s%s", model.name, goes_on, problem, room)  # noqa: TRY400
            good = False
    return good


def _pause(request: Request, paused: bool) -> Response:
    models: Models = request.app.state.models
    models.pause(paused)
    return JsonResponse({"status": "paused" if paused else "running"})


ADMIN_ENDPOINTS = (
    Endpoint("POST", "/pause", pause, "Stop the engines between two steps; requests wait."),
    Endpoint("POST", "/resume", resume, "Let them go on."),
    Endpoint("POST", "/cache/reset", reset_cache, "Forget the prefixes of prompts."),
    Endpoint("POST", "/reload", reload, "Load the engine directories anew; running requests end on the old ones."),
    Endpoint("GET", "/livez", livez, "The process answers.", gives="text/plain"),
    Endpoint("GET", "/readyz", readyz, "200 if requests can be served, else 503.", gives="text/plain"),
    Endpoint("GET", "/metrics", metrics, "Numbers for Prometheus.", gives="text/plain"),
)
