"""S11: 10,000 connections that send one byte and wait; who behaves is served all the while."""

from __future__ import annotations

import resource
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

CONNECTIONS, SPARE = 10_000, 1000
BODY = {"prompt": "m", "temperature": 0}


@pytest.fixture
def allowed() -> Iterator[int]:
    """How many connections this process may have, at most CONNECTIONS; its limit of open files is raised meanwhile."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = CONNECTIONS + SPARE if hard == resource.RLIM_INFINITY else min(CONNECTIONS + SPARE, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
    if wanted < CONNECTIONS + SPARE:
        print(f"only {wanted - SPARE} connections: the hard limit of open files is {hard}")
    yield wanted - SPARE
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_ten_thousand_slow_connections(start: Any, served: Any, allowed: int) -> None:
    """Each is refused (503) or cut off (408), none hangs; a client that was there before never waits for them."""
    with start("--header-timeout", "3") as server, server.http() as client:
        assert client.post("/v1/completions", json=BODY).status_code == 200
        answers: list[str] = []
        flood_is_over = threading.Event()

        def behave() -> None:
            while not flood_is_over.wait(0.05):
                answer = client.post("/v1/completions", json=BODY)
                answers.append(answer.json()["choices"][0]["text"] if answer.status_code == 200 else answer.text)

        good = threading.Thread(target=behave)
        good.start()
        socks: list[socket.socket] = []
        try:
            for _ in range(allowed):
                socks.append(server.connect())
                socks[-1].sendall(b"G")
            found = Counter(sock.recv(1000)[9:12] for sock in socks)
        finally:
            flood_is_over.set()
            good.join()
            for sock in socks:
                sock.close()
        assert set(found) == {b"408", b"503"} and found.total() == allowed, found
        assert answers and set(answers) == {"no"}
        served.wait_until(lambda: server.post("/v1/completions", BODY).status_code == 200)
        assert server.process.poll() is None and server.log.count("Traceback") == 0
