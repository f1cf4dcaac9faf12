"""From the start to the end of a server: draining, signals, reload, queues, and clients that go away."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import psutil
import pytest

LONG: dict[str, Any] = {"prompt": "z", "max_tokens": 500, "ignore_eos": True, "n": 4, "stream": True}


class Reader(threading.Thread):
    """Reads a stream to its end; ``text`` is all that came."""

    def __init__(self, live: Any, body: dict[str, Any]) -> None:
        super().__init__()
        self.live, self.body, self.text, self.problem = live, body, "", None
        self.begun = threading.Event()
        self.start()

    def run(self) -> None:
        try:
            with self.live.http() as http, http.stream("POST", "/v1/completions", json=self.body) as answer:
                for part in answer.iter_text():
                    self.text += part
                    self.begun.set()
        except httpx.HTTPError as problem:
            self.problem = problem
        self.begun.set()

    def wait(self) -> str:
        self.join(60)
        assert not self.is_alive() and self.problem is None, self.problem
        return self.text


def test_sigterm_lets_requests_end(start: Any) -> None:
    """R10: not ready at once, new ones get 503, running ones finish, exit code 0."""
    with start() as server, server.http() as http:
        reader = Reader(server, LONG)
        reader.begun.wait(30)
        os.kill(server.process.pid, signal.SIGTERM)
        assert http.get("/readyz").status_code == 503 and http.get("/livez").status_code == 200
        refused = http.post("/v1/completions", json={"prompt": "m"})
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
        assert reader.wait().rstrip().endswith("data: [DONE]")
        assert server.process.wait(30) == 0


def test_a_second_sigterm_ends_requests(start: Any, served: Any) -> None:
    with start() as server:
        server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "m"}], "max_tokens": 1})
        children = psutil.Process(server.process.pid).children(recursive=True)
        assert children, "the worker of the chat template runs"
        reader = Reader(server, LONG | {"n": 32})
        reader.begun.wait(30)
        os.kill(server.process.pid, signal.SIGTERM)
        time.sleep(0.1)
        os.kill(server.process.pid, signal.SIGTERM)
        events = reader.wait().rstrip().split("\n\n")
        assert json.loads(events[-1].removeprefix("data: "))["error"]["code"] == "draining"
        assert server.process.wait(30) == 0
        served.wait_until(lambda: not any(child.is_running() for child in children))


def test_drain_timeout(start: Any) -> None:
    with start("--drain-timeout", "0.1") as server:
        reader = Reader(server, LONG | {"n": 32})
        reader.begun.wait(30)
        assert server.stop() == 0
        assert '"code":"draining"' in reader.wait()


def test_no_child_outlives_a_server_that_is_killed(start: Any, served: Any) -> None:
    with start() as server:
        server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "m"}], "max_tokens": 1})
        children = psutil.Process(server.process.pid).children(recursive=True)
        assert children
        server.process.kill()
        served.wait_until(
            lambda: all(not c.is_running() or c.status() == psutil.STATUS_ZOMBIE for c in children), seconds=10
        )


@pytest.mark.parametrize("way", ["SIGHUP", "admin"])
def test_reload_drops_no_request(served: Any, tmp_path: Any, way: str) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    engine = tmp_path / "current"
    engine.symlink_to(served.engine)
    admin = ("--admin-listen", f"127.0.0.1:{port}", "--admin-api-key", "root")
    with served.Live(tmp_path / "own", f"--model=a={engine}", f"--model=b={served.engine}", *admin) as server:
        assert [m["id"] for m in server.http().get("/v1/models").json()["data"]] == ["a", "b"]
        readers = [Reader(server, LONG | {"model": name, "seed": 1}) for name in ("a", "b")]
        for reader in readers:
            reader.begun.wait(30)
        root = httpx.Client(base_url=f"http://127.0.0.1:{port}", headers={"authorization": "Bearer root"}, timeout=60)
        if way == "admin":
            assert root.post("/reload").json() == {"status": "reloaded"}
        else:
            os.kill(server.process.pid, signal.SIGHUP)
        assert server.post("/v1/completions", {"model": "b", "prompt": "m", "temperature": 0}).status_code == 200
        for reader in readers:
            assert reader.wait().rstrip().endswith("[DONE]")
        served.wait_until(lambda: server.log.count("loaded") == 4)
        engine.unlink()  # what can't be loaded leaves the old one in place
        assert root.post("/reload").status_code == 500
        assert server.post("/v1/completions", {"model": "a", "prompt": "m"}).status_code == 200
        assert root.post("/cache/reset").status_code == 200
        assert httpx.post(f"http://127.0.0.1:{port}/pause").status_code == 401
        assert root.post("/pause").json() == {"status": "paused"}
        late = Reader(server, {"model": "b", "prompt": "m", "stream": True, "temperature": 0})
        time.sleep(0.2)
        assert late.text == ""
        assert root.post("/resume").json() == {"status": "running"}
        assert late.wait().rstrip().endswith("[DONE]")


def test_lif_04_a_full_queue_answers(start: Any) -> None:
    """R8: many clients, few slots, random cancels: only 200 and 429, no reset, no hang; SEC-18."""
    with start("--max-queue", "8", "--max-sequences", "4") as server:
        found: list[int] = []

        def client(number: int) -> None:
            random_ = random.Random(number)
            with server.http() as http:
                for _ in range(3):
                    body = {"prompt": "z", "max_tokens": 20, "ignore_eos": True}
                    if random_.random() < 0.2:
                        with server.connect() as sock:
                            server.send_raw("/v1/completions", body, sock)
                            time.sleep(random_.random() / 50)
                        continue
                    answer = http.post("/v1/completions", json=body)
                    found.append(answer.status_code)
                    assert answer.status_code == 200 or answer.headers["retry-after"] == "1"

        with ThreadPoolExecutor(64) as pool:
            for future in [pool.submit(client, i) for i in range(64)]:
                future.result(60)
        assert set(found) == {200, 429}
        large = server.post("/v1/completions", {"prompt": "z", "n": 128, "max_tokens": 1})
        assert large.status_code == 200  # alone, as many as one request may have


def test_deadlines(start: Any, served: Any) -> None:
    """LIF-07, LIF-09: the queue's and the request's; what waited in vain never runs, the others do."""
    with start("--max-sequences", "1", "--queue-timeout", "1.5", "--request-timeout", "3") as server:
        hog = Reader(server, {"prompt": "z", "max_tokens": 510, "ignore_eos": True, "n": 128, "stream": True})
        hog.begun.wait(30)
        late = server.post("/v1/completions", {"prompt": "m"})
        assert (late.status_code, late.json()["error"]["code"]) == (503, "queue_timeout")
        last = hog.wait().rstrip().split("\n\n")[-1]
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "request_timeout"
        served.wait_until(lambda: server.is_idle)
        assert server.post("/v1/completions", {"prompt": "m"}).status_code == 200
        whole = server.post("/v1/completions", LONG | {"stream": False, "n": 128})
        assert whole.status_code == 504


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_frees_everything(live: Any, served: Any, stream: bool) -> None:
    served.wait_until(lambda: live.is_idle)
    with live.connect() as sock:
        live.send_raw("/v1/completions", LONG | {"n": 32, "stream": stream}, sock)
        served.wait_until(lambda: live.metric("llmc_running_sequences") > 0)
        steps = live.metric("llmc_engine_steps")
    served.wait_until(lambda: live.is_idle, seconds=5)
    assert live.metric("llmc_engine_steps") < steps + 450, "it was aborted, and did not just end"


def test_lif_12_clients_that_close_at_random_points(live: Any, served: Any) -> None:
    random_ = random.Random(0)
    body = json.dumps(LONG | {"n": 2, "max_tokens": 100}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    data = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
    for _ in range(50):
        with live.connect() as sock:
            cut = random_.randrange(len(data) + 1) if random_.random() < 0.5 else len(data)
            sock.sendall(data[:cut])
            if random_.random() < 0.5:
                time.sleep(random_.random() / 30)
            if random_.random() < 0.5:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # close with a reset
    served.wait_until(lambda: live.is_idle)
    assert live.post("/v1/completions", {"prompt": "m", "temperature": 0}).json()["choices"][0]["text"] == "no"
    assert "failed" not in live.log, live.log


def fails(*arguments: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-P", "-m", "llmc", "serve", *arguments], capture_output=True, text=True, timeout=60
    )
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        ([], 2, "say what to serve"),
        (["ENGINE", "--host", "0.0.0.0"], 2, "--insecure"),
        (["ENGINE", "--api-key", ""], 2, "empty key"),
        (["ENGINE", "--admin-listen", "127.0.0.1:0"], 2, "--admin-api-key"),
        (["ENGINE", "--model", "x"], 2, "NAME=DIR"),
        (["/nowhere", "--port", "0"], 4, "no such directory"),
    ],
)
def test_exit_codes(served: Any, arguments: list[str], code: int, text: str) -> None:
    found, stderr = fails(*(str(served.engine) if a == "ENGINE" else a for a in arguments))
    assert found == code and text in stderr and "Traceback" not in stderr


def test_a_port_that_is_taken(live: Any, served: Any) -> None:
    found, stderr = fails(str(served.engine), "--port", str(live.port))
    assert found == 2 and re.search(rf"127.0.0.1:{live.port}: can't listen", stderr)


def test_full_disk_for_logs(served: Any) -> None:
    """/dev/full refuses every write: the server serves on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-P", "-m", "llmc", "serve", str(served.engine), "--port", str(port), "--threads", "1"]
    with open("/dev/full", "wb") as full:
        process = subprocess.Popen(command, stderr=full)
    try:
        url = f"http://127.0.0.1:{port}"
        answers: Callable[[], bool] = lambda: _status(url + "/readyz") == 200  # noqa: E731
        served.wait_until(answers)
        assert httpx.post(url + "/v1/completions", json={"prompt": "m"}, timeout=60).status_code == 200
        dropped = re.findall(r"^llmc_log_records_dropped (\S+)", httpx.get(url + "/metrics").text, re.MULTILINE)
        assert float(dropped[0]) > 0
        process.terminate()
        assert process.wait(30) == 0
    finally:
        process.kill()


def _status(url: str) -> int:
    try:
        return httpx.get(url).status_code
    except httpx.HTTPError:
        return 0
