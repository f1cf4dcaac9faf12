"""Replicas of `llmc serve` behind Ray Serve, on one address: python examples/ray_serve.py ENGINE --replicas 2.

Each replica is a server of its own on its machine; requests, streams too, pass through as they are, and one that dies
is replaced while the others answer. Needs ray[serve]; every machine has llmc-engine[serve] and ENGINE.
"""

import ctypes
import re
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator

import click
import httpx
from ray import serve
from starlette.requests import Request
from starlette.responses import StreamingResponse

PASSED = ("content-type", "authorization", "x-request-id", "traceparent", "retry-after", "www-authenticate")
"""Headers that go through, either way."""


def end_with_parent() -> None:
    """In the child: have the kernel end it if its replica is killed (Linux)."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


@serve.deployment(max_ongoing_requests=256, health_check_period_s=5)
class Replica:
    """One server."""

    def __init__(self, engine: str, *options: str) -> None:
        command = [sys.executable, "-P", "-m", "llmc", "serve", engine, "--port", "0", *options]
        self.server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, preexec_fn=end_with_parent)
        assert self.server.stderr is not None, "it is a pipe"
        seen = ""
        while not (ready := re.search(r"ready: .* on (http://\S+)", seen)):
            line = self.server.stderr.readline()
            seen += line
            if not line:
                raise RuntimeError(f"llmc serve has ended: {seen}")
        threading.Thread(target=lambda log: [None for _ in log], args=(self.server.stderr,), daemon=True).start()
        self.http = httpx.AsyncClient(base_url=ready[1], timeout=None)

    async def __call__(self, request: Request) -> StreamingResponse:
        """Pass a request on, and its answer as it comes."""
        headers = {name: value for name, value in request.headers.items() if name in PASSED}
        sent = self.http.build_request(
            request.method, httpx.URL(request.url.path, query=request.url.query.encode()), headers=headers,
            content=await request.body(),
        )  # fmt: skip
        answer = await self.http.send(sent, stream=True)

        async def body() -> AsyncIterator[bytes]:
            try:
                async for part in answer.aiter_raw():
                    yield part
            finally:
                await answer.aclose()  # a client that goes away ends its request

        passed = {name: value for name, value in answer.headers.items() if name in PASSED}
        return StreamingResponse(body(), answer.status_code, passed)

    async def check_health(self) -> None:
        """Ray replaces a replica for which this fails."""
        (await self.http.get("/readyz")).raise_for_status()


@click.command()
@click.argument("engine", type=click.Path(exists=True, file_okay=False, resolve_path=True))
@click.option("--replicas", type=click.IntRange(1), default=2, show_default=True)
@click.option("--host", default="127.0.0.1", show_default=True)
@click.option("--port", type=click.IntRange(0, 65535), default=8000, show_default=True)
@click.option("--threads", type=click.IntRange(1), default=1, show_default=True, help="Of each replica.")
def main(engine: str, replicas: int, host: str, port: int, threads: int) -> None:
    """Start them; returns when all are ready."""
    serve.start(http_options={"host": host, "port": port})
    serve.run(Replica.options(num_replicas=replicas).bind(engine, "--threads", str(threads)))


if __name__ == "__main__":
    main(standalone_mode=False)
    threading.Event().wait()
