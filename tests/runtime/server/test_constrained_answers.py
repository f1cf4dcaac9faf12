"""Answers of a required form, and calls of functions, through the official client."""

from __future__ import annotations

import json
import re
from typing import Any

import openai
import pytest

USER: list[Any] = [{"role": "user", "content": "m"}]
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}, "b": {"enum": ["x", "y"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
BLANKS = {str(b + 3): -100 for b in b" \t\n\r"}
"""A bias: JSON may have any number of them, and this model has no taste."""

TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "now", "description": "The time.", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "then", "parameters": SCHEMA}},
]


@pytest.fixture(scope="module")
def client(live: Any) -> openai.OpenAI:
    return live.openai()


def test_json_schema(client: openai.OpenAI) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}}
    for temperature in (0, 1):
        answer = client.chat.completions.create(
            model="script", messages=USER, response_format=form, temperature=temperature, seed=1, logit_bias=BLANKS
        )
        value = json.loads(answer.choices[0].message.content or "")
        assert set(value) == {"a", "b"} and value["a"] in range(10) and value["b"] in ("x", "y")


def test_api_28_json_object(client: openai.OpenAI, kit: Any) -> None:
    """The model is made to prefer control characters."""
    bias = {str(i): 20 for i in kit.ids('\n\t"')} | {str(i): 15 for i in kit.ids('{}"')}
    answer = client.chat.completions.create(
        model="script",
        messages=USER,
        response_format={"type": "json_object"},
        logit_bias=bias,
        max_tokens=60,
        temperature=0,
    )
    choice = answer.choices[0]
    if choice.finish_reason == "stop":
        assert isinstance(json.loads(choice.message.content or ""), dict)
    else:
        assert choice.finish_reason == "length"


def test_expressions_grammars_and_choices(client: openai.OpenAI) -> None:
    def text(**extra: Any) -> str:
        answer = client.completions.create(
            model="script", prompt="m", temperature=1, seed=3, max_tokens=40, logit_bias=BLANKS, extra_body=extra
        )
        return answer.choices[0].text

    assert re.fullmatch("[ab]{3}c", text(guided_regex="[ab]{3}c")) and re.fullmatch("x+y", text(regex="x{1,9}y"))
    assert text(guided_choice=["left", "right"]) in ("left", "right")
    assert text(guided_grammar='start: "p" | "q"') in ("p", "q")
    assert json.loads(text(guided_json=SCHEMA))["a"] in range(10)
    plain = text()
    assert text(regex="", grammar="") == text(guided_json=None, guided_regex="") == plain  # API-14


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"regex": "["}, "regex"),
        ({"guided_regex": "*a"}, "guided_regex"),
        ({"regex": "(?<x"}, "regex"),
        ({"regex": "a\0b"}, "regex"),
        ({"grammar": "start: \0"}, "grammar"),
        ({"guided_grammar": "nonsense {"}, "guided_grammar"),
        ({"guided_json": {"type": "string", "pattern": "^+[a-z]$"}}, "guided_json"),
        ({"guided_json": {"type": "nonsense"}}, "guided_json"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"regex": "a", "guided_choice": ["b"]}, "guided_choice"),
    ],
)
def test_api_13_api_25_and_api_26_wrong_constraints(live: Any, extra: dict[str, Any], param: str) -> None:
    answer = live.post("/v1/completions", {"prompt": "m", "max_tokens": 4} | extra)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param, answer.text
    assert live.post("/v1/completions", {"prompt": "m", "max_tokens": 1}).status_code == 200


def test_api_16_tokens_that_a_grammar_rules_out(live: Any) -> None:
    body = {"prompt": "m", "temperature": 0, "max_tokens": 2, "logprobs": 20, "regex": "ab"}
    answer = live.post("/v1/completions", body)
    assert answer.status_code == 200 and "Infinity" not in answer.text
    assert answer.json()["choices"][0]["text"] == "ab"


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "then"}}])
def test_calls(client: openai.OpenAI, choice: Any) -> None:
    options: dict[str, Any] = {"model": "script", "messages": USER, "tools": TOOLS, "tool_choice": choice}
    options |= {"temperature": 1, "seed": 5, "logit_bias": BLANKS, "parallel_tool_calls": False}
    answer = client.chat.completions.create(**options)
    (call,) = answer.choices[0].message.tool_calls
    assert answer.choices[0].finish_reason == "tool_calls" and answer.choices[0].message.content is None
    assert call.type == "function" and call.id.startswith("call_")
    assert call.function.name in (["now", "then"] if choice == "required" else ["then"])
    assert set(json.loads(call.function.arguments)) == {"a", "b"}
    streamed = {"name": "", "arguments": ""}
    for chunk in client.chat.completions.create(stream=True, **options):
        for part in chunk.choices[0].delta.tool_calls or ():
            assert part.index == 0
            streamed["name"] += part.function.name or ""
            streamed["arguments"] += part.function.arguments or ""
        reason = chunk.choices[0].finish_reason
    assert (streamed["name"], streamed["arguments"]) == (call.function.name, call.function.arguments)
    assert reason == "tool_calls"


CALL = '<tool_call>\n{"name": "now", "arguments": {"a": 1, "b": "x { \\" é"}}\n</tool_call>'
ARGUMENTS = '{"a": 1, "b": "x { \\" é"}'
WRITTEN: dict[str, tuple[str, dict[str, Any], str, list[tuple[str, str]], str]] = {
    "a call": (CALL, {}, "", [("now", ARGUMENTS)], "tool_calls"),
    "two calls in text": (
        f"Hm.\n{CALL}\n{CALL.replace('now', 'then')} Well.",
        {},
        "Hm.\nWell.",
        [("now", ARGUMENTS), ("then", ARGUMENTS)],
        "tool_calls",
    ),
    "one of them": (CALL + CALL, {"parallel_tool_calls": False}, "", [("now", ARGUMENTS)], "tool_calls"),
    "another order": (
        f'<tool_call>{{"arguments": {ARGUMENTS}, "name": "now"}}</tool_call>',
        {},
        "",
        [("now", ARGUMENTS)],
        "tool_calls",
    ),
    "no call": ("<tool_call>{'name': 1}</tool_call> <tool", {}, "<tool_call>{'name': 1}</tool_call> <tool", [], "stop"),
    "no arguments": (CALL.replace("1,", ","), {}, "", [("now", ARGUMENTS.replace("1,", ","))], "tool_calls"),
    "a stop string": (CALL, {"stop": ["x {"]}, "", [("now", '{"a": 1, "b": "')], "tool_calls"),
    "a limit": (CALL, {"max_tokens": 50}, "", [("now", '{"a": 1, "')], "length"),
    "a limit before": (CALL, {"max_tokens": 20}, CALL[:21], [], "length"),
}


def collected(chunks: Any, choices: int = 1) -> list[tuple[str, list[tuple[str, str]], str, int]]:
    """Of a stream, for each choice: text, calls, reason, and in how many pieces arguments came."""
    texts, calls, reasons = [""] * choices, [list[list[str]]() for _ in range(choices)], [""] * choices
    pieces = [0] * choices
    for chunk in chunks:
        (choice,) = chunk.choices
        i = choice.index
        texts[i] += choice.delta.content or ""
        reasons[i] = choice.finish_reason or reasons[i]
        for part in choice.delta.tool_calls or ():
            if part.index == len(calls[i]):
                assert part.id.startswith("call_") and part.type == "function"
                calls[i].append([part.function.name, ""])
            else:
                assert part.index == len(calls[i]) - 1 and part.id is part.type is part.function.name is None
                pieces[i] += 1
            calls[i][-1][1] += part.function.arguments
    return [(t, [(n, a) for n, a in c], r, p) for t, c, r, p in zip(texts, calls, reasons, pieces, strict=True)]


@pytest.mark.parametrize("case", WRITTEN)
def test_calls_in_pieces(client: openai.OpenAI, case: str) -> None:
    """The arguments come as the model writes them; joined, they are those of the whole answer."""
    written, extra, text, calls, reason = WRITTEN[case]
    options: dict[str, Any] = {"model": "script", "messages": USER, "tools": TOOLS, "temperature": 0} | extra
    options["extra_body"] = {"guided_choice": [written]}
    (choice,) = client.chat.completions.create(**options).choices
    found = [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or ()]
    assert (choice.message.content or "", found, choice.finish_reason) == (text, calls, reason)
    ((*streamed, pieces),) = collected(client.chat.completions.create(stream=True, **options))
    assert streamed == [text, calls, reason]
    assert pieces > 5 * len(calls) or case == "another order" or not calls


def test_calls_of_several_choices_at_once(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": "script", "messages": USER, "tools": TOOLS, "n": 4, "temperature": 2, "seed": 2}
    expression = r'(Hm|<tool_call>\{"name": "(now|then)", "arguments": \{"a": [0-9]{6}\}\}</tool_call>)'
    options["extra_body"] = {"guided_regex": expression}
    whole = [
        (c.message.content or "", [(t.function.name, t.function.arguments) for t in c.message.tool_calls or ()])
        for c in client.chat.completions.create(**options).choices
    ]
    streamed = collected(client.chat.completions.create(stream=True, **options), 4)
    assert [(text, calls) for text, calls, *_ in streamed] == whole
    assert len({str(calls) for _, calls in whole}) > 1


def test_the_clients_own_stream_of_calls(client: openai.OpenAI) -> None:
    tools: Any = [{"type": "function", "function": TOOLS[0]["function"] | {"strict": True}}]
    with client.chat.completions.stream(
        model="script", messages=USER, tools=tools, temperature=0, extra_body={"guided_choice": [CALL]}
    ) as stream:
        deltas = [e.arguments_delta for e in stream if e.type == "tool_calls.function.arguments.delta"]
        (call,) = stream.get_final_completion().choices[0].message.tool_calls or ()
    assert "".join(deltas) == call.function.arguments == ARGUMENTS and len(deltas) > 5


def test_tools_that_are_not_called(client: openai.OpenAI, live: Any) -> None:
    history: list[Any] = [
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "1", "type": "function", "function": {"name": "now", "arguments": '{"a": 1}'}}],
        },
        {"role": "tool", "tool_call_id": "1", "content": "zm"},
    ]
    for choice in ("auto", "none"):
        answer = client.chat.completions.create(
            model="script", messages=history, tools=TOOLS, tool_choice=choice, temperature=0
        )
        assert answer.choices[0].message.content == "no" and answer.choices[0].finish_reason == "stop"
    body = {"messages": USER, "tool_choice": "required"}
    assert live.post("/v1/chat/completions", body).json()["error"]["param"] == "tool_choice"
    body |= {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "other"}}}
    assert live.post("/v1/chat/completions", body).json()["error"]["param"] == "tool_choice"


def test_embeddings(client: openai.OpenAI) -> None:
    answer = client.embeddings.create(model="script", input=["m", "hello"])
    as_floats = client.embeddings.create(model="script", input=[[1, 5]], encoding_format="float")
    assert [len(d.embedding) for d in answer.data] == [64, 64] and len(as_floats.data[0].embedding) == 64
    mean = client.embeddings.create(model="script", input="hello", extra_body={"pooling": "mean"})
    assert mean.data[0].embedding != answer.data[1].embedding
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == 2 + 4
    with pytest.raises(openai.BadRequestError):
        client.embeddings.create(model="script", input=[[]])
