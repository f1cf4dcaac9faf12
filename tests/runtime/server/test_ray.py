"""The examples for Ray: two replicas that compute a file, and two that serve while one is killed."""

from __future__ import annotations

import importlib
import json
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest
import ray
from click.testing import CliRunner
from ray import serve

from llmc import LLM, SamplingParams

EXAMPLES = Path(__file__).parents[3] / "examples"
SETTINGS = {
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": str(EXAMPLES),
    "RAY_AUTH_MODE": "disabled",  # it is this machine only, and would write a file to the home directory
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_raylet_start_wait_time_s": "300",  # a machine under load, or full: Ray ends workers then
    "RAY_memory_monitor_refresh_ms": "0",
    "RAY_local_fs_capacity_threshold": "1.0",
}
PROMPTS = ["m", "e", "w", "u", "z", "mn", "em", "wm"]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """On this machine: two replicas and what reads the file. Workers import them too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("ray"))  # workers import from here first, and a clone's root is no package
        patch.syspath_prepend(str(EXAMPLES))
        for name, value in SETTINGS.items():
            patch.setenv(name, value)
        patch.delenv("http_proxy", raising=False)
        ray.init(num_cpus=3, object_store_memory=80 << 20, include_dashboard=False, log_to_driver=False)
        yield
        ray.shutdown()


@pytest.fixture(scope="module")
def expected(served: Any) -> list[str]:
    llm = LLM(served.engine, threads=1)
    texts = [result.text for result in llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=32))]
    llm.close()
    return texts


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("ray_batch", [".", "nowhere.jsonl", "out"], "'nowhere.jsonl' does not exist"),
        ("ray_batch", [".", __file__, "out", "--replicas", "0"], "0 is not in the range"),
        ("ray_serve", ["nowhere"], "'nowhere' does not exist"),
        ("ray_serve", [".", "--port", "http"], "'http' is not a valid integer"),
    ],
)
def test_mistakes_are_told(monkeypatch: pytest.MonkeyPatch, name: str, arguments: list[str], message: str) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    result = CliRunner().invoke(importlib.import_module(name).main, arguments)
    assert result.exit_code == 2 and message in result.output


def test_a_file(cluster: None, served: Any, expected: list[str], tmp_path: Path) -> None:
    import ray_batch

    source, target = tmp_path / "in.jsonl", tmp_path / "out"
    source.write_text("".join(json.dumps({"id": i, "prompt": p}) + "\n" for i, p in enumerate(PROMPTS)))
    ray_batch.main([str(served.engine), str(source), str(target), "--replicas", "2"], standalone_mode=False)
    lines = [json.loads(line) for file in target.iterdir() for line in file.read_text().splitlines()]
    assert [line["text"] for line in sorted(lines, key=lambda line: line["id"])] == expected


def test_a_replica_is_killed(cluster: None, served: Any, expected: list[str]) -> None:
    import ray_serve

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ray_serve.main([str(served.engine), "--replicas", "2", "--port", str(port)], standalone_mode=False)
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=20, timeout=120)

    def ask(prompt: str) -> str:
        answer = client.completions.create(model="script", prompt=prompt, temperature=0, max_tokens=32)
        return answer.choices[0].text

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(ask, PROMPTS)) == expected
        chunks = client.completions.create(model="script", prompt="e", temperature=0, max_tokens=32, stream=True)
        assert "".join(c.choices[0].text for c in chunks) == expected[1]
        with pytest.raises(openai.BadRequestError, match="max_tokens"):
            client.completions.create(model="script", prompt="e", max_tokens=-1)
        replicas = [p for p in psutil.Process().children(recursive=True) if "ServeReplica" in "".join(p.cmdline()[:1])]
        assert len(replicas) == 2
        (child,) = [c for c in replicas[0].children() if "serve" in c.cmdline()]
        replicas[0].kill()
        assert list(pool.map(ask, PROMPTS * 2)) == expected * 2
    child.wait(60)  # the server goes with its replica
    serve.shutdown()
