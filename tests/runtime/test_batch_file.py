"""Files of requests: OpenAI's batch format, and runs that are killed and go on."""

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from script_models import write_script_model

from llmc.compiler.api import build_engine
from llmc.compiler.config import BuildConfig

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}"
    "{% if tools %}<tool_call></tool_call>{% endif %}"
)


@pytest.fixture(scope="module")
def engine(kit: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("batch")
    chain = kit.ids("hello there, this is a text.")
    model = write_script_model(folder / "model", [chain], kit.byte_level_spec(), TEMPLATE, add_bos=False)
    build_engine(model, folder / "engine", BuildConfig())
    return folder / "engine"


def lines(count: int) -> list[dict[str, Any]]:
    chat = {"model": "any", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 8, "temperature": 0}
    prompt = {"model": "any", "prompt": "hello", "max_tokens": 24, "temperature": 0, "n": 2}
    return [
        {"custom_id": f"r{i}", "method": "POST", "url": "/v1/chat/completions", "body": chat | {"seed": i}}
        if i % 3
        else {"custom_id": f"r{i}", "method": "POST", "url": "/v1/completions", "body": prompt}
        for i in range(count)
    ]


def write(path: Path, items: list[Any]) -> Path:
    path.write_text("".join((item if isinstance(item, str) else json.dumps(item)) + "\n" for item in items))
    return path


def command(engine: Path, source: Path, target: Path) -> list[str]:
    llmc = [sys.executable, "-P", "-m", "llmc", "run", str(engine)]
    return [*llmc, "--input", str(source), "-o", str(target), "--threads", "1"]


def run(engine: Path, source: Path, target: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(engine, source, target), capture_output=True, text=True, timeout=600)


def records(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_openai_format(engine: Path, tmp_path: Path) -> None:
    """Answers as the server gives them, refusals with their status, and what is no request with an error."""
    ok = lines(3)
    bad = [
        ok[0] | {"custom_id": "field", "body": {"prompt": "x", "wrong": 1}},
        ok[0] | {"custom_id": "bounds", "body": {"prompt": "x", "temperature": 3}},
        ok[0] | {"custom_id": "url", "url": "/v1/files"},
        ok[0] | {"custom_id": "stream", "body": {"prompt": "x", "stream": True}},
        ok[0] | {"custom_id": 5},
        "{not json",
    ]
    source, target = write(tmp_path / "in.jsonl", [*ok, *bad]), tmp_path / "out.jsonl"
    result = run(engine, source, target)
    assert result.returncode == 1, result.stderr
    found = records(target)
    assert "9 requests, 6 failed" in result.stderr, found
    assert [r["custom_id"] for r in found] == ["r0", "r1", "r2", "field", "bounds", "url", "stream", 5, None]
    assert len(found[0]["response"]["body"]["choices"]) == 2 and found[0]["error"] is None
    message = found[1]["response"]["body"]["choices"][0]["message"]
    assert message["role"] == "assistant" and found[1]["response"]["body"]["usage"]["completion_tokens"] > 0
    assert [r["response"]["status_code"] for r in found[:5]] == [200, 200, 200, 400, 400]
    assert found[3]["response"]["body"]["error"]["param"] == "wrong"
    assert all(r["response"] is None and r["error"]["code"] == "invalid_line" for r in found[5:])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl"]


KILLED = """
import os, signal, sys
from llmc.__main__ import main
from llmc.runtime.llm import LLM
step, left = LLM.step, int(sys.argv.pop(1))
def killed(self):
    global left
    left -= 1
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return step(self)
LLM.step = killed
main()
"""


def test_killed_runs_go_on(engine: Path, tmp_path: Path) -> None:
    """SIGKILL at several steps: in the end each line has its result once, the same as without."""
    source, target = write(tmp_path / "in.jsonl", lines(150)), tmp_path / "out.jsonl"
    partial, counts = tmp_path / ".out.jsonl.partial", [0]
    for steps in (1, 30, 60):
        arguments = command(engine, source, target)[4:]
        done = subprocess.run([sys.executable, "-P", "-c", KILLED, str(steps), *arguments], stderr=subprocess.PIPE)
        assert done.returncode == -signal.SIGKILL, done.stderr.decode()
        counts.append(partial.read_bytes().count(b"\n") if partial.exists() else 0)
    assert 0 < counts[-1] < 150 and counts == sorted(counts)
    if partial.exists():
        with partial.open("ab") as file:
            file.write(b'{"id": "batch_req_')  # as if it had been killed while it wrote
    result = run(engine, source, target)
    assert result.returncode == 0, result.stderr
    found = records(target)
    assert [r["custom_id"] for r in found] == [f"r{i}" for i in range(150)]
    whole = tmp_path / "whole.jsonl"
    assert run(engine, source, whole).returncode == 0
    for a, b in zip(found, records(whole), strict=True):
        assert a["response"]["body"]["choices"] == b["response"]["body"]["choices"]


def test_results_of_another_input_are_not_taken(engine: Path, tmp_path: Path) -> None:
    source, target = write(tmp_path / "in.jsonl", lines(2)), tmp_path / "out.jsonl"
    write(tmp_path / ".out.jsonl.partial", [{"id": "batch_req_0", "custom_id": "other", "response": None, "error": {}}])
    result = run(engine, source, target)
    assert result.returncode == 2 and "another input" in result.stderr and not target.exists()


def test_examples_of_constraints(engine: Path) -> None:
    examples = Path(__file__).parents[2] / "examples"

    def output(name: str) -> str:
        command = [sys.executable, "-P", str(examples / name), str(engine)]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=600).stdout

    assert "'inhabitants': " in output("structured.py")
    assert output("tools.py").startswith("weather {'city': ")
