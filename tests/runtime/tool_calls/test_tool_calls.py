"""Calls in what models write: each format whole and in any pieces, what is no call, and required calls."""

# ruff: noqa: E501, RUF001

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmc import SamplingParams
from llmc.errors import UsageError
from llmc.runtime.tool_calls import ToolCallParser, ToolDelta, find_format, joined, tool_constraint
from llmc.runtime.tool_calls.choice import FORMATS

TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": {
        "type": "object", "properties": {"city": {"type": "string", "maxLength": 12}, "days": {"type": "integer", "minimum": 0,
        "maximum": 20}}, "required": ["city"], "additionalProperties": False}}},
    {"type": "function", "function": {"name": "now"}},
]  # fmt: skip
W = ("weather", {"city": 'São "P" } ]', "days": 3})
JSON = '{"name": "weather", "arguments": {"city": "São \\"P\\" } ]", "days": 3}}'
DS = "<｜tool▁call▁begin｜>{}weather<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
ARGUMENTS = '{"city": "São \\"P\\" } ]", "days": 3}'
NOW = ("now", {})

EXAMPLES: list[tuple[str, str, str, list[Any]]] = [
    ("hermes", "plain text with { and < and <tool", "plain text with { and < and <tool", []),
    ("hermes", f"Hm.\n<tool_call>\n{JSON}\n</tool_call>", "Hm.\n", [W]),
    ("hermes", f'<tool_call>{JSON}</tool_call>\n<tool_call>\n{{"name": "now"}}\n</tool_call>\n', "", [W, NOW]),
    ("hermes", f"<tool_call>\n{JSON}\n</tool_call> and so on", "and so on", [W]),
    ("hermes", "<tool_call>\nnothing\n</tool_call>!", "<tool_call>\nnothing\n</tool_call>!", []),
    ("hermes", "<tool_call>{'a': 1}</tool_call>", "<tool_call>{'a': 1}</tool_call>", []),
    ("hermes", f"<tool_call>\n{JSON}", "", [W]),
    ("hermes", f'<tool_call>{{"arguments": {ARGUMENTS}, "name": "weather"}}</tool_call>', "", [W]),
    ("hermes", f"<tool_call>{JSON[:-1]}, \"id\": {{}}}}\n</tool_c", "", [W]),
    ("hermes", f"<tool_call>{JSON[:-1]}</tool_call>ok", "ok", [W]),
    ("hermes", f"<tool_call><tool_call>{JSON}</tool_call>", "<tool_call>", [W]),
    ("llama3", JSON.replace("arguments", "parameters"), "", [W]),
    ("llama3", f'<|python_tag|>{JSON}; {{"name": "now", "parameters": {{}}}}', "", [W, NOW]),
    ("llama3", '{"name": "unknown", "parameters": {}}', '{"name": "unknown", "parameters": {}}', []),
    ("llama3", '  {"answer": [1, 2]} {', '  {"answer": [1, 2]} {', []),
    ("llama3", "Text, then " + JSON, "Text, then " + JSON, []),
    ("mistral", f"[TOOL_CALLS] [{JSON}, {{\"name\": \"now\", \"arguments\": {{}}}}]", "", [W, NOW]),
    ("mistral", f"So: [TOOL_CALLS]weather[ARGS]{ARGUMENTS}[TOOL_CALLS]now[ARGS]{{}}", "So: ", [W, NOW]),
    ("mistral", f"[TOOL_CALLS]weather{ARGUMENTS}", "", [W]),
    ("mistral", "[TOOL_CALLS] none, [TOOL", "[TOOL_CALLS] none, [TOOL", []),
    ("granite", f"<|tool_call|>[{JSON}]", "", [W]),
    ("granite", f"<tool_call>[3, {JSON}]", f"<tool_call>[3, {JSON}]", []),
    ("granite", f"<tool_call>[{JSON}, 3]", "3]", [W]),
    ("phi", f"<|tool_call|>[{JSON}]<|/tool_call|>", "", [W]),
    ("phi", f"<|tool_call|>[{JSON}]", "", [W]),
    ("phi", f"a<|tool_call|>[{JSON}]<|/tool", "a", [W]),
    ("deepseek", f"<｜tool▁calls▁begin｜>{DS.format('function<｜tool▁sep｜>', '').replace('weather<｜tool▁sep｜>', f'weather{chr(10)}```json{chr(10)}{ARGUMENTS}{chr(10)}```')}<｜tool▁calls▁end｜>", "", [W]),
    ("deepseek", f"A <｜tool▁calls▁begin｜>{DS.format('', ARGUMENTS)}\n{DS.format('', ARGUMENTS)}<｜tool▁calls▁end｜>", "A ", [W, W]),
    ("deepseek", "<｜tool▁calls▁begin｜>what?", "<｜tool▁calls▁begin｜>what?", []),
    ("qwen3_coder", '<tool_call>\n<function=weather>\n<parameter=city>\nSão "P" } ]\n</parameter>\n<parameter=days>\n3\n</parameter>\n'
     "</function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>", "", [W, NOW]),
    ("qwen3_coder", "<tool_call>\n<function=weather>oops</function></tool_call>", "<tool_call>\n<function=weather>oops</function></tool_call>", []),
    ("pythonic", """[weather(city='São "P" } ]', days=3), now()]""", "", [W, NOW]),
    ("pythonic", "[1, 2, 3] is a list", "[1, 2, 3] is a list", []),
    ("pythonic", "[other(a=1)]", "[other(a=1)]", []),
    ("pythonic", "[weather(city=open('/etc/passwd'))]", "[weather(city=open('/etc/passwd'))]", []),
]  # fmt: skip


BROKEN = [
    ("hermes", JSON[:50], '{"city": "São \\"P'),
    ("mistral", "weather[ARGS]{'city': 3} [", "{'city': 3}"),
    ("deepseek", DS.format("", "{{}").removeprefix(FORMATS["deepseek"].openings[1]), "{{}<｜tool▁call▁end｜>"),
    ("qwen3_coder", "<function=weather><parameter=days>\n7\n</parameter><parameter=city>a\nb\n</para", '{"days": 7, "city": "a\\nb'),
    ("qwen3_coder", "<function=weather><parameter=days>\n7\n</parameter>\noops", '{"days": 7'),
]  # fmt: skip
"""What follows an opening and a name, and does not end well: the arguments are what there is, no JSON."""


def deltas_of(name: str, pieces: list[str]) -> list[ToolDelta]:
    parser = ToolCallParser(FORMATS[name], TOOLS)
    deltas = [delta for piece in pieces for delta in parser.feed(piece)] + parser.feed("", final=True)
    numbers = [delta.index for delta in deltas if delta.name is not None]
    assert numbers == list(range(len(numbers))) and parser.found == bool(numbers)
    calls = [delta for delta in deltas if delta.of_call]
    assert all(not d.text for d in calls) and [d.index for d in calls] == sorted(d.index for d in calls)
    return deltas


def parse(name: str, pieces: list[str]) -> tuple[str, list[Any]]:
    text, calls = joined(deltas_of(name, pieces))
    return text, [(call.name, call.arguments) for call in calls]


@pytest.mark.parametrize(("name", "text", "rest", "calls"), EXAMPLES)
def test_each_format(name: str, text: str, rest: str, calls: list[Any]) -> None:
    """The same whole, character by character, and cut anywhere: texts, and arguments to the letter."""
    whole = parse(name, [text])
    assert (whole[0], [(function, json.loads(arguments)) for function, arguments in whole[1]]) == (rest, calls)
    assert parse(name, list(text)) == whole
    for cut in range(1, len(text), 3):
        assert parse(name, [text[:cut], text[cut:]]) == whole, cut


@pytest.mark.parametrize(("name", "text", "arguments"), BROKEN)
def test_calls_that_do_not_end_well(name: str, text: str, arguments: str) -> None:
    whole = parse(name, [FORMATS[name].openings[-1] + text])
    assert whole[1] == [("weather", arguments)] and whole[0] in ("", "[", "oops")
    with pytest.raises(json.JSONDecodeError):
        json.loads(arguments)
    assert parse(name, list(FORMATS[name].openings[-1] + text)) == whole


@pytest.mark.parametrize("name", sorted(set(FORMATS) - {"pythonic"}))
def test_arguments_come_as_they_are_written(name: str) -> None:
    """The name before them, then each character at once, but for what could be the end."""
    text = next(text for example, text, _, calls in EXAMPLES if example == name and calls[:1] == [W])
    begin = text.index("São")
    parser = ToolCallParser(FORMATS[name], TOOLS)
    head = [d for d in parser.feed(text[:begin]) if d.of_call]
    assert head[0].name == "weather" and json.loads(head[0].arguments + '"}') == {"city": ""}
    assert [parser.feed(c) for c in "São"] == [[ToolDelta(arguments=c)] for c in "São"]


@settings(max_examples=120)
@given(st.data())
def test_any_text_in_any_pieces(data: Any) -> None:
    name = data.draw(st.sampled_from(sorted(FORMATS)))
    own = [text for example, text, *_ in EXAMPLES if example == name]
    markers = [*FORMATS[name].openings, "</tool_call>", "{", "}", "[", "]", '"', "\\", "\n", " ", "a", ",", JSON, ARGUMENTS, "'",
     "<parameter=", "</parameter>", "<function=now>", "</function>", "```", "[ARGS]", "(", ")", "<｜tool▁call▁end｜>"]  # fmt: skip
    parts = [
        part for text in own for part in (text, text[: len(text) // 2], text[len(text) // 2 :], text[: -len(text) // 4])
    ]
    text = "".join(data.draw(st.lists(st.sampled_from([*markers, *parts]), max_size=6)))
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole = parse(name, [text])
    assert parse(name, pieces) == whole == parse(name, list(text))
    if not whole[1]:
        assert whole[0] == text  # what has no call is unharmed


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_required_and_named_calls(kit: Any, name: str) -> None:
    """A model of random numbers makes calls that this format's parser takes, and of the right types."""
    added = ["[TOOL_CALLS]", "[ARGS]"] if name == "mistral" else ["<|python_tag|>", "<|tool_call|>", "<|/tool_call|>"]
    spec = kit.byte_level_spec(added=added)
    llm = kit.llm(spec=spec)
    ended = 0
    for seed in range(4):
        only = "weather" if seed % 2 else None
        constraint = tool_constraint(FORMATS[name], TOOLS, llm.tokenizer, name=only, several=seed % 4 == 0)
        params = SamplingParams(
            temperature=1, seed=seed, max_tokens=300, skip_special_tokens=False, constraint=constraint
        )
        (result,) = llm.generate("x", params)
        assert result.error is None
        if result.finish_reason == "stop":
            text, found = parse(name, [result.text])
            calls = [(function, json.loads(arguments)) for function, arguments in found]
            assert not text and calls and (seed % 4 == 0 or len(calls) == 1), result.text
            ended += 1
            for function, arguments in calls:
                assert function == "weather" or (only is None and function == "now")
                if function == "weather":
                    assert type(arguments["city"]) is str and type(arguments.get("days", 1)) is int
    assert ended > 1
    llm.close()


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("within <tool_call></tool_call> XML tags", "hermes"),
        ("<tool_call>\n<function=example>\n<parameter=x>", "qwen3_coder"),
        ("'[TOOL_CALLS]'", "mistral"),
        ("{{'<｜tool▁calls▁begin｜>'}}", "deepseek"),
        ("<|tool_call|>", "granite"),
        ("<|tool|>{{ tools }}<|/tool|>", "phi"),
        ("'<|python_tag|>'", "llama3"),
        ("[func_name1(params_name1=params_value1)]", "pythonic"),
        ("{{ messages }}", None),
        (None, None),
    ],
)
def test_the_template_tells_the_format(template: str | None, name: str | None) -> None:
    found = find_format(template)
    assert (found.name if found else None) == name


def test_formats_by_name() -> None:
    assert find_format(None, "hermes") is FORMATS["hermes"]
    with pytest.raises(UsageError, match="known: deepseek"):
        find_format(None, "nonsense")
    with pytest.raises(UsageError, match="no tool 'x'"):
        tool_constraint(FORMATS["hermes"], TOOLS, None, name="x")  # type: ignore[arg-type]
