"""`llmc serve` under a random mix of everything for a while, with a canary that must stay the same to the bit.

    build_scripts/soak.py ENGINE [--minutes 10] [--clients 12] [--seed 0] [--threads N] [--json]

Completions and chats, streamed or not, long and short, n > 1, penalties, schemas, expressions, grammars, embeddings,
log-probabilities and (where the engine can take them) LoRA adapters; a fifth of the clients goes away at some moment.
What fails the soak (exit code 3): an answer other than 200 or 429; a seeded request that is answered differently the
second time, streamed or not; a canary, every 10 s, that differs in a token or a bit of a log-probability; memory that
grows by more than 10 MiB in 2,000 requests once all kinds were seen; blocks or sequences that do not come back; errors
in the log.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from llmc.errors import EngineError

POOL = 48
"""Different requests; each comes again and again, and must be answered as the first time."""
CANARY_SECONDS, SAMPLE_SECONDS, PATIENCE = 10.0, 2.0, 1800.0
MIB_PER_2000 = 10.0
WARM_SHARE = 0.2
"""Of the requests, after each of the pool was sent once: until then memory may grow, since caches fill."""
WORDS = ("the", "sea", "of", "night", "and", "a", "small", "light", "in", "it", "that", "was", "for", "us", "hand")
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "size": {"enum": ["small", "large"]},
        "counts": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 3},
    },
    "required": ["name", "size", "counts"],
    "additionalProperties": False,
}
GRAMMAR = 'start: sum\nsum: NUMBER (" + " NUMBER){0,3}\nNUMBER: /[0-9]{1,3}/'


@dataclass(frozen=True)
class Case:
    """A request of the pool."""

    kind: str
    path: str
    body: dict[str, Any]


@dataclass
class Tally:
    """What has been seen. ``memory``: (requests sent, KiB of the server and its children)."""

    sent: Counter[str] = field(default_factory=Counter)
    busy: int = 0
    aborted: int = 0
    compared: int = 0
    canaries: int = 0
    slowest_canary: float = 0.0
    problems: list[str] = field(default_factory=list)
    memory: list[tuple[int, int]] = field(default_factory=list)

    def fail(self, text: str) -> None:
        """Note what went wrong; the first ones are enough."""
        if len(self.problems) < 20:
            self.problems.append(text)
            print(f"PROBLEM: {text}", file=sys.stderr, flush=True)

    @property
    def requests(self) -> int:
        """Sent so far."""
        return sum(self.sent.values())


def pool(models: list[str], context: int, chats: bool, rng: random.Random) -> list[Case]:
    """Requests of all kinds, with a seed each."""
    cases, long = [], max(16, min(600, context // 3))

    def text(count: int) -> str:
        return " ".join(rng.choice(WORDS) for _ in range(count))

    kinds = ["short", "long", "choices", "penalties", "schema", "regex", "grammar", "logprobs", "embedding", "greedy"]
    kinds += ["chat", "chat"] if chats else []
    for number in range(POOL):
        kind = kinds[number % len(kinds)]
        body: dict[str, Any] = {"model": models[number // len(kinds) % len(models)]}
        if kind == "embedding":
            body |= {"input": [text(rng.randint(1, 40)) for _ in range(rng.randint(1, 3))]}
            cases.append(Case(kind, "/v1/embeddings", body | {"pooling": rng.choice(["last", "mean"])}))
            continue
        body |= {"seed": number, "temperature": rng.choice([0.0, 0.7, 1.0]), "max_tokens": rng.randint(4, 24)}
        prompt = text(long // 2 if kind == "long" else rng.randint(1, 40))
        body |= {
            "long": {"max_tokens": max(8, min(120, context // 4)), "ignore_eos": True},
            "choices": {"n": rng.randint(2, 5)},
            "penalties": {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "top_p": 0.9, "min_p": 0.02},
            "schema": {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}},
            "regex": {"guided_regex": f"[a-c]{{{1 + number % 5}}}-[0-9]+", "stop": ["99"]},
            "grammar": {"guided_grammar": GRAMMAR},
            "logprobs": {"logprobs": 3, "min_tokens": 2},
            "greedy": {"temperature": 0.0},
            "chat": {"top_k": 40, "messages": [{"role": "user", "content": prompt}]},
        }.get(kind, {})
        if kind == "schema":
            body["max_tokens"] = 64
        path = "/v1/chat/completions" if kind == "chat" else "/v1/completions"
        cases.append(Case(kind, path, body if kind == "chat" else body | {"prompt": prompt}))
    return cases


def answer_of(value: dict[str, Any]) -> Any:
    """What must be the same each time."""
    if "data" in value:
        return [entry["embedding"] for entry in value["data"]]
    return [
        (c["text"] if "text" in c else c["message"]["content"], c["finish_reason"]) for c in by_index(value["choices"])
    ]


def by_index(choices: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """In the order of their numbers."""
    return sorted(choices, key=lambda choice: int(choice["index"]))


class Soak:
    """The clients of one server."""

    def __init__(self, client: httpx.AsyncClient, cases: list[Case], tally: Tally, seed: int) -> None:
        self.client, self.cases, self.tally, self.seed = client, cases, tally, seed
        self.known: dict[int, Any] = {}
        self.fresh = list(range(len(cases)))

    async def run(self, number: int, end: float) -> None:
        """One client until the end."""
        rng = random.Random(f"{self.seed}/{number}")
        while self.fresh or time.monotonic() < end:
            index = self.fresh.pop() if self.fresh else rng.randrange(len(self.cases))
            case = self.cases[index]
            self.tally.sent[case.kind] += 1
            streams, leaves = rng.random() < 0.5 and case.kind != "embedding", rng.random() < 0.2
            try:
                async with asyncio.timeout(rng.expovariate(2.0) if leaves else PATIENCE):
                    answer = await self._streamed(case) if streams else await self._whole(case)
            except TimeoutError:
                if leaves:
                    self.tally.aborted += 1
                else:
                    self.tally.fail(f"{case.kind}: no answer in {PATIENCE:g} s")
            except (httpx.HTTPError, ValueError, LookupError, TypeError) as problem:
                self.tally.fail(f"{case.kind}: {type(problem).__name__}: {problem}")
            else:
                if answer is None:
                    await asyncio.sleep(0.1)
                elif answer != self.known.setdefault(index, answer):
                    self.tally.fail(f"{case.kind} {case.body}: {answer!r:.300} instead of {self.known[index]!r:.300}")
                else:
                    self.tally.compared += 1
                    self._check(case, answer)

    async def _whole(self, case: Case) -> Any:
        answer = await self.client.post(case.path, json=case.body)
        return answer_of(answer.json()) if self._is_good(case, answer) else None

    async def _streamed(self, case: Case) -> Any:
        texts: dict[int, list[str]] = {}
        reasons: dict[int, str] = {}
        last = ""
        async with self.client.stream("POST", case.path, json=case.body | {"stream": True}) as answer:
            if not self._is_good(case, answer):
                return None
            async for line in answer.aiter_lines():
                last = line or last
                if line.startswith("data: {"):
                    for choice in json.loads(line[6:])["choices"]:
                        part = choice["text"] if "text" in choice else choice["delta"].get("content")
                        texts.setdefault(choice["index"], []).append(part or "")
                        if choice["finish_reason"]:
                            reasons[choice["index"]] = choice["finish_reason"]
        if last != "data: [DONE]":
            self.tally.fail(f"{case.kind}: the stream ended with {last:.200}")
        return [("".join(parts), reasons.get(index)) for index, parts in sorted(texts.items())]

    def _is_good(self, case: Case, answer: httpx.Response) -> bool:
        self.tally.busy += answer.status_code == 429
        if answer.status_code not in (200, 429):
            self.tally.fail(f"{case.kind} {case.body}: status {answer.status_code}")
        return answer.status_code == 200

    def _check(self, case: Case, answer: Any) -> None:
        """What was asked for must hold."""
        if case.kind == "choices" and len(answer) != case.body["n"]:
            self.tally.fail(f"{len(answer)} choices instead of {case.body['n']}")
        for text, reason in answer if case.kind in ("schema", "grammar") else ():
            if case.kind == "schema" and reason == "stop" and set(json.loads(text)) != set(SCHEMA["required"]):
                self.tally.fail(f"not of the schema: {text:.200}")
            if case.kind == "grammar" and not re.fullmatch(r"[0-9+ ]*", text):
                self.tally.fail(f"not of the grammar: {text:.200}")

    async def watch_memory(self, pid: int, end: float) -> None:
        """Note it every few seconds."""
        while time.monotonic() < end:
            await asyncio.sleep(SAMPLE_SECONDS)
            self.tally.memory.append((self.tally.requests, memory(pid)))

    async def canary(self, bodies: list[dict[str, Any]], begin: float, end: float) -> None:
        """The same requests every few seconds."""
        first: list[Any] = []
        while True:
            for number, body in enumerate(bodies):
                start = time.monotonic()
                answer = await self.client.post("/v1/completions", json=body)
                self.tally.slowest_canary = max(self.tally.slowest_canary, time.monotonic() - start)
                found = answer.json().get("choices")
                self.tally.canaries += 1
                if answer.status_code != 200:
                    self.tally.fail(f"canary: status {answer.status_code}")
                elif len(first) == number:
                    first.append(found)
                elif found != first[number]:
                    self.tally.fail(f"canary {number}: {found!r:.400} instead of {first[number]!r:.400}")
            now, mib = time.monotonic(), self.tally.memory[-1][1] / 1024 if self.tally.memory else 0.0
            text = f"{self.tally.requests} requests, {self.tally.aborted} aborted, {self.tally.compared} compared, "
            text += f"{mib:.1f} MiB, {len(self.tally.problems)} problems"
            print(f"{now - begin:6.0f} of {end - begin:.0f} s: {text}", file=sys.stderr, flush=True)
            if now >= end:
                return
            await asyncio.sleep(min(CANARY_SECONDS, end - now))


def memory(pid: int) -> int:
    """KiB that a process and its children hold of their own, in memory or swapped out."""
    total = 0
    for child in (pid, *children(pid)):
        with contextlib.suppress(OSError):
            status = Path(f"/proc/{child}/status").read_text()
            total += sum(map(int, re.findall(r"^(?:RssAnon|VmSwap):\s+(\d+) kB", status, re.MULTILINE)))
    return total


def children(pid: int) -> list[int]:
    """Direct ones."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):
            found += [int(child) for child in (task / "children").read_text().split()]
    return found


def growth(samples: list[tuple[int, int]]) -> tuple[float, float] | None:
    """(MiB that memory grew by after the warm part, how many are allowed), from medians; None: too few to judge."""
    warm = [sample for sample in samples if sample[0] >= max(2 * POOL, WARM_SHARE * samples[-1][0])]
    if (third := len(warm) // 3) < 3:
        return None
    begin, end = sorted(warm[:third], key=lambda s: s[1]), sorted(warm[-third:], key=lambda s: s[1])
    (n0, m0), (n1, m1) = begin[third // 2], end[third // 2]
    return (m1 - m0) / 1024, MIB_PER_2000 * max(1.0, (n1 - n0) / 2000)


def start(engine: Path, log: Path, threads: int | None, lora: dict[str, Path]) -> subprocess.Popen[bytes]:
    """`llmc serve` on a free port."""
    command = [sys.executable, "-P", "-m", "llmc", "serve", str(engine), "--port", "0", "--kv-memory", "64MiB"]
    command += ["--queue-timeout", str(PATIENCE), "--request-timeout", str(PATIENCE)]  # the machine may be busy
    command += ["--served-model-name", "base", *(f"--lora={name}={path}" for name, path in lora.items())]
    command += [] if threads is None else ["--threads", str(threads)]
    with log.open("wb") as file:
        return subprocess.Popen(command, stderr=file)


def address(process: subprocess.Popen[bytes], log: Path) -> str:
    """Of the server, once it is ready."""
    end = time.monotonic() + PATIENCE
    while "ready: " not in (text := log.read_text(errors="replace")):
        if process.poll() is not None or time.monotonic() > end:
            raise SystemExit(f"the server does not start:\n{text}")
        time.sleep(0.1)
    return re.findall(r"listening on (http://\S+)", text)[0]


def adapters(engine: Path, folder: Path) -> dict[str, Path]:
    """Two, if the engine says what its products are."""
    from bench_lora import write_adapter

    try:
        return {name: write_adapter(folder / name, engine, rank, rank) for name, rank in (("thin", 4), ("wide", 12))}
    except (EngineError, KeyError):
        return {}


async def soak(url: str, pid: int, lora: list[str], arguments: argparse.Namespace, tally: Tally) -> None:
    """All clients, the canary, and the state when all is quiet again."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=arguments.clients)
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE, limits=limits, trust_env=False) as client:
        entry = (await client.get("/v1/models")).json()["data"][0]
        hello = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 1}
        chats = (await client.post("/v1/chat/completions", json=hello)).status_code == 200
        cases = pool(["base", *lora], entry["max_model_len"], chats, random.Random(arguments.seed))
        canaries = [
            {
                "model": name,
                "prompt": f"{prompt} is",
                "max_tokens": 16,
                "temperature": 0,
                "ignore_eos": True,
                "logprobs": 2,
            }
            for name, prompt in [("base", "The capital of France"), *((name, "The sea") for name in lora[:1])]
        ]
        clients, begin = Soak(client, cases, tally, arguments.seed), time.monotonic()
        end = begin + arguments.minutes * 60
        watches = (clients.canary(canaries, begin, end), clients.watch_memory(pid, end))
        await asyncio.gather(*watches, *(clients.run(number, end) for number in range(arguments.clients)))
        names = ("running_sequences", "waiting_sequences", "kv_blocks_used")
        for _ in range(600):
            text = (await client.get("/metrics")).text
            left = {n: float(re.findall(rf"^llmc_{n}{{.*}} (\S+)$", text, re.MULTILINE)[0]) for n in names}
            if not any(left.values()):
                break
            await asyncio.sleep(0.1)
        else:
            tally.fail(f"not idle a minute after the last request: {left}")
        tally.memory.append((tally.requests, memory(pid)))


def report(tally: Tally, seconds: float) -> dict[str, Any]:
    """Numbers, and the verdict."""
    grown, allowed = growth(tally.memory) or (None, MIB_PER_2000)
    if grown is not None and grown > allowed:
        tally.fail(f"memory grew by {grown:.1f} MiB; {allowed:.1f} are allowed")
    return {
        "seconds": seconds,
        "requests": tally.requests,
        "by kind": dict(tally.sent),
        "aborted by their client": tally.aborted,
        "refused (429)": tally.busy,
        "equal to the first answer": tally.compared,
        "canaries": tally.canaries,
        "slowest canary, s": tally.slowest_canary,
        "memory, MiB": tally.memory[-1][1] / 1024,
        "memory grew by, MiB": "too few requests to tell" if grown is None else grown,
        "allowed, MiB": allowed,
        "problems": tally.problems,
    }


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", type=Path)
    for name, kind, default in (("minutes", float, 10), ("clients", int, 12), ("seed", int, 0), ("threads", int, None)):
        parser.add_argument(f"--{name}", type=kind, default=default)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    tally, begin = Tally(), time.monotonic()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the server ends as well
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        lora = adapters(arguments.engine, folder)
        log = folder / "log.txt"
        process = start(arguments.engine, log, arguments.threads, lora)
        try:
            asyncio.run(soak(address(process, log), process.pid, list(lora), arguments, tally))
            os.kill(process.pid, signal.SIGTERM)
            if (code := process.wait(120)) != 0:
                tally.fail(f"exit code {code}")
        finally:
            process.kill()
            process.wait()
        text = log.read_text(errors="replace")
        for line in re.findall(r"^.*(?:Traceback|ERROR|failed).*$", text, re.MULTILINE)[:5]:
            tally.fail(f"log: {line}")
    result = report(tally, time.monotonic() - begin)
    if arguments.json:
        print(json.dumps(result, indent=1))
    else:
        from rich.console import Console
        from rich.table import Table

        table = Table("soak", "")
        for key, value in result.items():
            table.add_row(key, f"{value:.1f}" if isinstance(value, float) else str(value or "none"))
        Console().print(table)
    sys.exit(3 if tally.problems else 0)


if __name__ == "__main__":
    main()
