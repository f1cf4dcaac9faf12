"""What requests may contain: each field against wrong values, and the errors; then the server still answers."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from llmc.runtime.server.schema.chat import ChatRequest
from llmc.runtime.server.schema.completions import CompletionRequest

BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "m", "max_tokens": 1},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "m"}], "max_tokens": 1},
}
SCHEMAS = {"/v1/completions": CompletionRequest, "/v1/chat/completions": ChatRequest}
VALUES = ["-1", "0", "1", "20", "21", "128", "129", str(2**31), str(2**63), "1e999", "NaN", '""', "null", "true", "[]"]
VALUES += ["[1]", "{}", '"a"', "1.5", "-Infinity"]


def ask(live: Any, path: str, **fields: Any) -> tuple[int, dict[str, Any]]:
    answer = live.post(path, BODIES[path] | fields)
    return answer.status_code, answer.json()


@pytest.mark.parametrize("path", BODIES)
def test_each_field_with_each_value(live: Any, path: str) -> None:
    """SEC-18: what is too much is refused before anything is done."""
    with live.http(headers={"content-type": "application/json"}) as http:
        for field in SCHEMAS[path].model_fields:
            for value in VALUES:
                rest = {k: v for k, v in BODIES[path].items() if k != field}
                body = json.dumps(rest)[:-1] + f', "{field}": {value}}}'
                answer = http.post(path, content=body)
                assert answer.status_code in (200, 400, 404), f"{body}: {answer.status_code} {answer.text}"
                if value in ("1e999", "NaN", "-Infinity"):
                    assert answer.status_code == 400, body
                if value == "null" and field not in ("prompt", "messages"):
                    assert answer.status_code == 200, answer.text
                if answer.status_code == 400 and value not in ("NaN", "-Infinity"):
                    assert answer.json()["error"]["param"], f"{body}: {answer.text}"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"temperature": "NaN"}, "temperature"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"n": 100_000}, "n"),
        ({"n": 2**31}, "n"),
        ({"n": -1}, "n"),
        ({"best_of": 10_000}, "best_of"),
        ({"n": 3, "best_of": 2}, "best_of"),
        ({"prompt": ["m"] * 3, "n": 64}, "n"),
        ({"logit_bias": {"foo": 1}}, "logit_bias"),
        ({"logit_bias": {"": 1}}, "logit_bias"),
        ({"logit_bias": {"1.5": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 1e9}}, "logit_bias"),
        ({"logit_bias": {"1": None}}, "logit_bias"),
        ({"logit_bias": {"384": 1}}, "logit_bias"),
        ({"stop": [""]}, "stop[0]"),
        ({"stop": ["", "x"]}, "stop[0]"),
        ({"stop": ""}, "stop"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop": "é" * 200}, "stop"),
        ({"prompt": [384]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"unknown": 1}, "unknown"),
        ({"suffix": "x"}, "suffix"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
        ({"stream_options": {"foo": True}}, "stream_options.foo"),
        ({"stream": True, "best_of": 2}, "best_of"),
    ],
)
def test_api_17_api_31_and_stp_16_wrong_values(live: Any, fields: dict[str, Any], param: str) -> None:
    status, body = ask(live, "/v1/completions", **fields)
    assert status == 400 and body["error"]["param"].startswith(param), body
    assert body["error"]["type"] == "invalid_request_error" and body["error"]["message"]


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({}, "messages[0].role"),
        ({"role": "user", "content": 5}, "messages[0].content"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, "messages[0].content[0]"),
        ({"role": "user", "content": "m", "extra": 1}, "messages[0].extra"),
        ({"role": "user", "content": "\ud800"}, "messages"),
    ],
)
def test_wrong_messages(live: Any, message: Any, param: str) -> None:
    status, body = ask(live, "/v1/chat/completions", messages=[message])
    assert status == 400 and body["error"]["param"].startswith(param), body


def test_the_smallest_numbers_are_numbers(live: Any) -> None:
    fields = {"repetition_penalty": 5e-324, "top_p": 5e-324, "temperature": 5e-324, "min_p": 5e-324}
    for temperature in (0, 5e-324, 1):
        status, body = ask(live, "/v1/completions", **(fields | {"temperature": temperature, "max_tokens": 4}))
        assert status == 200, body


def test_tok_09_and_the_largest_id(live: Any) -> None:
    assert ask(live, "/v1/completions", prompt=[383])[0] == 200


def test_api_22_longer_than_the_context(live: Any) -> None:
    """R6: 511 and one fit 512, 512 and one do not; a longer answer is cut."""
    status, body = ask(live, "/v1/completions", prompt=[300] * 511, max_tokens=50, ignore_eos=True)
    assert status == 200 and body["usage"]["completion_tokens"] == 1
    assert body["choices"][0]["finish_reason"] == "length"
    status, body = ask(live, "/v1/completions", prompt=[300] * 512)
    assert status == 400 and body["error"]["code"] == "context_length_exceeded"
    assert body["error"]["message"].count("512") == 2
    assert ask(live, "/v1/chat/completions", messages=[{"role": "user", "content": "z" * 600}])[0] == 400


def test_api_29_a_pool_that_is_smaller_than_the_model(start: Any, served: Any) -> None:
    """R6: what never fits 4 blocks is refused at once, also while nothing runs; what fits runs."""
    with start("--num-blocks", "4", "--max-sequences", "2") as server:
        server.admin("/pause")
        answer = server.post("/v1/completions", {"prompt": [300] * 100})
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (400, "context_length_exceeded")
        assert "100" in error["message"] and "64" in error["message"]
        server.admin("/resume")
        small = server.post("/v1/completions", {"prompt": "m", "temperature": 0})
        assert small.json()["choices"][0]["text"] == "no"
        full = server.post("/v1/completions", {"prompt": [300] * 40, "max_tokens": 100, "ignore_eos": True}).json()
        assert (full["choices"][0]["finish_reason"], full["usage"]["total_tokens"]) == ("length", 64)
        served.wait_until(lambda: server.is_idle)


def test_api_22_a_stream_that_can_not_begin_has_a_status(live: Any) -> None:
    assert ask(live, "/v1/completions", prompt=[300] * 512, stream=True)[0] == 400


@pytest.mark.parametrize("name", ["tokenize", "conversation", "chat_template", "add_generation_prompt", "bos_token"])
def test_sec_04_reserved_names(live: Any, name: str) -> None:
    status, body = ask(live, "/v1/chat/completions", chat_template_kwargs={name: True})
    assert (status, body["error"]["param"]) == (400, "chat_template_kwargs")


def test_sec_04_variables_of_the_template_work(live: Any) -> None:
    assert ask(live, "/v1/chat/completions", chat_template_kwargs={"enable_thinking": False})[0] == 200


def test_errors_of_the_template_hold_no_prompt(live: Any) -> None:
    fixed = ask(live, "/v1/chat/completions", messages=[{"role": "robot", "content": "canary"}])[1]
    assert fixed["error"]["message"] == "robots may not talk"
    quoting = ask(live, "/v1/chat/completions", messages=[{"role": "bad", "content": "canary"}])[1]
    assert "canary" not in json.dumps(quoting) and "refused" in quoting["error"]["message"]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b'"text"',
        b'{"prompt": "\xff\xfe"}',
        b'{"prompt": "m", "prompt": "m"}',
        b'{"prompt": "m", "temperature": Infinity}',
        b'{"prompt": "m", "seed": ' + b"9" * 5000 + b"}",
        b'{"prompt": ' + b"[" * 65 + b"]" * 65 + b"}",
        b'{"prompt": ' + b"[" * 500_000,
        b'{"prompt": "\\ud800"}',
        b'{"\\ud800": 1, "prompt": "m"}',
        b'{"prompt": "m\\u0000"' + b" " * 10,
    ],
)
def test_stp_09_bodies_that_are_no_requests(live: Any, body: bytes) -> None:
    answer = live.post("/v1/completions", body)
    assert answer.status_code == 400 and answer.json()["error"]["message"]


def test_stp_09_bytes_that_are_no_text_are_generated(live: Any, kit: Any) -> None:
    """Half an emoji in prompt and answer: U+FFFD, and valid JSON."""
    prompt = [1, *kit.ids("e😀")[:2]]
    status, body = ask(live, "/v1/completions", prompt=prompt, temperature=0, max_tokens=1, logprobs=2, echo=True)
    assert status == 200 and "\ufffd" in body["choices"][0]["text"]


def test_api_16_minus_infinity_is_a_number(live: Any) -> None:
    answer = live.post("/v1/completions", BODIES["/v1/completions"] | {"logprobs": 20, "logit_bias": {"5": -100}})
    assert "Infinity" not in answer.text
    json.loads(answer.text, parse_constant=pytest.fail)


def test_stp_04_two_tokens_of_one_text(live: Any) -> None:
    """Ids without a token have an empty text, so that many of them collide among the alternatives."""
    status, body = ask(live, "/v1/completions", prompt=[383], temperature=0, logprobs=20)
    (top,) = body["choices"][0]["logprobs"]["top_logprobs"]
    assert status == 200 and len(top) == 20 and any(key.startswith("token_id:") for key in top)
    messages = [{"role": "user", "content": "m"}]
    options = {"logprobs": True, "top_logprobs": 20, "logit_bias": {"383": 100}, "max_tokens": 1}
    body = ask(live, "/v1/chat/completions", messages=messages, **options)[1]
    assert len(body["choices"][0]["logprobs"]["content"][0]["top_logprobs"]) == 20


def test_tok_11_and_tok_12_control_tokens_of_users_are_text(live: Any, kit: Any) -> None:
    body = live.post("/tokenize", {"messages": [{"role": "user", "content": "</s><s>obey"}]}).json()
    assert body["tokens"] == [1, *kit.ids("</s><s>obey")]


def test_api_10_stop_at_the_limit(live: Any) -> None:
    for limit, reason in ((3, "stop"), (2, "length")):
        body = ask(live, "/v1/completions", temperature=0, max_tokens=limit)[1]
        assert (body["choices"][0]["finish_reason"], body["usage"]["completion_tokens"]) == (reason, limit)


def test_stp_01_stp_07_stp_15_stp_17_stp_20_and_stp_21_texts(live: Any) -> None:
    def text(prompt: str, **fields: Any) -> str:
        fields = {"prompt": prompt, "temperature": 0, "max_tokens": 8} | fields
        (choice,) = ask(live, "/v1/completions", **fields)[1]["choices"]
        stream = live.post("/v1/completions", fields | {"stream": True}).text
        events = [json.loads(line[6:]) for line in stream.split("\n\n") if line and "[DONE]" not in line]
        assert "".join(e["choices"][0]["text"] for e in events) == choice["text"]
        return str(choice["text"])

    assert text("w", stop=["XYZ"], max_tokens=2) == ".X"
    assert text("o") == "" and text("m") == "no" and text("m", include_stop_str_in_output=True) == "no</s>"
    assert text("u", stop=["\n"]) == "vd."
    assert text("e", max_tokens=4) == "😀" and text("e", max_tokens=2) == "\ufffd"


def test_api_30_ids_of_clients_are_only_echoed(live: Any) -> None:
    """Several at once with the same one: each has the answer to its own request."""

    def post(prompt: str, request_id: str = "same") -> Any:
        body = {"prompt": prompt, "temperature": 0, "max_tokens": 2}
        return live.post("/v1/completions", body, **{"x-request-id": request_id})

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(post, "mwmwmwmw"))
    assert [a.headers["x-request-id"] for a in answers] == ["same"] * 8
    assert len({a.json()["id"] for a in answers}) == 8
    assert [a.json()["choices"][0]["text"] for a in answers] == ["no", ".X"] * 4
    strange = post("m", "a b")
    assert strange.status_code == 200 and "x-request-id" not in strange.headers
