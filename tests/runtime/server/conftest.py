"""A live `llmc serve` around an engine whose answers are known."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

import httpx
import openai
import pytest
from script_models import write_script_model

from llmc.compiler.api import build_engine

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'bad' %}{{ raise_exception('bad role: ' ~ m.content) }}"
    "{% elif m.role == 'robot' %}{{ raise_exception('robots may not talk') }}{% endif %}{{ m.content }}{% endfor %}"
)
PATIENCE = 180.0
ADMIN = ("--admin-listen", "127.0.0.1:0", "--admin-api-key", "root")


def wait_until(condition: Callable[[], Any], seconds: float = PATIENCE) -> Any:
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"{condition} did not come true within {seconds} s"
        time.sleep(0.02)
    return value


class Live:
    """A server process; its log is in a file."""

    def __init__(self, folder: Path, *arguments: str, threads: int = 1) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._log = folder / "stderr.txt"
        command = [sys.executable, "-P", "-m", "llmc", "serve", "--port", "0", "--threads", str(threads)]
        with self._log.open("wb") as file:
            self.process = subprocess.Popen([*command, *arguments], stderr=file)

    def __enter__(self) -> Self:
        try:
            wait_until(lambda: "ready: " in self.log or self.process.poll() is not None)
            assert self.process.poll() is None, self.log
        except BaseException:  # also when the test is interrupted: nobody else would end it
            self.__exit__()
            raise
        self.port = int(re.findall(r"listening on http://.*:(\d+)", self.log)[0])
        self.admin_port = int((re.findall(r"admin: on http://.*:(\d+)", self.log) or [0])[0])
        self.url = f"http://127.0.0.1:{self.port}"
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        self.process.wait()

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def http(self, **options: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=PATIENCE, verify=False, **options)  # it is http

    def openai(self, key: str = "none") -> openai.OpenAI:
        return openai.OpenAI(base_url=self.url + "/v1", api_key=key, max_retries=0, timeout=PATIENCE)

    def admin(self, path: str) -> httpx.Response:
        """Of a server that was started with `ADMIN`. `/pause` stops its engines between two steps: what a test then
        sees does not depend on who is faster.
        """
        url = f"http://127.0.0.1:{self.admin_port}{path}"
        return httpx.post(url, headers={"authorization": "Bearer root"}, timeout=PATIENCE)

    def post(self, path: str, body: Any, **headers: str) -> httpx.Response:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        with self.http() as client:
            return client.post(path, content=content, headers={"content-type": "application/json"} | headers)

    def connect(self, **options: int) -> socket.socket:
        sock = socket.socket()
        for name, value in options.items():
            sock.setsockopt(socket.SOL_SOCKET, getattr(socket, name), value)
        sock.settimeout(PATIENCE)
        sock.connect(("127.0.0.1", self.port))
        return sock

    def send_raw(self, path: str, body: Any, sock: socket.socket) -> None:
        data = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        sock.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)

    def metric(self, name: str) -> float:
        with self.http() as client:
            text = client.get("/metrics").text
        return float(re.findall(rf"^{re.escape(name)}(?:{{.*}})? (\S+)$", text, re.MULTILINE)[0])

    @property
    def is_idle(self) -> bool:
        """No sequence runs or waits, and all blocks are back."""
        return sum(map(self.metric, ("llmc_running_sequences", "llmc_waiting_sequences", "llmc_kv_blocks_used"))) == 0

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Send a signal; the exit code."""
        os.kill(self.process.pid, number)
        return self.process.wait(PATIENCE)


class ServerKit:
    """What tests of the server share; the fixture `served`."""

    Live = Live
    ADMIN = ADMIN
    wait_until = staticmethod(wait_until)

    def __init__(self, engine: Path) -> None:
        self.engine = engine


@pytest.fixture(scope="session")
def served(kit: Any, tmp_path_factory: pytest.TempPathFactory) -> ServerKit:
    """The script engine: "m" is followed by "no" and an end, "e" by an emoji, "w" by ".X", "u" by "vd." and a line."""
    folder = tmp_path_factory.mktemp("served")
    spec = kit.byte_level_spec()
    token = spec["model"]["vocab"]["d.Ċ"]
    chains = [[*kit.ids("mno"), 2], kit.ids("e😀"), kit.ids("w.X"), [*kit.ids("uv"), token], kit.ids("z")]
    model = write_script_model(folder / "model", chains, spec, TEMPLATE, True, eos_token_id=2)
    build_engine(model, folder / "script")
    return ServerKit(folder / "script")


@pytest.fixture(scope="session")
def live(served: ServerKit, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A server with default options that most tests share."""
    with Live(tmp_path_factory.mktemp("live"), str(served.engine), "--tool-parser", "hermes", *ADMIN) as server:
        yield server


@pytest.fixture
def start(served: ServerKit, tmp_path: Path) -> Callable[..., Live]:
    """A function: a server of its own, with more arguments; for `with`."""
    return lambda *arguments, **values: Live(tmp_path / "own", str(served.engine), *ADMIN, *arguments, **values)
