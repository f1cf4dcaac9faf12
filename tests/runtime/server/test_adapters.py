"""Adapters are models of their own to a client."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from click.testing import CliRunner
from safetensors.numpy import load_file, save_file

from llmc.__main__ import cli
from llmc.errors import EngineError, UsageError


def write_adapter(folder: Path, model: Path, after: int, following: int) -> Path:
    """One that lets a token follow another one in the script model."""
    rows = load_file(next(model.glob("*.safetensors")))["model.embed_tokens.weight"]
    b = np.zeros((len(rows), 1), np.float32)
    b[following] = 10
    folder.mkdir()
    tensors = {"lora_A.weight": rows[after : after + 1].copy(), "lora_B.weight": b}
    save_file({f"base_model.model.lm_head.{k}": v for k, v in tensors.items()}, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 1, "lora_alpha": 1}))
    return folder


def test_the_model_names_the_adapter(kit: Any, served: Any, start: Any, tmp_path: Path) -> None:
    (m, u) = kit.ids("mu")
    adapter = write_adapter(tmp_path / "adapter", served.engine.parent / "model", m, u)
    with start("--lora", f"other={adapter}") as server:
        client = server.openai()
        assert [model.id for model in client.models.list()] == ["script", "other"]
        answers = {
            name: client.completions.create(model=name, prompt="m", temperature=0, max_tokens=2).choices[0].text
            for name in ("script", "other", "script")
        }
        assert answers == {"script": "no", "other": "uv"}
        messages: list[Any] = [{"role": "user", "content": "m"}]
        chat = client.chat.completions.create(model="other", messages=messages, max_tokens=2, temperature=0)
        assert (chat.model, chat.choices[0].message.content) == ("other", "uv")
        assert client.models.retrieve("other").model_extra["parent"] == "script"
        with pytest.raises(openai.NotFoundError, match="known: script, other"):
            client.completions.create(model="third", prompt="m")


def test_names_of_adapters() -> None:
    for arguments, message in (
        (["--lora", "x"], "--lora x: expected NAME=DIR"),
        (["--lora", "e=y"], "--lora e=y: the name is taken"),
    ):
        result = CliRunner().invoke(cli, ["serve", "some/e", *arguments])
        assert isinstance(result.exception, UsageError)
        assert message in str(result.exception)


def test_an_adapter_that_does_not_fit_is_told_before_listening(served: Any, tmp_path: Path) -> None:
    """Without reading the weights, and with one exit code for whatever is wrong with it."""
    (tmp_path / "empty").mkdir()
    adapter = write_adapter(tmp_path / "other", served.engine.parent / "model", 3, 4)
    tensors = load_file(adapter / "adapter_model.safetensors")
    narrow = {name: tensor[:, :-1].copy() if "lora_A" in name else tensor for name, tensor in tensors.items()}
    save_file(narrow, adapter / "adapter_model.safetensors")
    for folder, message in (("empty", "adapter_config.json"), ("other", "/other: lm_head adapts a weight [")):
        arguments = ["serve", str(served.engine), "--port", "0", "--lora", f"other={tmp_path / folder}"]
        failed = CliRunner().invoke(cli, arguments).exception
        assert isinstance(failed, EngineError) and failed.exit_code == 4
        assert message in str(failed)


def test_llmc_run_with_an_adapter(kit: Any, served: Any, tmp_path: Path) -> None:
    """One prompt, a chat, a conversation, and lines of both formats that name it."""
    (m, u) = kit.ids("mu")
    adapter = write_adapter(tmp_path / "adapter", served.engine.parent / "model", m, u)

    def run(*arguments: str, lora: tuple[str, ...] = ("other",), stdin: str | None = None) -> Any:
        given = [f"--lora={name}={adapter}" for name in lora]
        sampling = ["--temperature", "0", "--max-tokens", "2"] if "--input" not in arguments else []
        return CliRunner().invoke(
            cli, ["run", str(served.engine), "--threads", "1", *given, *sampling, *arguments], input=stdin
        )

    assert run("-p", "m", lora=()).stdout == "no\n"
    assert run("-p", "m").stdout == "uv\n"
    assert json.loads(run("-p", "m", "--json").stdout)["choices"][0]["text"] == "uv"
    assert run("--chat", "-p", "m").stdout == "uv\n"
    assert run("--chat", stdin="m\n").stdout == "uv\n"
    assert "give --lora once" in str(run("-p", "m", lora=("a", "b")).exception)

    values: dict[str, Any] = {"prompt": "m", "temperature": 0, "max_tokens": 2}
    names = [None, "other", "more", "third"]
    own = [values if name is None else values | {"model": name} for name in names]
    openai_lines = [
        {"custom_id": str(i), "method": "POST", "url": "/v1/completions", "body": line} for i, line in enumerate(own)
    ]
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    for lines in (own, openai_lines):
        source.write_text("".join(json.dumps(line) + "\n" for line in lines))
        result = run("--input", str(source), "-o", str(target), lora=("other", "more"))
        assert result.exit_code == 1, result.output
        records = [json.loads(line) for line in target.read_text().splitlines()]
        bodies = [r["response"]["body"] if "response" in r else r for r in records]
        assert [b["choices"][0]["text"] for b in bodies[:3]] == ["no", "uv", "uv"]
        assert "known: " in bodies[3]["error"]["message"] and "other" in bodies[3]["error"]["message"]
