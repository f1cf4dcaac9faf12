"""build_scripts/soak.py: passes on a sound server, and finds what it is there to find."""

from __future__ import annotations

import asyncio
import importlib.util
import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx

SCRIPT = Path(__file__).parents[3] / "build_scripts/soak.py"


def load() -> Any:
    spec = importlib.util.spec_from_file_location("soak", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["soak"] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


def test_a_sound_server_passes(served: Any) -> None:
    command = [sys.executable, str(SCRIPT), str(served.engine), "--minutes", "0.01", "--threads", "1", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["problems"] == []
    assert len(result["by kind"]) == 11 and result["canaries"] >= 2


def test_what_it_finds() -> None:
    soak = load()
    numbers = itertools.count()

    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(
            200, json={"choices": [{"index": 0, "text": str(next(numbers)), "finish_reason": "stop"}]}
        )

    async def run() -> Any:
        tally = soak.Tally()
        async with httpx.AsyncClient(base_url="http://x", transport=httpx.MockTransport(answer)) as client:
            case = soak.Case("choices", "/v1/completions", {"prompt": "a", "n": 2})
            await soak.Soak(client, [case] * 2, tally, 0).run(0, 0.0)  # each once: counts choices
            clients = soak.Soak(client, [case], tally, 1)
            clients.known[0] = [("other", "stop")]
            await clients.run(0, 0.0)
            await clients.canary([{"prompt": "a"}], 0.0, 0.0)
        return tally

    problems = asyncio.run(run()).problems
    assert any("instead of" in p for p in problems) and any("1 choices instead of 2" in p for p in problems), problems


def test_growth_of_memory() -> None:
    growth = load().growth
    steady = [(n, 300_000 + (n % 3) * 100 + (100_000 if n < 500 else 0)) for n in range(0, 5000, 100)]
    assert abs(growth(steady)[0]) < 1
    leaking = [(n, 300_000 + 20 * n) for n in range(0, 5000, 100)]
    grown, allowed = growth(leaking)
    assert grown > allowed > 10
    assert growth(leaking[:5]) is None
