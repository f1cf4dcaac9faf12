"""Requests made to break the server: each gets an answer that is no 5xx, and the next client gets a right one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

HEAD = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
CHUNKED = HEAD + "Transfer-Encoding: chunked\r\n\r\n"
BODY = '{"prompt": "m", "max_tokens": 1}'
RAW = {
    "chunk size is no number": CHUNKED + "zz\r\n",
    "chunk size is negative": CHUNKED + "-5\r\nabcde\r\n0\r\n\r\n",
    "chunk size is huge": CHUNKED + "f" * 30 + "\r\n",
    "chunk size is larger than the body may be": CHUNKED + "7fffffffffffffff\r\n" + "a" * 3_000_000,
    "chunk extension without end": CHUNKED + "5;" + "x" * 200_000,
    "trailers without end": CHUNKED + "0\r\n" + "X: y\r\n" * 20_000,
    "chunk without its line end": CHUNKED + "2\r\n{}{}\r\n",
    "length and chunks": HEAD
    + f"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n{len(BODY):x}\r\n{BODY}\r\n0\r\n\r\n",
    "two lengths": HEAD + "Content-Length: 3\r\nContent-Length: 40\r\n\r\n{}",
    "length with a sign": HEAD + f"Content-Length: +{len(BODY)}\r\n\r\n{BODY}",
    "length beyond 64 bits": HEAD + f"Content-Length: {'9' * 40}\r\n\r\n",
    "another coding": HEAD + "Transfer-Encoding: gzip, chunked\r\n\r\n",
    "folded header": HEAD + " more\r\n\r\n",
    "NUL in a header": HEAD + "X: a\0b\r\n\r\n",
    "no colon": HEAD + "Content-Length\r\n\r\n",
    "space before the colon": HEAD + "Content-Length : 2\r\n\r\n{}",
    "two hosts": "GET /livez HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n",
    "no host": "GET /v1/models HTTP/1.1\r\n\r\n",
    "address of another": "GET http://evil.example/v1/models HTTP/1.1\r\nHost: evil.example\r\n\r\n",
    "CONNECT": "CONNECT evil.example:80 HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "upgrade": "GET / HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n",
    "HTTP/2": "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "TLS": "\x16\x03\x01\x02\0\x01\0\x01\xfc\x03\x03" + "\0" * 500,
    "method without end": "A" * 70_000,
    "path with bytes": "GET /v1/models/\xff%00%ff%2e%2e/ HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "a long path": f"GET /v1/models/{'a/' * 30_000} HTTP/1.1\r\nHost: localhost\r\n\r\n",
}


@pytest.mark.parametrize("name", RAW)
def test_bytes_that_are_hardly_http(live: Any, name: str) -> None:
    with live.connect() as sock:
        try:
            sock.sendall(RAW[name].encode("latin-1"))
            sock.shutdown(1)
            received = b""
            while part := sock.recv(1 << 16):
                received += part
        except OSError:  # it has closed the connection before it had read all
            received = b"HTTP/1.1 400 "
    assert received.startswith((b"HTTP/1.1 4", b"HTTP/1.1 2", b"HTTP/1.1 1")) or not received, received[:200]
    assert received.count(b"HTTP/1.1 ") <= 1 + (name == "HTTP/2"), "nothing was taken for a second request"
    assert live.post("/v1/completions", {"prompt": "m", "temperature": 0}).json()["choices"][0]["text"] == "no"


def test_many_requests_on_one_connection_at_once(live: Any) -> None:
    """None waits for the client to read; each has its answer, in order."""
    data = (HEAD + f"Content-Length: {len(BODY)}\r\n\r\n{BODY}").encode()
    with live.connect() as sock:
        sock.sendall(data * 99 + data.replace(b"Host", b"Connection: close\r\nHost"))
        received = b""
        while part := sock.recv(1 << 16):
            received += part
    assert received.count(b"HTTP/1.1 200") == 100


HALF = "\ud800"
SCHEMAS: dict[str, Any] = {
    "itself": {"$ref": "#"},
    "a circle": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
    "all of many": {"allOf": [{"type": "string", "pattern": f"^.{{{i},}}$"} for i in range(300)]},
    "any of any": {"anyOf": [{"anyOf": [{"const": i * 100 + j} for j in range(100)]} for i in range(100)]},
    "all of any": {"allOf": [{"anyOf": [{"minimum": i}, {"maximum": -i}]} for i in range(40)]},
    "as many items": {"type": "array", "minItems": 2**31},
    "as long a text": {"type": "string", "minLength": 2**63},
    "huge numbers": {"type": "number", "minimum": -1e308, "multipleOf": 1e-300},
    "huge whole numbers": {"type": "integer", "minimum": 10**300, "maximum": 10**301},
    "many names": {"type": "object", "required": [f"a{i}" for i in range(3000)]},
    "many patterns": {"type": "object", "patternProperties": {f"^a{{{i}}}b*$": {} for i in range(40)}},
    "half a character": {"const": HALF},
    "half a character in a name": {"type": "object", "properties": {HALF: {}}},
    "not": {"not": {"not": {"not": {}}}},
    "null": {"type": None},
}
REGEXES = ["(a+)+$", "(a|a)*b", "(.*){1000}", "(x{1,1000}){1,1000}", "[^\\n]{100000}", "(((((a{9}){9}){9}){9}){9}){9}"]
REGEXES += ["\\u{110000}", "\\p{L}{1000}", "(?i)straße", "[\\ud800-\\udfff]", "a{2,1}", "(?:)*", "\\", "(?:a*)*" * 40]
GRAMMARS = ["start: start", 'start: start start | ""', "start: /a{1000000}/", 'start: "x"{1,1000000}', "start: %json {"]
GRAMMARS += ["%import common.WORD\nstart: WORD", 'start: ("a" | "b" | ("c"))' + '~ "d"' * 50, "start: A\nA: B\nB: A"]
GRAMMARS += ["start: " + "a " * 5000, 'start[capture="x", stop="y"]: /.*/', "start: <|eot|> <[0-999999]>", HALF]


def bodies() -> Iterator[tuple[str, dict[str, Any]]]:
    for name, schema in SCHEMAS.items():
        yield f"schema: {name}", {"guided_json": schema}
    yield from ((f"regex: {regex[:40]}", {"regex": regex}) for regex in REGEXES)
    yield from ((f"grammar: {grammar[:40]}", {"grammar": grammar}) for grammar in GRAMMARS)
    for field in ("prompt", "model", "user", "stop", "bad_words", "cache_salt", "regex"):
        yield f"half a character: {field}", {field: HALF + "a"}
    yield "half a character: names", {"logit_bias": {HALF: 1}, "metadata": {HALF: HALF}, HALF: 1}
    yield "half a character: choices", {"guided_choice": [HALF]}


ATTACKS = dict(bodies())


@pytest.mark.parametrize("name", [ascii(name) for name in ATTACKS])
def test_requests_that_ask_for_too_much(live: Any, name: str) -> None:
    fields = next(fields for own, fields in ATTACKS.items() if ascii(own) == name)
    answer = live.post("/v1/completions", {"prompt": "m", "max_tokens": 8, "seed": 1} | fields)
    error = answer.json().get("error")
    if answer.status_code == 500:  # of this request alone, and said so
        assert error["message"].startswith("no token is allowed"), error
    else:
        assert answer.status_code in (200, 400, 404), answer.text
    assert live.post("/v1/completions", {"prompt": "m", "temperature": 0}).json()["choices"][0]["text"] == "no"
