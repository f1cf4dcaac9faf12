"""The load generator: against a server of a few lines that answers as OpenAI's does, and what it makes of times."""

import asyncio
import itertools
import json
import subprocess
import sys
import threading
import time
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from click.testing import CliRunner
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route

from llmc.__main__ import cli
from llmc.errors import UsageError
from llmc.runtime.bench_serve import Outcome, summary, workload

seen: list[dict[str, Any]] = []


async def models(request: Request) -> JSONResponse:
    return JSONResponse({"data": [{"id": "tiny"}]})


async def completions(request: Request) -> Any:
    body = await request.json()
    seen.append(body)
    if "refuse" in body.get("prompt", ""):
        return JSONResponse({"error": {}}, 429)

    async def events() -> Any:
        for _ in range(body["max_tokens"]):
            choice = {"delta": {"content": "x"}} if "messages" in body else {"text": "x"}
            yield f"data: {json.dumps({'choices': [choice]})}\n\n"
            await asyncio.sleep(0)
        usage = {"prompt_tokens": 5, "completion_tokens": body["max_tokens"]}
        yield f"data: {json.dumps({'choices': [], 'usage': usage})}\n\ndata: [DONE]\n\n"

    return StreamingResponse(events(), media_type="text/event-stream")


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    paths = {"/v1/completions": completions, "/v1/chat/completions": completions}
    routes = [Route(path, handler, methods=["POST"]) for path, handler in paths.items()]
    app = Starlette(routes=[*routes, Route("/v1/models", models)])
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    server.force_exit = True
    thread.join(10)


def bench(*arguments: str) -> Any:
    return CliRunner().invoke(cli, ["bench", "serve", *arguments])


def test_a_load(url: str, tmp_path: Path) -> None:
    plot = tmp_path / "plot.html"
    result = bench("--url", url, "--requests", "20", "--rate", "500", "--concurrency", "4", "--output-tokens", "3-6",
                   "--slo-ttft", "60000", "--slo-e2e", "0.000001", "--plot", str(plot), "--json")  # fmt: skip
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["completed"] == 20 and report["prompt_tokens"] == 100 and not report["problems"]
    assert report["output_tokens"] == sum(body["max_tokens"] for body in seen[-20:])
    assert {body["model"] for body in seen[-20:]} == {"tiny"} and seen[-1]["ignore_eos"]
    assert report["goodput_share"] == 0
    assert (
        0 < report["ttft_ms"]["p50"] <= report["ttft_ms"]["p99"] <= report["ttft_ms"]["max"] <= report["e2e_ms"]["max"]
    )
    text = plot.read_text()
    ET.fromstring(text[text.index("<svg") : text.index("</svg>") + 6])
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "")


def test_chats_prompt_files_and_the_table(url: str, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("first\n\nsecond\n")
    result = bench("--url", url, "--requests", "4", "--chat", "--prompts", str(prompts), "--slo-itl", "60000")
    assert result.exit_code == 0 and "to the first text" in result.output and "100.0 %" in result.output
    assert sorted(body["messages"][0]["content"] for body in seen[-4:]) == ["first", "first", "second", "second"]


def test_refusals_are_counted(url: str, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("fine\nrefuse\n")
    report = json.loads(bench("--url", url, "--requests", "4", "--prompts", str(prompts), "--json").stdout)
    assert (report["completed"], report["problems"]) == (2, {"status 429": 2})


def test_arrivals_and_lengths() -> None:
    works = workload(2000, 50.0, "10-20", "8,32", None, seed=1)
    gaps = [b.arrival - a.arrival for a, b in itertools.pairwise(works)]
    assert 0.018 < sum(gaps) / len(gaps) < 0.022 and min(gaps) >= 0
    assert {len(work.prompt.split()) for work in works} == set(range(10, 21))
    assert {work.max_tokens for work in works} == {8, 32}
    assert works == workload(2000, 50.0, "10-20", "8,32", None, seed=1)
    for bad in ("x", "0", "5-2", "1,,2"):
        with pytest.raises(UsageError, match="--input-tokens"):
            workload(1, None, bad, "1", None, 0)


def test_times_count_from_when_a_request_was_due() -> None:
    outcomes = [Outcome(10.0, 12.0, [11.0, 11.5, 12.0], 3, 3), Outcome(10.0, 20.0, [19.0, 20.0], 3, 2)]
    outcomes.append(Outcome(10.0, 11.0, problem="status 500"))
    report = summary(outcomes, 10.0, {"ttft": 2000.0, "itl": 600.0, "e2e": None})
    assert report["ttft_ms"]["max"] == 9000 and report["itl_ms"]["p50"] == 500
    assert report["goodput_share"] == pytest.approx(1 / 3) and report["goodput_requests_per_second"] == 0.1


def test_there_is_a_server() -> None:
    assert isinstance(bench("--url", "http://127.0.0.1:1").exception, UsageError)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nonsense"], "nonsense: expected NAME=COMMAND, or NAME=http://HOST:PORT"),
        (['a="serve {port}'], "No closing quotation"),
        (["a=serve it"], "the command has no {port}"),
        (["a=/no/such/server {port}"], "there is no command /no/such/server"),
        (["a=http://127.0.0.1:1", "--rounds", "0"], "argument --rounds: 0: expected 1 or more"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_what_the_comparison_of_servers_refuses(arguments: list[str], message: str) -> None:
    script = Path(__file__).parents[2] / "build_scripts/bench_serve_peers.py"
    done = subprocess.run([sys.executable, script, *arguments], capture_output=True, text=True)
    assert done.returncode == 2 and message in done.stderr and "Traceback" not in done.stderr
