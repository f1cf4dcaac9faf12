"""What README.md tells people to type works: its commands and its Python are run, on a small model of our own."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import click
import engines
import pytest
import tokenizers
from packed import random_model
from transformers import PreTrainedTokenizerFast

from llmc.__main__ import COMMANDS, cli

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
LINES = [line for kind, text in BLOCKS if kind == "sh" for line in text.splitlines() if line.strip()]
PYTHON = [text for kind, text in BLOCKS if kind == "python"]
CHAT = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"


def words(line: str) -> list[str]:
    return shlex.split(line, comments=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ``model/``: a random Llama whose tokens are bytes."""
    folder = tmp_path_factory.mktemp("readme")
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<s>", "</s>", *alphabet])}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    tokenizer.chat_template = CHAT
    random_model(engines.small_llama(vocab_size=len(vocabulary))).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    (folder / "text.txt").write_text(README[:2000], encoding="utf-8")
    return folder


def run(folder: Path, command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=folder, input="", capture_output=True, text=True, timeout=600)


def test_the_commands(folder: Path) -> None:
    """In their order: what one makes the next one uses."""
    commands = [words(line) for line in LINES if line.startswith("llmc ")]
    assert len(commands) >= 4
    for command in commands:
        if command[1] == "build" and "-o" in command:
            command.append("--force")
        if command[1] == "serve":
            serve(folder, command)
            continue
        done = run(folder, [sys.executable, "-P", "-m", *command])
        assert done.returncode == 0, f"{shlex.join(command)}: {done.stderr}"


def serve(folder: Path, command: list[str]) -> None:
    """Start it on a free port, talk to it with the example for the openai client, have it end."""
    with subprocess.Popen(
        [sys.executable, "-P", "-m", *command, "--port", "0"], cwd=folder, stderr=subprocess.PIPE, text=True
    ) as server:
        assert server.stderr is not None
        url = next(found[0] for line in server.stderr if (found := re.findall(r"listening on (http://\S+:\d+)", line)))
        done = run(folder, [sys.executable, "-P", str(ROOT / "examples/openai_client.py"), url + "/v1"])
        server.terminate()
        assert server.wait(60) == 0, server.stderr.read()
    assert done.returncode == 0, done.stderr
    assert "(32 tokens)" in done.stdout


def test_the_python(folder: Path) -> None:
    if not (folder / "engine").exists():
        assert run(folder, [sys.executable, "-P", "-m", "llmc", "build", "model", "-o", "engine"]).returncode == 0
    assert PYTHON
    for text in PYTHON:
        short = text.replace("max_tokens=16", "max_tokens=4")
        done = run(folder, [sys.executable, "-P", "-c", short])
        assert done.returncode == 0, f"{text}: {done.stderr}"


def test_other_commands_are_run_by_ci() -> None:
    script = (ROOT / ".ci/run").read_text()
    lines = [line for line in LINES if not line.startswith("llmc ")]
    assert lines
    for line in lines:
        command = words(line)[0]
        assert re.search(rf"^\s*{re.escape(command)}\b", script, re.MULTILINE), f".ci/run does not run {command}"
        assert (ROOT / command).exists()


def test_commands_and_options_that_are_named_exist() -> None:
    """Also those in the text and in tables."""
    context = click.Context(cli)
    known = {name: cli.get_command(context, name) for name in COMMANDS}
    options = {o for command in known.values() if command for p in command.params for o in p.opts} | {"--help"}
    inline = re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```$", "", README, flags=re.MULTILINE | re.DOTALL))
    for text in [*inline, *LINES]:
        found = words(text) if text.startswith("llmc ") else []
        if found:
            assert found[1] in known or " ".join(found[1:3]) in known, text
        if found or re.fullmatch(r"--[\w-]+.*", text):
            used = {word.split("=")[0] for word in re.findall(r"(?<![\w-])--[a-z][\w-]*", text)}
            assert used <= options, f"{text}: {sorted(used - options)} do not exist"
