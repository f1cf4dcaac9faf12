"""Spans of requests, as an exporter gets them."""

from __future__ import annotations

import asyncio
import itertools
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from click.testing import CliRunner
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from llmc.__main__ import cli
from llmc.errors import UsageError
from llmc.runtime.server.metrics import Metrics
from llmc.runtime.server.models import Models
from llmc.runtime.server.serve import Server
from llmc.runtime.server.settings import Settings
from llmc.runtime.server.tracing import Tracing

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SECRET = [7, 7, 7]


def spans(llm: Any, *bodies: dict[str, Any], **headers: str) -> tuple[list[Any], list[httpx.Response]]:
    """Those of the requests."""
    exporter, answers = InMemorySpanExporter(), []
    tracing = Tracing(exporter)

    async def main() -> None:
        settings = Settings(port=0)
        server = Server(Models({"m": Path("m")}, lambda path: llm, settings, Metrics(), tracing), settings)
        serving = asyncio.create_task(server.run())
        url = f"http://127.0.0.1:{server._socket.getsockname()[1]}"
        async with httpx.AsyncClient(base_url=url, timeout=60, headers=headers) as http:
            while not server._models.ready:
                await asyncio.sleep(0.02)
            answers.extend([await http.post("/v1/completions", json=body) for body in bodies])
            assert (await http.get("/livez")).status_code == 200
        server._stop()
        await asyncio.wait_for(serving, 60)

    asyncio.run(main())
    tracing.close()
    return list(exporter.get_finished_spans()), answers


def test_a_span_for_each_request_and_its_parts(kit: Any) -> None:
    parent = f"00-{TRACE}-{PARENT}-01"
    body = {"prompt": SECRET, "max_tokens": 3, "ignore_eos": True}
    found, _ = spans(kit.llm(), body, body | {"stream": True}, traceparent=parent)
    assert [s.name for s in found] == ["queue", "prefill", "decode", "POST /v1/completions"] * 2
    for whole, parts in ((found[3], found[:3]), (found[7], found[4:7])):
        assert whole.context.trace_id == int(TRACE, 16) and whole.parent.span_id == int(PARENT, 16)
        assert whole.start_time <= parts[0].start_time and parts[-1].end_time == whole.end_time
        for part, following in itertools.pairwise(parts):
            assert part.parent.span_id == whole.context.span_id
            assert part.start_time <= part.end_time == following.start_time
        attributes = dict(whole.attributes)
        assert len(attributes.pop("llmc.request_id")) == 32
        assert attributes == {
            "http.request.method": "POST",
            "http.route": "/v1/completions",
            "http.response.status_code": 200,
            "gen_ai.operation.name": "text_completion",
            "gen_ai.provider.name": "llmc",
            "gen_ai.request.model": "m",
            "gen_ai.response.model": "m",
            "gen_ai.request.max_tokens": 3,
            "gen_ai.request.temperature": 1.0,
            "gen_ai.request.top_p": 1.0,
            "gen_ai.response.finish_reasons": ("length",),
            "gen_ai.usage.input_tokens": 3,
            "gen_ai.usage.output_tokens": 3,
        }
        assert not any(part.attributes for part in parts)


def test_failures(kit: Any) -> None:
    """A request that is refused has no parts; one that fails is an error."""
    llm = kit.llm()
    llm.executor.fail_at = 1
    found, answers = spans(llm, {"prompt": SECRET, "n": 0}, {"prompt": SECRET})
    assert [a.status_code for a in answers] == [400, 500]
    whole = [s for s in found if s.name.startswith("POST")]
    assert [s.status.status_code.name for s in whole] == ["UNSET", "ERROR"]
    assert whole[0].parent is None and "gen_ai.request.model" not in whole[0].attributes
    assert len(found) > 2


class Collector(BaseHTTPRequestHandler):
    """Keeps what is sent to it, on the server."""

    def do_POST(self) -> None:
        self.server.got.append((self.path, self.rfile.read(int(self.headers["content-length"]))))  # type: ignore[attr-defined]
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


def test_a_collector_gets_spans_without_prompts(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a real deployment: the standard variables say where to, and what waits is sent at the end."""
    with HTTPServer(("127.0.0.1", 0), Collector) as collector:
        collector.got = []  # type: ignore[attr-defined]
        threading.Thread(target=collector.serve_forever, daemon=True).start()
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{collector.server_port}")
        with start("--otel") as server:
            body = {"messages": [{"role": "user", "content": "xylophone m"}], "max_tokens": 4}
            answer = server.post("/v1/chat/completions", body, traceparent=f"00-{TRACE}-{PARENT}-01")
            assert answer.status_code == 200
            assert server.stop() == 0
        collector.shutdown()
    sent = b"".join(data for path, data in collector.got if path == "/v1/traces")  # type: ignore[attr-defined]
    assert b"POST /v1/chat/completions" in sent and b"gen_ai.usage.output_tokens" in sent
    assert bytes.fromhex(TRACE) in sent and b"xylophone" not in sent


def test_the_option(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    result = CliRunner().invoke(cli, ["serve", "some/engine", "--otel"])
    assert isinstance(result.exception, UsageError)
    assert "pip install 'llmc-engine[otel]'" in str(result.exception)
