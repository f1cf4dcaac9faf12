"""Who is let in, and what clients that misbehave get."""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import os
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from llmc.errors import UsageError
from llmc.runtime.server.admin import ADMIN_ENDPOINTS
from llmc.runtime.server.app import ENDPOINTS
from llmc.runtime.server.settings import Keys, Settings, check_exposure

METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "FOO")
PROBES = {"/livez", "/readyz", "/health"}
ODD = ("//v1/models", "/v1/../metrics", "/%2e/metrics", "/v1/models/", "/livez/", "/LIVEZ", "/livez%2f", "/nope", "/")
ODD += ("/livez;a", "//livez", "/./livez", "/v1//models", "/%6civez")

HEAD = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
HEAD += "Authorization: Bearer first\r\n"


def raw(live: Any, data: bytes) -> tuple[int, bytes]:
    """Send bytes on a connection of their own; the status, and all that came back."""
    with live.connect() as sock:
        sock.sendall(data)
        received = b""
        while part := sock.recv(1 << 16):
            received += part
    return int(received.split()[1]) if received else 0, received


def request(method: str, path: str, *lines: str) -> bytes:
    head = [f"{method} {path} HTTP/1.1", *(lines or ("Host: localhost",)), "Connection: close", "", ""]
    return "\r\n".join(head).encode("latin-1")


@pytest.fixture(scope="module")
def locked(served: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("locked")
    keys = folder / "keys"
    keys.write_text("second\n\nthïrd\n")
    limits = ("--header-timeout", "170", "--body-timeout", "170", "--max-body-mb", "0.2")
    arguments = (str(served.engine), "--api-key", "first", "--api-key-file", str(keys), *served.ADMIN, *limits)
    with served.Live(folder / "own", *arguments) as server:
        yield server


@pytest.fixture(scope="module")
def hasty(served: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A server that does not wait long. What has to be in time is not sent to it."""
    limits = ("--header-timeout", "1.5", "--body-timeout", "1", "--send-timeout", "1", "--max-connections", "64")
    arguments = (str(served.engine), "--api-key", "first", *served.ADMIN, *limits)
    with served.Live(tmp_path_factory.mktemp("hasty"), *arguments) as server:
        yield server


def test_sec_10_every_route_needs_the_key(locked: Any) -> None:
    paths = [e.path.replace("{model:path}", "script") for e in (*ENDPOINTS, *ADMIN_ENDPOINTS)]
    for path, method in itertools.product((*dict.fromkeys(paths), *ODD), METHODS):
        status, answer = raw(locked, request(method, path))
        if path in PROBES and method in ("GET", "HEAD"):
            assert status == 200, (method, path)
        else:
            assert status == 401, (method, path, answer)
            assert b"www-authenticate: Basic" in answer
    for path in ("/pause", "/reload", "/resume", "/cache/reset"):  # of the admin listener only
        assert raw(locked, request("POST", path, "Host: localhost", "Authorization: Bearer first"))[0] == 404


@pytest.mark.parametrize("key", ["first", "second", "thïrd"])
def test_keys_are_accepted(locked: Any, key: str) -> None:
    basic = base64.b64encode(f"user:{key}".encode()).decode()
    with locked.http() as http:
        for value in (b"Bearer " + key.encode(), b"bearer " + key.encode(), f"Basic {basic}".encode()):
            assert http.get("/v1/models", headers={b"authorization": value}).status_code == 200


@pytest.mark.parametrize(
    "value",
    [
        "",
        "Bearer",
        "Bearer ",
        "Bearer f",
        "Bearer firs",
        "Bearer first2",
        "first",
        "Basic %",
        "Basic Zmlyc3Q=",
        "\xff\xfe",
    ],
)
def test_sec_06_wrong_keys(locked: Any, value: str) -> None:
    status, answer = raw(locked, request("GET", "/v1/models", "Host: localhost", f"Authorization: {value}"))
    assert status == 401 and b"first" not in answer.split(b"\r\n\r\n", 1)[1]


def test_sec_06_keys_are_digests_and_never_empty(tmp_path: Any) -> None:
    keys = Keys(("a", "b"))
    assert keys.find(b"a") and keys.find(b"b") and keys.find(b"a") != keys.find(b"b")
    assert keys.find(b"") is None and not Keys(())
    assert "a" not in map(str, vars(keys).values())
    for bad in ("", " "):
        with pytest.raises(UsageError, match="empty key"):
            Keys(("a", bad))
    (tmp_path / "none").write_text("\n")
    for file in (tmp_path / "none", tmp_path / "missing"):
        with pytest.raises(UsageError, match="--api-key-file"):
            Keys((), file)


def test_a_network_address_needs_a_key() -> None:
    for host in ("0.0.0.0", "::", "192.168.1.2", "example.org"):
        with pytest.raises(UsageError, match="--insecure"):
            check_exposure(host, Keys(()), insecure=False)
        check_exposure(host, Keys(("k",)), insecure=False)
        check_exposure(host, Keys(()), insecure=True)
    for host in ("127.0.0.1", "::1", "localhost"):
        check_exposure(host, Keys(()), insecure=False)


@pytest.mark.parametrize("values", [{"port": 70000}, {"queue_timeout": -1.0}, {"log_level": "loud"}, {"max_queue": -1}])
def test_settings_are_checked(values: Any) -> None:
    with pytest.raises(UsageError, match="--"):
        Settings(**values)


@pytest.mark.parametrize(
    ("lines", "status"),
    [
        (["Host: evil.example"], 403),
        (["Host: localhost.evil.example:80"], 403),
        (["Host: localhost:8000"], 200),
        (["Host: 127.0.0.1:8000"], 200),
        (["Host: [::1]:8000"], 200),
        (["Host: 10.1.2.3"], 200),
        (["Host: localhost", "Origin: https://evil.example"], 403),
        (["Host: localhost", "Origin: null"], 403),
        (["Host: localhost:8000", "Origin: http://localhost:8000"], 200),
        (["Host: localhost", "Origin: http://[::1"], 403),
    ],
)
def test_sec_20_hosts_and_origins(live: Any, lines: list[str], status: int) -> None:
    found, answer = raw(live, request("GET", "/v1/models", *lines))
    assert found == status, answer
    assert b"access-control" not in answer.lower()
    if status == 403:
        assert b"--allowed-" in answer


def test_sec_20_other_content_types(live: Any) -> None:
    body = {"prompt": "m", "max_tokens": 1}
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", ""):
        answer = live.post("/v1/completions", body, **{"content-type": kind})
        assert (answer.status_code, answer.json()["error"]["param"]) == (415, None)
    assert live.post("/v1/completions", body, **{"content-type": "application/json; charset=utf-8"}).status_code == 200


def test_sec_20_names_that_the_operator_allows(start: Any) -> None:
    with start("--allowed-host", "My.Example", "--allowed-origin", "https://page.example/") as server:
        lines = ("Host: my.example:1", "Origin: https://page.example")
        assert raw(server, request("GET", "/v1/models", *lines))[0] == 200
        assert raw(server, request("GET", "/v1/models", "Host: other.example"))[0] == 403


def test_errors_have_one_shape(live: Any) -> None:
    answers = {
        404: request("GET", "/nope"),
        405: request("DELETE", "/v1/models"),
        400: b"NONSENSE\r\n\r\n",
        431: request("GET", "/livez", "Host: localhost", *(f"X-{i}: 1" for i in range(120))),
    }
    for status, data in answers.items():
        found, answer = raw(live, data)
        error = json.loads(answer.split(b"\r\n\r\n", 1)[1])["error"]
        assert found == status and set(error) == {"message", "type", "param", "code"}
    assert raw(live, request("GET", "/livez", "Host: localhost", "X: " + "a" * 70_000))[0] == 431
    assert (
        raw(live, request("GET", "/livez", "Host: localhost", *(f"X{i}: " + "a" * 2000 for i in range(40))))[0] == 431
    )


@pytest.mark.parametrize("declared", [True, False])
def test_large_bodies(locked: Any, declared: bool) -> None:
    body = json.dumps({"prompt": "m" * 250_000}).encode()
    if declared:
        data = f"{HEAD}Content-Length: {len(body)}\r\n\r\n".encode()
    else:
        data = f"{HEAD}Transfer-Encoding: chunked\r\n\r\n{len(body):x}\r\n".encode() + body
    assert raw(locked, data)[0] == 413


def test_slow_heads_and_bodies_are_cut_off(hasty: Any) -> None:
    assert raw(hasty, b"GET /livez HT")[0] == 408
    assert raw(hasty, HEAD.encode())[0] == 408
    assert raw(hasty, f"{HEAD}Content-Length: 20\r\n\r\n{{".encode())[0] == 408


def test_connections_that_do_nothing_keep_nobody_out_for_long(hasty: Any, served: Any) -> None:
    """More than the limit at once: the rest is refused at once; after the header timeout there is room again."""
    socks = [hasty.connect() for _ in range(200)]
    try:
        served.wait_until(lambda: raw(hasty, request("GET", "/livez"))[0] == 200)
        answers = [sock.recv(1000) for sock in socks]
        assert 408 in (found := {int(a.split()[1]) for a in answers}) and found <= {408, 503}
    finally:
        for sock in socks:
            sock.close()
    assert hasty.process.poll() is None


def test_lif_13_a_client_that_never_reads(hasty: Any, served: Any) -> None:
    """Others go on meanwhile; after the send timeout it is dropped, and its blocks are back."""
    body = {"prompt": "z", "n": 64, "max_tokens": 500, "ignore_eos": True, "logprobs": 20, "stream": True}
    with hasty.connect(SO_RCVBUF=4096) as sock:
        data = json.dumps(body).encode()
        sock.sendall(f"{HEAD}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        with hasty.openai("first") as client:
            for _ in range(7):
                answer = client.completions.create(model="script", prompt="m", temperature=0)
                assert answer.choices[0].text == "no"
        with hasty.http(headers={"authorization": "Bearer first"}) as http:
            served.wait_until(lambda: 'running_sequences{model="script"} 0.0' in http.get("/metrics").text)
        served.wait_until(lambda: not psutil.Process(hasty.process.pid).net_connections()[2:])  # but the listeners
        received = b""
        with contextlib.suppress(ConnectionResetError):
            while part := sock.recv(1 << 20):
                received += part
        assert b"[DONE]" not in received


def test_logs_and_errors_hold_no_prompt(start: Any) -> None:
    """Canaries in every text of a request."""
    canary = "cAnArY"
    with start("--log-level", "debug", "--log-format", "json") as server:
        bodies: list[Any] = [
            {"prompt": canary, "max_tokens": 1},
            {"prompt": canary * 200},
            {"prompt": canary, "stop": [canary * 60]},
            {"prompt": canary, "user": 5, "n": canary},
            {"prompt": [canary, {canary: 1}]},
            canary.encode(),
            b'{"prompt": "' + canary.encode() + b"\xff",
        ]
        for body in bodies:
            answer = server.post("/v1/completions?" + canary, body)
            assert answer.status_code == 200 or canary not in answer.text
        for content in (canary, [{"type": canary, "text": canary}], 5):
            answer = server.post("/v1/chat/completions", {"messages": [{"role": "bad", "content": content}]})
            assert answer.status_code == 400 and canary not in answer.text
        assert server.stop() == 0
        lines = [json.loads(line) for line in server.log.splitlines()]
        assert len([line for line in lines if line["message"] == "request"]) >= 10
        assert canary not in server.log and "Traceback" not in server.log


def test_s4_nothing_is_connected_to(live: Any) -> None:
    """Of the server's sockets only listeners and accepted connections exist: all have its own port as the local one."""
    with open(f"/proc/{live.process.pid}/net/tcp") as table:
        inodes = {line.split()[9]: line.split()[1] for line in table.readlines()[1:]}
    own = set()
    for fd in os.listdir(f"/proc/{live.process.pid}/fd"):
        try:
            target = os.readlink(f"/proc/{live.process.pid}/fd/{fd}")
        except FileNotFoundError:
            continue
        if target.startswith("socket:[") and target[8:-1] in inodes:
            own.add(int(inodes[target[8:-1]].split(":")[1], 16))
    assert own == {live.port, live.admin_port}
