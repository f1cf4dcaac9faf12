"""What is served, and in which state it is."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from llmc.runtime.server.errors import JsonResponse
from llmc.runtime.server.models import Models


async def list_models(request: Request) -> Response:
    """All models."""
    models: Models = request.app.state.models
    return JsonResponse({"object": "list", "data": [model.summary() for model in models.listed]})


async def get_model(request: Request) -> Response:
    """One model."""
    models: Models = request.app.state.models
    return JsonResponse(models.find(request.path_params["model"]).summary())


async def livez(request: Request) -> Response:
    """The process answers."""
    return PlainTextResponse("ok\n")


async def readyz(request: Request) -> Response:
    """Requests can be served."""
    models: Models = request.app.state.models
    return PlainTextResponse("ok\n") if models.ready else PlainTextResponse("not ready\n", 503)


async def metrics(request: Request) -> Response:
    """Numbers for Prometheus."""
    models: Models = request.app.state.models
    return Response(models.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")
