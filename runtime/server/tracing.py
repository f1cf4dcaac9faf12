"""OpenTelemetry: a span for each request, with its time in the queue, in the prompt and in the answer below it.

Only loaded with --otel. Spans carry names, counts and times as in the conventions for generative AI
(https://opentelemetry.io/docs/specs/semconv/gen-ai/), never a text; the traceparent header of W3C
(https://www.w3.org/TR/trace-context/) says whose part they are.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

if TYPE_CHECKING:
    from starlette.types import Scope

    from llmc.runtime.server.job import Job

OPERATIONS = {"/v1/chat/completions": "chat", "/v1/responses": "chat", "/v1/completions": "text_completion"}
OPERATIONS |= {"/v1/embeddings": "embeddings"}


@dataclass
class Traced:
    """A request under way: its jobs, with the names of their models."""

    begin: float
    jobs: list[tuple[str, Job]] = field(default_factory=list)


class Tracing:
    """Where spans go. ``exporter``: one of OpenTelemetry's."""

    def __init__(self, exporter: Any) -> None:
        name = {} if os.environ.get("OTEL_SERVICE_NAME") else {"service.name": "llmc"}
        self._provider = TracerProvider(resource=Resource.create(name))
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("llmc", version("llmc-engine"))
        self._propagator = TraceContextTextMapPropagator()
        self._current: ContextVar[Traced] = ContextVar("traced")

    def begin(self) -> Traced:
        """A request has come: what its task submits from now on is part of it."""
        traced = Traced(time.monotonic())
        self._current.set(traced)
        return traced

    def note(self, model: str, job: Job) -> None:
        """A job of the request that the current task answers."""
        if (traced := self._current.get(None)) is not None:
            traced.jobs.append((model, job))

    def end(self, scope: Scope, traced: Traced, status: int) -> None:
        """The request has been answered: its spans."""
        end, offset = time.monotonic(), time.time_ns() - time.monotonic_ns()

        def wall(moment: float) -> int:
            return offset + int(moment * 1e9)

        route = str(scope.get("llmc.route", "other"))
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        span = self._tracer.start_span(
            f"{scope['method']} {route}",
            context=self._propagator.extract(headers),
            kind=trace.SpanKind.SERVER,
            attributes={
                "http.request.method": scope["method"],
                "http.route": route,
                "http.response.status_code": status,
                "llmc.request_id": scope["llmc.request_id"],
            },
            start_time=wall(traced.begin),
        )
        inside = trace.set_span_in_context(span)
        for model, job in traced.jobs:
            span.set_attributes(_usage(OPERATIONS.get(route, route), model, job))
            moments = [job.begun_at, job.started_at or end, job.first_at or end, end]
            for name, first, last in zip(("queue", "prefill", "decode"), moments, moments[1:], strict=False):
                if first < end:
                    part = self._tracer.start_span(name, context=inside, start_time=wall(first))
                    part.end(wall(max(first, last)))
        if status >= 500 or status == 0 or any(job.failed for _, job in traced.jobs):
            span.set_status(trace.StatusCode.ERROR)
        span.end(wall(end))

    def close(self) -> None:
        """Send what waits."""
        self._provider.shutdown()


def otlp_exporter() -> Any:
    """By HTTP; OTEL_EXPORTER_OTLP_ENDPOINT and the like say where to."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    return OTLPSpanExporter()


def _usage(operation: str, model: str, job: Job) -> dict[str, str | int | float | Sequence[str]]:
    """What the conventions call it."""
    params = job.tickets[0].params
    reasons = [str(c.finish_reason) for output in job.outputs for c in output.choices if c.finish_reason is not None]
    found: dict[str, str | int | float | Sequence[str] | None] = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "llmc",
        "gen_ai.request.model": model,
        "gen_ai.response.model": model,
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.usage.input_tokens": sum(len(ticket.prompt) for ticket in job.tickets),
        "gen_ai.usage.output_tokens": job.generated,
        "gen_ai.response.finish_reasons": reasons or None,
    }
    return {key: value for key, value in found.items() if value is not None}
