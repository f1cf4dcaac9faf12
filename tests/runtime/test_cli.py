"""llmc run: prompts, chats and files, with a model that follows a script."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from llmc.__main__ import cli
from llmc.errors import LlmcError
from llmc.runtime import cli as commands
from llmc.runtime.terminal import show, watched_interrupt

TEMPLATE = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}|{% endfor %}"


@pytest.fixture
def run(kit: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Calls `llmc run ENGINE ...`; the model answers as scripted."""
    spec = kit.byte_level_spec()
    tokenizer = kit.tokenizer(spec, chat_template=TEMPLATE)
    scripts = {
        "hello": [*kit.ids(" world"), 2],
        "s:be kind|u:hi|": [*kit.ids("kind"), 2],
        "u:hi|": [*kit.ids("hey"), 2],
        "u:hi|a:hey|u:bye|": [*kit.ids("ciao"), 2],
        "long": kit.ids("x" * 300),
    }
    seen: list[dict[str, Any]] = []
    model = kit.scripted({tuple(tokenizer.encode(p)): s for p, s in sorted(scripts.items(), key=lambda i: -len(i[0]))})

    def load(engine: Path, **values: Any) -> Any:
        seen.append(values)
        return kit.llm(model, tokenizer=tokenizer)

    monkeypatch.setattr(commands, "load", load)

    def call(*arguments: str, stdin: str = "") -> Result:
        return CliRunner().invoke(cli, ["run", "engine", *arguments], input=stdin)

    call.seen = seen  # type: ignore[attr-defined]
    yield call
    tokenizer.chat_template.close()


def test_prompt(run: Any) -> None:
    result = run("-p", "hello")
    assert (result.exit_code, result.stdout) == (0, " world\n")
    assert run("-p", "-", stdin="hello").stdout == " world\n"
    assert len(run("-p", "long").stdout) == 257
    assert run("-p", "long", "--max-tokens", "3").stdout == "xxx\n"
    assert run("-p", "hello", "--stop", "rl").stdout == " wo\n"
    assert run("-p", "hello", "-n", "2", "--temperature", "0.1").stdout == "[0]  world\n[1]  world\n"
    assert "tokens/s" in run("-p", "hello", "--stats").stderr


def test_prompt_as_json(run: Any) -> None:
    value = json.loads(run("-p", "hello", "--json", "--logprobs", "1").stdout)
    assert value["choices"][0]["text"] == " world"
    assert value["choices"][0]["finish_reason"] == "stop"
    assert len(value["choices"][0]["logprobs"]) == 7
    assert value["usage"] == {"prompt_tokens": 3, "completion_tokens": 7, "total_tokens": 10}
    assert "seed" not in value


def test_stdin_has_to_be_text(run: Any) -> None:
    assert "stdin is not UTF-8 (byte 1)" in str(run("-p", "-", stdin=b"a\xff").exception)  # type: ignore[arg-type]


def test_control_characters_do_not_reach_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    for terminal, expected in ((True, "a\n\tb\ufffd[31m\ufffd\ufffd"), (False, "a\n\tb\x1b[31m\x9b\r")):
        monkeypatch.setattr(sys.stdout, "isatty", lambda terminal=terminal: terminal, raising=False)
        show("a\n\tb\x1b[31m\x9b\r")
        assert capsys.readouterr().out == expected


def test_one_chat(run: Any) -> None:
    assert run("--chat", "-p", "hi").stdout == "hey\n"
    assert run("--chat", "-p", "hi", "--system", "be kind").stdout == "kind\n"


def test_conversation(run: Any) -> None:
    result = run("--chat", stdin="hi\n\nbye\n/reset\nhi\n/exit\nhi\n")
    assert (result.exit_code, result.stdout) == (0, "hey\nciao\nhey\n")
    too_long = run("--chat", stdin="y" * 600 + "\nhi\n")
    assert too_long.stdout == "hey\n"
    assert "do not fit the context of 512 tokens; /reset starts anew" in too_long.stderr


def test_options_reach_the_engine(run: Any) -> None:
    run("-p", "hello")
    assert run.seen[-1]["prefix_cache"] is True
    options = ("--threads", "2", "--kv-memory", "1GiB", "--max-sequences", "3", "--no-prefix-cache", "--spec", "ngram")
    run("-p", "hello", *options, "--parse-special-in-messages", "--lora", "a=b", "--gpu-memory", "90%")
    assert run.seen[-1] == {
        "threads": 2,
        "kv_memory": "1GiB",
        "num_blocks": None,
        "gpu_memory": "90%",
        "max_sequences": 3,
        "max_batch_tokens": None,
        "isa": None,
        "prefix_cache": False,
        "spec": "ngram",
        "spec_tokens": None,
        "spec_sampling": "exact",
        "parse_special_in_messages": True,
        "lora": {"a": Path("b")},
    }


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "say what to do"),
        (["-p", "x", "--input", "y"], "--input excludes -p"),
        (["-p", "x", "--output", "y"], "--output belongs to --input"),
        (["-p", "x", "--system", "y"], "--system belongs to --chat"),
        (["--chat", "--json"], "--json belongs to -p"),
        (["-p", "x", "--temperature", "9"], "--temperature: 9.0 is not in 0 to 2"),
        (["--input", "missing.jsonl"], "missing.jsonl: can't be read"),
    ],
)
def test_usage(run: Any, arguments: list[str], message: str) -> None:
    result = run(*arguments)
    assert isinstance(result.exception, LlmcError)
    assert result.exception.exit_code == 2
    assert message in str(result.exception)


LINES = [
    {"prompt": "hello", "id": "a"},
    {"prompt": "long", "max_tokens": 2},
    {"messages": [{"role": "user", "content": "hi"}]},
    {"token_ids": [70, 71], "id": 7, "n": 2},
    {"prompt": [70, 71]},
]
BAD = [
    ("nonsense", None, "line: not valid JSON"),
    ("[]", None, "expected an object"),
    ('{"prompt": "x", "prompt": "y"}', None, "occurs twice"),
    ("[" * 100_000, None, "line: n"),
    ("{}", None, "exactly one of prompt, token_ids and messages is needed, found none"),
    ('{"prompt": "x", "token_ids": [5]}', None, "found prompt, token_ids"),
    ('{"prompt": 5}', "prompt", "prompt: expected a text or a list of token ids"),
    ('{"prompt": ""}', "prompt", "prompt: the prompt has no tokens"),
    ('{"prompt": [384]}', "prompt", "prompt: 384 is not a token id below 384"),
    ('{"token_ids": "x"}', "token_ids", "token_ids: expected a list"),
    ('{"messages": "x"}', "messages", "messages: expected a list of messages"),
    ('{"prompt": "x", "tools": []}', "tools", "tools: only for messages"),
    ('{"prompt": "x", "temprature": 1}', "temprature", "temprature: unknown field"),
    ('{"prompt": "x", "temperature": NaN}', None, "NaN is not a number of JSON"),
    ('{"prompt": "\\ud800"}', "prompt", "prompt: not valid text"),
]


def test_file(run: Any, tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    target.write_text("old")
    source.write_text("\n\n".join([*map(json.dumps, LINES), *(text for text, _, _ in BAD)]))
    result = run("--input", str(source), "--output", str(target), "--max-tokens", "4")
    assert result.exit_code == 1
    assert f"{len(LINES) + len(BAD)} requests, {len(BAD)} failed" in result.stderr
    records = [json.loads(line) for line in target.read_text().splitlines()]
    assert [r["index"] for r in records] == list(range(len(LINES) + len(BAD)))
    assert records[0]["id"] == "a"
    assert records[0]["choices"][0]["text"] == " wor"
    assert records[1]["choices"][0]["text"] == "xx"
    assert records[2]["choices"][0]["text"] == "hey"
    assert len(records[3]["choices"]) == 2
    for record, (_, field, message) in zip(records[len(LINES) :], BAD, strict=True):
        assert message in record["error"]["message"]
        assert record["error"].get("field") == field
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl"]
    assert target.stat().st_mode & 0o600 == 0o600


def test_stp_09_bytes_that_are_no_text(run: Any, tmp_path: Path) -> None:
    """In a line, and as tokens: each has its answer or its error, the file stays JSON, and the others run."""
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    tokens = json.dumps({"token_ids": [258, 257, 384], "stop": ["a"]}).encode()
    source.write_bytes(
        b'{"prompt": "\xff\xfe"}\n{"prompt": "hello", "\xff": 1}\n' + tokens + b'\n{"prompt": "hello"}\n'
    )
    assert run("--input", str(source), "--output", str(target)).exit_code == 1
    records = [json.loads(line) for line in target.read_bytes().decode().splitlines()]
    assert ["error" in record for record in records] == [True, True, True, False]
    assert all("utf-8" in record["error"]["message"] for record in records[:2])
    assert records[2]["error"]["message"].endswith("384 is not a token id below 384")
    assert records[3]["choices"][0]["text"] == " world"


def test_file_from_stdin_to_stdout(run: Any) -> None:
    result = run("--input", "-", stdin="".join(json.dumps({"prompt": "hello", "id": i}) + "\n" for i in range(100)))
    assert result.exit_code == 0
    assert [json.loads(line)["id"] for line in result.stdout.splitlines()] == list(range(100))


def test_an_interrupted_file_keeps_what_is_done(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from llmc.runtime.llm import LLM

    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    target.write_text("old")
    source.write_text("".join(json.dumps({"prompt": "long", "max_tokens": i + 1}) + "\n" for i in range(9)))
    step, count = LLM.step, 0

    def interrupted(self: LLM) -> Any:
        nonlocal count
        count += 1
        if count == 5:
            raise KeyboardInterrupt
        return step(self)

    monkeypatch.setattr(LLM, "step", interrupted)
    result = run("--input", str(source), "--output", str(target))
    assert result.exit_code == 130
    assert target.read_text() == "old"
    (partial,) = tmp_path.glob(".out.jsonl.partial")
    assert f"interrupted after 4 results; they are in {partial}" in result.stderr
    assert len(partial.read_text().splitlines()) == 4


def test_interrupts_are_seen_between_steps() -> None:
    with watched_interrupt() as interrupt:
        assert not interrupt.pressed
        signal.raise_signal(signal.SIGINT)
        assert interrupt.pressed
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_input_is_not_output(run: Any, tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text("{}")
    assert "are the same file" in str(run("--input", str(path), "--output", str(path)).exception)


def test_help_is_quick_to_load() -> None:
    """The commands import nothing heavy before they run."""
    heavy = "numpy", "jinja2", "tokenizers", "rich", "torch"
    code = f"import llmc, llmc.runtime.cli, sys; print([m for m in {heavy!r} if m in sys.modules])"
    assert subprocess.check_output([sys.executable, "-P", "-c", code], text=True).strip() == "[]"
