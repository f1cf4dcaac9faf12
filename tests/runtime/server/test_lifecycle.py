"""From the start to the end of a server: draining, signals, reload, queues, and clients that go away."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

LONG: dict[str, Any] = {"prompt": "z", "max_tokens": 500, "ignore_eos": True, "n": 4, "stream": True}


class Reader(threading.Thread):
    """Reads a stream to its end; ``text`` is all that came."""

    def __init__(self, live: Any, body: dict[str, Any]) -> None:
        super().__init__(daemon=True)
        self.live, self.body, self.text, self.problem = live, body, "", None
        self._begun = threading.Event()
        self.start()

    def run(self) -> None:
        try:
            with self.live.http() as http, http.stream("POST", "/v1/completions", json=self.body) as answer:
                for part in answer.iter_text():
                    self.text += part
                    self._begun.set()
        except httpx.HTTPError as problem:
            self.problem = problem
        self._begun.set()

    def begin(self) -> None:
        """Wait for the first event."""
        assert self._begun.wait(180) and self.problem is None, self.problem

    def wait(self) -> str:
        """Wait for the end."""
        self.join(180)
        assert not self.is_alive() and self.problem is None, self.problem
        return self.text


def paused(live: Any, body: dict[str, Any] = LONG) -> Reader:
    """A stream that has begun and not ended, and does not go on until /resume."""
    for seed in range(20):  # the engine may be faster than the pause
        reader = Reader(live, body | {"seed": seed})
        reader.begin()
        assert live.admin("/pause").status_code == 200
        if live.metric("llmc_running_sequences") > 0:
            return reader
        live.admin("/resume")
        reader.wait()
    raise AssertionError("each stream ended before the pause")


def test_sigterm_lets_requests_end(start: Any, served: Any) -> None:
    """R10: not ready at once, new ones get 503, running ones finish, exit code 0."""
    with start("--drain-timeout", "300") as server, server.http() as http:
        reader = paused(server)
        os.kill(server.process.pid, signal.SIGTERM)
        served.wait_until(lambda: http.get("/readyz").status_code == 503)
        assert http.get("/livez").status_code == 200
        refused = http.post("/v1/completions", json={"prompt": "m"})
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
        assert server.process.poll() is None
        server.admin("/resume")
        assert reader.wait().rstrip().endswith("data: [DONE]")
        assert server.process.wait(180) == 0


def test_a_second_sigterm_ends_requests(start: Any, served: Any) -> None:
    with start("--drain-timeout", "300") as server, server.http() as http:
        server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "m"}], "max_tokens": 1})
        children = psutil.Process(server.process.pid).children(recursive=True)
        assert children, "the worker of the chat template runs"
        reader = paused(server)
        os.kill(server.process.pid, signal.SIGTERM)
        served.wait_until(lambda: http.get("/readyz").status_code == 503)
        os.kill(server.process.pid, signal.SIGTERM)
        events = reader.wait().rstrip().split("\n\n")
        assert json.loads(events[-1].removeprefix("data: "))["error"]["code"] == "draining"
        assert server.process.wait(180) == 0
        served.wait_until(lambda: not any(child.is_running() for child in children))


def test_drain_timeout(start: Any) -> None:
    with start("--drain-timeout", "0.1") as server:
        reader = paused(server)
        assert server.stop() == 0
        assert '"code":"draining"' in reader.wait()


def test_no_child_outlives_a_server_that_is_killed(start: Any, served: Any) -> None:
    with start() as server:
        server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "m"}], "max_tokens": 1})
        children = psutil.Process(server.process.pid).children(recursive=True)
        assert children
        server.process.kill()
        served.wait_until(lambda: not any(is_running(child) for child in children))


def is_running(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running()) and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:  # between the two
        return False


@pytest.mark.parametrize("way", ["SIGHUP", "admin"])
def test_reload_drops_no_request(served: Any, tmp_path: Any, way: str) -> None:
    """The engines are paused when it comes: those that run stay paused with the new ones, and go on with them."""
    engine = tmp_path / "current"
    engine.symlink_to(served.engine)
    with served.Live(tmp_path / "own", f"--model=a={engine}", f"--model=b={served.engine}", *served.ADMIN) as server:
        assert [m["id"] for m in server.http().get("/v1/models").json()["data"]] == ["a", "b"]
        readers = [paused(server, LONG | {"model": "a"}), Reader(server, LONG | {"model": "b"})]
        served.wait_until(lambda: server.metric('llmc_waiting_sequences{model="b"}') == 4)
        if way == "admin":
            assert server.admin("/reload").json() == {"status": "reloaded"}
        else:
            os.kill(server.process.pid, signal.SIGHUP)
        served.wait_until(lambda: server.log.count("loaded") == 4)
        late = Reader(server, {"model": "b", "prompt": "m", "stream": True, "temperature": 0})
        served.wait_until(lambda: server.metric('llmc_waiting_sequences{model="b"}') == 1)
        assert late.text == ""
        assert server.admin("/resume").json() == {"status": "running"}
        for reader in (*readers, late):
            assert reader.wait().rstrip().endswith("[DONE]")
        engine.unlink()  # what can't be loaded leaves the old one in place
        assert server.admin("/reload").status_code == 500
        assert server.post("/v1/completions", {"model": "a", "prompt": "m"}).status_code == 200
        assert server.admin("/cache/reset").status_code == 200
        assert httpx.post(f"http://127.0.0.1:{server.admin_port}/pause").status_code == 401


def test_lif_04_a_full_queue_answers(start: Any, served: Any) -> None:
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

        with ThreadPoolExecutor(100) as pool:
            for future in [pool.submit(client, i) for i in range(100)]:
                future.result(300)
        assert 200 in found and set(found) <= {200, 429}
        served.wait_until(lambda: server.is_idle)
        server.admin("/pause")  # 4 run and 8 wait; from then on there is no room, at once
        readers = [Reader(server, LONG | {"n": 1, "max_tokens": 2}) for _ in range(12)]
        served.wait_until(lambda: server.metric("llmc_waiting_sequences") == 12)
        refused = server.post("/v1/completions", {"prompt": "z"})
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        server.admin("/resume")
        assert all(reader.wait().rstrip().endswith("[DONE]") for reader in readers)
        large = server.post("/v1/completions", {"prompt": "z", "n": 128, "max_tokens": 1})
        assert large.status_code == 200  # alone, as many as one request may have


def test_deadlines(start: Any, served: Any) -> None:
    """LIF-07, LIF-09: the queue's and the request's; what waited in vain never runs, the others do."""
    with start("--max-sequences", "1", "--queue-timeout", "0.3", "--request-timeout", "2") as server:
        server.admin("/pause")
        late = server.post("/v1/completions", {"prompt": "m"})
        assert (late.status_code, late.json()["error"]["code"]) == (503, "queue_timeout")
        served.wait_until(lambda: server.is_idle)  # the paused engine takes it out
        steps = server.metric("llmc_engine_steps")
        server.admin("/resume")
        assert server.post("/v1/completions", {"prompt": "m", "max_tokens": 1}).status_code == 200
        assert server.metric("llmc_engine_steps") == steps + 1
    with start("--max-sequences", "1", "--queue-timeout", "300", "--request-timeout", "5") as server:
        bodies = [{"prompt": "z", "max_tokens": 510, "ignore_eos": True, "n": 128, "stream": s} for s in (True, False)]
        reader = paused(server, bodies[0])
        hurried = server.post("/v1/completions", {"prompt": "m", "timeout": 0.2})
        assert (hurried.status_code, hurried.json()["error"]["code"]) == (504, "request_timeout")
        assert server.post("/v1/completions", bodies[1]).status_code == 504
        last = reader.wait().rstrip().split("\n\n")[-1]
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "request_timeout"
        served.wait_until(lambda: server.is_idle)
        server.admin("/resume")
        assert server.post("/v1/completions", {"prompt": "m"}).status_code == 200


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_frees_everything(live: Any, served: Any, stream: bool) -> None:
    """Nothing runs on while the engine is paused: what is gone was aborted, and did not just end."""
    served.wait_until(lambda: live.is_idle)
    live.admin("/pause")
    try:
        with live.connect() as sock:
            live.send_raw("/v1/completions", LONG | {"n": 32, "stream": stream}, sock)
            served.wait_until(lambda: live.metric("llmc_waiting_sequences") == 32)
        served.wait_until(lambda: live.is_idle)
    finally:
        live.admin("/resume")
    reader = paused(live)
    blocks = live.metric("llmc_kv_blocks_used")
    with live.connect() as sock:
        live.send_raw("/v1/completions", LONG | {"n": 2, "stream": stream}, sock)
        served.wait_until(lambda: live.metric("llmc_waiting_sequences") == 2)
    served.wait_until(lambda: live.metric("llmc_waiting_sequences") == 0)
    assert live.metric("llmc_kv_blocks_used") == blocks > 0
    live.admin("/resume")
    reader.wait()
    served.wait_until(lambda: live.is_idle)


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
        [sys.executable, "-P", "-m", "llmc", "serve", *arguments], capture_output=True, text=True, timeout=300
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
    assert found == code and text in stderr and "Traceback" not in stderr and "listening" not in stderr


def test_an_engine_for_a_device_that_is_not_there(served: Any, tmp_path: Path, monkeypatch: Any) -> None:
    """It is told before anything listens, also of the second engine."""
    engine = shutil.copytree(served.engine, tmp_path / "cuda")
    manifest = json.loads((engine / "engine.json").read_text())
    (engine / "engine.json").write_text(json.dumps(manifest | {"target": "cuda:sm_90"}))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    found, stderr = fails(str(served.engine), "--model", f"second={engine}", "--port", "0")
    assert found == 4 and "but this machine has no NVIDIA" in stderr
    assert "listening" not in stderr and "Traceback" not in stderr


def test_a_port_that_is_taken(live: Any, served: Any) -> None:
    found, stderr = fails(str(served.engine), "--port", str(live.port))
    assert found == 2 and re.search(rf"127.0.0.1:{live.port}: can't listen", stderr)


def test_full_disk_for_logs(served: Any) -> None:
    """/dev/full refuses every write: the server serves on."""
    command = [sys.executable, "-P", "-m", "llmc", "serve", str(served.engine), "--port", "0", "--threads", "1"]
    with open("/dev/full", "wb") as full:
        process = subprocess.Popen(command, stderr=full)
    try:
        (listener,) = served.wait_until(lambda: psutil.Process(process.pid).net_connections())
        url = f"http://127.0.0.1:{listener.laddr.port}"
        answers: Callable[[], bool] = lambda: _status(url + "/readyz") == 200  # noqa: E731
        served.wait_until(answers)
        assert httpx.post(url + "/v1/completions", json={"prompt": "m"}, timeout=180).status_code == 200
        dropped = re.findall(r"^llmc_log_records_dropped (\S+)", httpx.get(url + "/metrics").text, re.MULTILINE)
        assert float(dropped[0]) > 0
        process.terminate()
        assert process.wait(180) == 0
    finally:
        process.kill()


def _status(url: str) -> int:
    try:
        return httpx.get(url).status_code
    except httpx.HTTPError:
        return 0
