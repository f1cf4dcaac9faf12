"""A random mix of requests: streamed, whole and offline give the same; many clients at once; and any bytes at all."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from llmc import LLM, SamplingParams

COUNT = 200
WORDS = ["yes", "no", "perhaps not"]
SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, "x"]}}, "required": ["a"], "additionalProperties": False}
KINDS = {"regex": "regex", "guided_json": "json_schema", "guided_choice": "choice"}


@pytest.fixture(scope="module")
def offline(served: Any) -> Iterator[LLM]:
    llm = LLM(served.engine, threads=1)
    yield llm
    llm.close()


def mix(count: int) -> list[dict[str, Any]]:
    """Requests with a bit of everything."""
    draw = random.Random(0)
    bodies = []
    for seed in range(count):
        body: dict[str, Any] = {
            "prompt": [1, *(draw.randrange(3, 384) for _ in range(draw.choice((1, 5, 40, 200))))],
            "max_tokens": draw.randrange(1, 40),
            "temperature": draw.choice((0, 0.7, 1.5)),
            "seed": seed,
            "n": draw.choice((1, 1, 3)),
            "stop": draw.choice(([], ["a"], ["XY", "Z"])),
            "logprobs": draw.choice((None, 0, 3)),
            "ignore_eos": draw.random() < 0.5,
            "repetition_penalty": draw.choice((1, 1.2)),
            "top_p": draw.choice((1, 0.9)),
            "min_tokens": draw.choice((0, 1)),
            "presence_penalty": draw.choice((0, 0, 0.7)),
            "frequency_penalty": draw.choice((0, 0, -0.4)),
            "top_k": draw.choice((0, 0, 7)),
            "min_p": draw.choice((0, 0, 0.05)),
            "logit_bias": draw.choice(({}, {}, {"80": 3, "91": -100})),
        }
        free: dict[str, Any] = {
            "bad_words": draw.choice(([], ["q", "no"]))
        }  # with a constraint, they can leave nothing
        body |= draw.choice(
            (free, free, free, {"regex": "[a-z]{2,20}!"}, {"guided_json": SCHEMA}, {"guided_choice": WORDS})
        )
        bodies.append(body)
    return bodies


def streamed(live: Any, body: dict[str, Any]) -> list[tuple[str, list[float], Any]]:
    texts = [""] * body["n"]
    logprobs: list[list[float]] = [[] for _ in texts]
    reasons: list[Any] = [None] * body["n"]
    answer = live.post("/v1/completions", body | {"stream": True})
    for line in answer.text.split("\n\n"):
        if line and "[DONE]" not in line:
            (choice,) = json.loads(line.removeprefix("data: "))["choices"]
            i = choice["index"]
            texts[i] += choice["text"]
            logprobs[i] += (choice["logprobs"] or {"token_logprobs": []})["token_logprobs"]
            reasons[i] = choice["finish_reason"] or reasons[i]
    return list(zip(texts, logprobs, reasons, strict=True))


def whole(live: Any, body: dict[str, Any]) -> list[tuple[str, list[float], Any]]:
    answer = live.post("/v1/completions", body)
    assert answer.status_code == 200, answer.text
    return [
        (c["text"], (c["logprobs"] or {"token_logprobs": []})["token_logprobs"], c["finish_reason"])
        for c in answer.json()["choices"]
    ]


def alone(llm: LLM, body: dict[str, Any]) -> list[tuple[str, list[float], Any]]:
    values = {k: v for k, v in body.items() if k not in ("prompt", *KINDS) and v is not None}
    values["logit_bias"] = {int(token): bias for token, bias in body["logit_bias"].items()}
    constraint = {KINDS[name]: body[name] for name in KINDS if name in body} or None
    (result,) = llm.generate([body["prompt"]], SamplingParams(**values, constraint=constraint))  # type: ignore[arg-type]
    return [(c.text, [e.logprob for e in c.logprobs or ()], str(c.finish_reason)) for c in result.choices]


def test_streamed_whole_and_offline_are_equal_to_the_last_bit(live: Any, offline: LLM) -> None:
    """R3, R14: the server batches them with each other, offline each runs by itself."""
    bodies = mix(COUNT)
    with ThreadPoolExecutor(16) as pool:
        streams = pool.map(lambda body: streamed(live, body), bodies)
        wholes = pool.map(lambda body: whole(live, body), bodies)
        results = list(zip(streams, wholes, strict=True))
    for body, (stream, answer) in zip(bodies, results, strict=True):
        assert stream == answer == alone(offline, body), body


def test_256_clients_at_once(live: Any, served: Any) -> None:
    """No failure but 429."""

    def ask(number: int) -> int:
        body = {"prompt": [1, 3 + number], "max_tokens": 8, "ignore_eos": True, "stream": number % 2 == 0}
        return int(live.post("/v1/completions", body).status_code)

    with ThreadPoolExecutor(256) as pool:
        statuses = set(pool.map(ask, range(256)))
    assert 200 in statuses and statuses <= {200, 429}
    served.wait_until(lambda: live.is_idle)


def test_requests_made_from_the_description(live: Any) -> None:
    """schemathesis: whatever fits the description, or just not, is answered without a 5xx, as described."""
    schema = schemathesis.openapi.from_dict(live.http().get("/openapi.json").json())
    schema.config.update(base_url=live.url)
    operations = [result.ok() for result in schema.get_all_operations()]
    names = {f"{o.method.upper()} {o.path}" for o in operations}
    assert "POST /v1/chat/completions" in names
    checks = [schemathesis.checks.not_a_server_error]
    for operation in operations:
        examples = 40 if operation.method.upper() == "POST" else 3

        @settings(
            max_examples=examples,
            deadline=None,
            database=None,
            derandomize=True,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(case=operation.as_strategy())
        def run(case: Any) -> None:
            if isinstance(case.body, dict):  # what it asks for may be long, or its time too short (504): not looked at
                case.body |= {"max_tokens": 1} if "max_tokens" in case.body else {}
                case.body.pop("timeout", None)
            case.call_and_validate(checks=checks)

        run()


@settings(max_examples=150)
@given(data=st.binary(max_size=300) | st.text(max_size=100).map(lambda t: f'{{"prompt": "{t}"'.encode()))
def test_any_bytes_are_answered(live: Any, data: bytes) -> None:
    with live.connect() as sock:
        sock.sendall(data + b"\r\n\r\n")
        first = sock.recv(100)
    assert first.startswith((b"HTTP/1.1 4", b"HTTP/1.1 2"))
    assert live.process.poll() is None
