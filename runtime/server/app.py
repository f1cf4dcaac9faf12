"""The table of routes, and the application made of it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from types import SimpleNamespace

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from llmc.runtime.server import openapi
from llmc.runtime.server.guard import Guard
from llmc.runtime.server.models import Models
from llmc.runtime.server.routes import chat, completions, embeddings, models, page, responses, tokens
from llmc.runtime.server.schema.chat import ChatRequest
from llmc.runtime.server.schema.completions import CompletionRequest
from llmc.runtime.server.schema.embeddings import EmbeddingRequest
from llmc.runtime.server.schema.responses import ResponseRequest
from llmc.runtime.server.schema.text import DetokenizeRequest, TokenizeRequest
from llmc.runtime.server.settings import Keys, Settings
from llmc.runtime.server.stream import DisconnectedError, Gone

Handler = Callable[[Request], Awaitable[Response]]


@dataclass(frozen=True)
class Endpoint:
    """One address: its method, what answers it, what it takes and gives (a media type), and a line about it."""

    method: str
    path: str
    handler: Handler
    text: str
    body: type[BaseModel] | None = None
    gives: str = "application/json"
    streams: bool = False


ENDPOINTS = (
    Endpoint("GET", "/", page.page, "A page to chat.", gives="text/html"),
    Endpoint("GET", "/docs", openapi.docs, "This list, with all fields.", gives="text/html"),
    Endpoint("GET", "/openapi.json", openapi.openapi, "The same for programs."),
    Endpoint("POST", "/v1/chat/completions", chat.chat_completions, "Answer a chat.", ChatRequest, streams=True),
    Endpoint("POST", "/v1/completions", completions.completions, "Continue prompts.", CompletionRequest, streams=True),
    Endpoint("POST", "/v1/responses", responses.responses, "Answer a text.", ResponseRequest, streams=True),
    Endpoint("POST", "/v1/embeddings", embeddings.embeddings, "Vectors of texts.", EmbeddingRequest),
    Endpoint("GET", "/v1/models", models.list_models, "The models that are served."),
    Endpoint("GET", "/v1/models/{model:path}", models.get_model, "One model."),
    Endpoint("POST", "/tokenize", tokens.tokenize, "A text or a chat to tokens.", TokenizeRequest),
    Endpoint("POST", "/detokenize", tokens.detokenize, "Tokens to text.", DetokenizeRequest),
    Endpoint("GET", "/livez", models.livez, "The process answers.", gives="text/plain"),
    Endpoint("GET", "/readyz", models.readyz, "200 if requests can be served, else 503.", gives="text/plain"),
    Endpoint("GET", "/health", models.readyz, "The same as /readyz.", gives="text/plain"),
    Endpoint("GET", "/metrics", models.metrics, "Numbers for Prometheus.", gives="text/plain"),
)


class App:
    """Routes of a listener, as an ASGI application."""

    def __init__(self, endpoints: Iterable[Endpoint], models: Models) -> None:
        self.state = SimpleNamespace(models=models, endpoints=tuple(endpoints))
        routes = [Route(e.path, _named(e), methods=[e.method], name=e.path) for e in self.state.endpoints]
        self._router = Router(_merged(routes), redirect_slashes=False)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        scope["app"] = self
        await self._router(scope, receive, send)


def make_app(
    models: Models, keys: Keys, settings: Settings, host: str, endpoints: Iterable[Endpoint] = ENDPOINTS
) -> ASGIApp:
    """The application of a listener on ``host``. A server that shuts down takes no more requests, but orders."""
    return Guard(
        App(endpoints, models),
        keys=keys,
        host=host,
        settings=settings,
        metrics=models.metrics,
        tracing=models.tracing,
        is_draining=lambda: models.draining and endpoints is ENDPOINTS,
    )


def _named(endpoint: Endpoint) -> Handler:
    async def handler(request: Request) -> Response:
        request.scope["llmc.route"] = endpoint.path
        try:
            return await endpoint.handler(request)
        except DisconnectedError:
            return Gone()

    return handler


def _merged(routes: list[Route]) -> list[Route]:
    """As they are: each path has one method, so that another one is a 405 with the right Allow."""
    paths = [route.path for route in routes]
    assert len(set(paths)) == len(paths), "an address has one method"
    return routes
