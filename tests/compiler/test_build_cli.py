"""The commands build, inspect, passes, ops and targets: what they print, and the exit codes."""

from __future__ import annotations

import contextlib
import io
import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from checkpoints import llama_arrays, write_llama, write_model

from llmc.__main__ import main
from llmc.runtime.engine import load_engine


@dataclass
class Done:
    """What a command printed, and its exit code."""

    returncode: int
    stdout: str
    stderr: str


def llmc(*arguments: object) -> Done:
    """Run a command in this process."""
    out, err = io.StringIO(), io.StringIO()
    code: Any = 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main([str(argument) for argument in arguments])
        except SystemExit as end:
            code = end.code or 0
    return Done(int(code), out.getvalue(), err.getvalue())


def printed(*arguments: object) -> Any:
    done = llmc(*arguments, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(autouse=True)
def signals() -> Iterator[None]:
    """The command sets a handler, as the main program of a process may."""
    handler = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, handler)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cli")
    done = llmc("build", write_llama(folder / "model"), "-o", folder / "engine")
    assert done.returncode == 0, done.stderr
    assert "tracing" in done.stderr and "writing weights" in done.stderr
    assert "LlamaForCausalLM" in done.stdout and "max_seq_len 64" in done.stdout and "sha256:" in done.stdout
    return folder


def test_a_dry_run_tells_the_sizes_of_the_engine_and_writes_nothing(built: Path) -> None:
    before = sorted(os.listdir(built))
    found = printed("build", built / "model", "-o", built / "dry", "--dry-run", "--max-seq-len", 32, "--quiet")
    engine = load_engine(built / "engine")
    assert found["weight_bytes"] <= engine.weight_bytes and found["kv_bytes_per_token"] == engine.kv_bytes_per_token
    assert found["limits"] == {"max_seq_len": 32, "max_batch_tokens": 512, "max_sequences": 64}
    assert found["build_peak_bytes"] > 512 << 20 and found["disk_bytes"] > found["weight_bytes"]
    assert sorted(os.listdir(built)) == before


def test_json_and_quiet(built: Path, tmp_path: Path) -> None:
    done = llmc("build", built / "model", "-o", tmp_path / "e", "--json", "--quiet", "--dtype", "float16")
    assert done.returncode == 0 and done.stderr == ""
    result = json.loads(done.stdout)
    assert result["dtype"] == result["kv_dtype"] == "float16" and result["digest"].startswith("sha256:")
    assert set(result["seconds"]) >= {"tracing", "writing weights"} and result["peak_rss_bytes"] > 0
    assert load_engine(tmp_path / "e").digest == result["digest"].removeprefix("sha256:")


def test_exit_codes_and_messages(built: Path, tmp_path: Path) -> None:
    model = built / "model"

    def fails(code: int, *words: str, arguments: tuple[object, ...]) -> None:
        done = llmc("build", *arguments)
        assert done.returncode == code, done
        assert all(word in done.stderr for word in words), done.stderr
        assert "Traceback" not in done.stderr

    out = ("-o", tmp_path / "e")
    fails(2, "-o ENGINE", arguments=(model,))
    fails(2, "unknown", "awq", arguments=(model, *out, "--quant", "aqw"))
    fails(2, "too small", "--quant-lm-head", arguments=(model, *out, "--quant", "rtn"))
    fails(2, "float32", arguments=(model, *out, "--dtype", "int8"))
    fails(2, "known: cpu", arguments=(model, *out, "--target", "tpu"))
    fails(2, "--max-seq-len", arguments=(model, *out, "--max-seq-len", 0))
    fails(2, "--force", arguments=(model, "-o", built / "engine"))
    fails(4, "no such model", arguments=(tmp_path / "nothing", *out))
    broken = write_llama(tmp_path / "broken")
    os.truncate(broken / "model.safetensors", 5000)
    fails(4, "model.safetensors", "5000", arguments=(broken, *out))
    foreign = write_model(tmp_path / "foreign", llama_arrays(), architectures=["FooForCausalLM"])
    fails(1, "FooForCausalLM", "LlamaForCausalLM", arguments=(foreign, *out))
    assert not (tmp_path / "e").exists()


def test_an_engine_is_replaced_with_force(built: Path, tmp_path: Path) -> None:
    for limit in (16, 32):
        assert llmc("build", built / "model", "-o", tmp_path / "e", "--max-seq-len", limit, "--force").returncode == 0
        assert load_engine(tmp_path / "e").limits.max_seq_len == limit
    assert os.listdir(tmp_path) == ["e"]


def test_a_full_disk_ends_with_5_and_leaves_nothing(built: Path, tmp_path: Path) -> None:
    def small_files() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))

    command = [sys.executable, "-P", "-m", "llmc", "build", str(built / "model"), "-o", str(tmp_path / "e"), "--quiet"]
    done = subprocess.run(command, capture_output=True, text=True, preexec_fn=small_files)
    assert done.returncode == 5 and "disk is full" in done.stderr and os.listdir(tmp_path) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_build_leaves_nothing(built: Path, tmp_path: Path, number: int) -> None:
    command = [sys.executable, "-P", "-m", "llmc", "build", str(built / "model"), "-o", str(tmp_path / "e")]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if line.startswith("tracing"):
                process.send_signal(number)
                break
        process.stderr.read()
    assert process.returncode != 0 and os.listdir(tmp_path) == []


def test_a_build_opens_no_connection(built: Path, tmp_path: Path) -> None:
    """Any attempt would be an error: sockets are replaced before the command starts."""
    script = (
        "import socket, sys\n"
        "def refuse(*arguments): raise AssertionError('a socket was opened')\n"
        "socket.socket.connect = socket.create_connection = socket.getaddrinfo = refuse\n"
        "from llmc.__main__ import main\n"
        "main(sys.argv[1:])\n"
    )
    command = [sys.executable, "-P", "-c", script, "build", str(built / "model"), "-o", str(tmp_path / "e"), "--quiet"]
    assert subprocess.run(command, capture_output=True).returncode == 0


def test_inspect_an_engine(built: Path) -> None:
    found = printed("inspect", built / "engine")
    engine = load_engine(built / "engine")
    assert found["digest"] == f"sha256:{engine.digest}" and found["weight_bytes"] == engine.weight_bytes
    assert found["steps"] == len(engine.plan.steps) == sum(found["ops"].values())
    assert found["files"]["weights.safetensors"] == (built / "engine/weights.safetensors").stat().st_size
    text = llmc("inspect", built / "engine").stdout
    assert "KV cache per token" in text and "paged_attention 2" in text


def test_inspecting_an_engine_needs_no_torch(built: Path) -> None:
    script = (
        "import sys\nfrom llmc.__main__ import cli\n"
        "cli.main(['inspect', sys.argv[1]], standalone_mode=False)\n"
        "print([m for m in ('torch', 'transformers', 'onnx_ir') if m in sys.modules])\n"
    )
    command = [sys.executable, "-P", "-c", script, str(built / "engine")]
    assert subprocess.check_output(command, text=True).splitlines()[-1] == "[]"


def test_inspect_a_damaged_engine(built: Path, tmp_path: Path) -> None:
    (tmp_path / "engine.json").write_text("{")
    done = llmc("inspect", tmp_path)
    assert done.returncode == 4 and "engine.json" in done.stderr


def test_inspect_a_model(built: Path) -> None:
    found = printed("inspect", built / "model")
    arrays = llama_arrays()
    assert found["architecture"] == "LlamaForCausalLM" and found["parameters"] == sum(a.size for a in arrays.values())
    assert set(found["tensors"]) == set(arrays) and found["weight_bytes"] == sum(a.nbytes for a in arrays.values())
    assert "config.json" in found["files"] and found["eos_token_ids"] == [2]
    assert "stored as" in llmc("inspect", built / "model").stdout


def test_lists(built: Path) -> None:
    targets = [row["target"] for row in printed("targets")]
    assert targets[0] == "cpu" and all(name.startswith("cuda:sm_") for name in targets[1:])
    ops = {row["op"]: row for row in printed("ops")}
    assert "scalar" in ops["linear"]["kernels"] and "bias?" in ops["linear"]["inputs"]
    rows = printed("passes")
    assert rows[0]["stage"] == "fx" and all(row["what"] for row in rows)
    assert "FuseRope" in llmc("passes").stdout


def test_help_is_quick() -> None:
    """It imports nothing of the compiler's libraries."""
    code = "import sys, llmc.__main__ as m; m.cli(['build', '--help'], standalone_mode=False)\n"
    code += "print([n for n in ('torch', 'transformers', 'onnx', 'onnx_ir', 'numpy') if n in sys.modules])"
    done = subprocess.run([sys.executable, "-P", "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "[]"
