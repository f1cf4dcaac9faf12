"""What /metrics says, in a registry of its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from llmc.runtime.server.engine_loop import EngineLoop
    from llmc.runtime.server.logs import Logs
    from llmc.runtime.server.models import Model

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


GAUGES = {
    "llmc_running_sequences": ("running", "Sequences that run"),
    "llmc_waiting_sequences": ("waiting", "Sequences that wait"),
    "llmc_kv_blocks_used": ("kv_used", "Blocks of the KV cache that sequences hold"),
    "llmc_kv_blocks_cached": ("kv_cached", "Blocks of the KV cache that are kept for prompts that begin alike"),
    "llmc_kv_blocks": ("kv_total", "Blocks of the KV cache"),
    "llmc_engine_steps": ("steps", "Steps since the engine was loaded"),
    "llmc_preemptions": ("preemptions", "Sequences put back to make room"),
    "llmc_prefix_hit_tokens": ("prefix_hits", "Tokens of prompts that were found in the KV cache"),
    "llmc_prefix_query_tokens": ("prefix_queries", "Tokens of prompts that were looked for in the KV cache"),
    "llmc_draft_tokens": ("drafted", "Tokens that were drafted"),
    "llmc_draft_tokens_accepted": ("accepted", "Drafts that were right"),
}
"""Name: key in `LLM.counts`, and what it is."""

ACCEPTANCE = ("llmc_draft_acceptance", "Share of the verifications that went so deep and accepted so much")


class Metrics:
    """Counters and times of a server; ``logs``: what counts lost records."""

    def __init__(self, logs: Logs | None = None) -> None:
        self.registry = CollectorRegistry()
        make: dict[str, Any] = {"registry": self.registry}
        self._requests = Counter("llmc_requests", "Requests answered", ["route", "status"], **make)
        self._prompt_tokens = Counter("llmc_prompt_tokens", "Tokens of the prompts of finished requests", **make)
        self._generated = Counter("llmc_generated_tokens", "Tokens generated", **make)
        self._first = Histogram("llmc_time_to_first_token_seconds", "TTFT", buckets=SECONDS, **make)
        self._next = Histogram("llmc_inter_token_seconds", "Time between increments", buckets=SECONDS, **make)
        self._whole = Histogram("llmc_request_seconds", "Request to the end of its answer", buckets=SECONDS, **make)
        dropped = Gauge("llmc_log_records_dropped", "Log records that could not be written", **make)
        dropped.set_function(lambda: 0 if logs is None else logs.dropped)

    def request(self, route: str, status: int, seconds: float) -> None:
        """Count an answer."""
        self._requests.labels(route, str(status)).inc()
        self._whole.observe(seconds)

    def tokens(self, count: int, seconds: float, first: bool) -> None:
        """Count an increment, and the time since the one before it."""
        self._generated.inc(count)
        (self._first if first else self._next).observe(seconds)

    def prompt(self, count: int) -> None:
        """Count a prompt."""
        self._prompt_tokens.inc(count)

    def watch(self, models: Mapping[str, Model]) -> None:
        """Report the state of these engines from now on."""
        self.registry.register(_Engines(models))

    def text(self) -> bytes:
        """In the format of Prometheus."""
        return generate_latest(self.registry)


class _Engines(Collector):
    """Reads the state of the engines when it is asked for."""

    def __init__(self, models: Mapping[str, Model]) -> None:
        self._models = models

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Gauges, one value for each model."""
        families = {name: GaugeMetricFamily(name, text, labels=["model"]) for name, (_, text) in GAUGES.items()}
        rates = GaugeMetricFamily(*ACCEPTANCE, labels=["model", "proposer", "sampling", "position"])
        for model in self._models.values():
            if model.engine is not None:
                for name, value in _state(model.engine).items():
                    families[name].add_metric([model.name], value)
                if (speculator := model.engine.llm.scheduler.speculator) is not None:
                    found = speculator.acceptance
                    for position, rate in enumerate(found.rates, start=1):
                        rates.add_metric([model.name, found.proposer, found.rule.label, str(position)], rate)
        yield from (*families.values(), rates)


def _state(engine: EngineLoop) -> dict[str, float]:
    counts = engine.llm.counts
    counts["waiting"] = max(counts["waiting"], engine.outstanding - counts["running"])  # some are on their way to it
    return {name: counts[key] for name, (key, _) in GAUGES.items()}
