r"""llmc serve beside other servers of OpenAI's API, under the same load, in turns: requests/s and time to first token.

    build_scripts/bench_serve_peers.py "llmc=llmc serve ENGINE --port {port}" \
        "llama=llama-server -m MODEL.gguf --port {port} -np 16 -c 8192" [vllm=http://127.0.0.1:8000] [--rounds 3] \
        [-- --requests 48 --rate 4 ...]

Each server is a command with {port} in it, or the address of one that runs; the first is compared with the others. What
follows `--` goes to `llmc bench serve`. Servers that are not being measured are stopped (SIGSTOP), so that they take no
processor time; one that is given by its address is not, and has to be idle then.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from typing import Any

LOAD = ["--requests", "48", "--concurrency", "16", "--input-tokens", "32-256", "--output-tokens", "16-64"]
START_SECONDS = 300.0


@dataclass
class Server:
    """A command that runs, and what was measured with it."""

    name: str
    command: str
    url: str = ""
    process: subprocess.Popen[bytes] | None = None
    reports: list[dict[str, Any]] = field(default_factory=list)

    def start(self) -> None:
        """Start it, and wait until it answers."""
        if self.command.startswith(("http://", "https://")):
            self.url = self.command.rstrip("/")
            if not self._answers():
                sys.exit(f"{self.name}: nothing answers at {self.url}/v1/completions")
            return
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        words = [word.replace("{port}", str(port)) for word in shlex.split(self.command)]
        self.process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, process_group=0)
        end = time.monotonic() + START_SECONDS
        while not self._answers():
            if self.process.poll() is not None or time.monotonic() > end:
                sys.exit(f"{self.name}: {shlex.join(words)} does not serve")
            time.sleep(0.2)

    def signal(self, number: int) -> None:
        """Send it to all processes of the server, if it is ours."""
        if self.process is not None:
            os.killpg(self.process.pid, number)

    def measure(self, load: list[str]) -> None:
        """One round."""
        command = [sys.executable, "-P", "-m", "llmc", "bench", "serve", "--json", "--url"]
        done = subprocess.run([*command, self.url, *load], stdout=subprocess.PIPE)
        if done.returncode:
            sys.exit(f"{self.name} was not measured")
        self.reports.append(json.loads(done.stdout))

    def values(self, name: str, *more: str) -> list[float]:
        """A number of each round."""
        found: list[float] = []
        for report in self.reports:
            value: Any = report
            for key in (name, *more):
                value = value[key]
            found.append(float(value))
        return found

    def _answers(self) -> bool:
        """True once a model can be asked: some list theirs while they still load."""
        try:
            with urllib.request.urlopen(f"{self.url}/v1/models", timeout=5) as answer:
                model = json.load(answer)["data"][0]["id"]
            body = json.dumps({"model": model, "prompt": "a", "max_tokens": 1}).encode()
            asked = urllib.request.Request(f"{self.url}/v1/completions", body, {"Content-Type": "application/json"})
            with urllib.request.urlopen(asked, timeout=60):
                return True
        except (OSError, ValueError, LookupError, urllib.error.URLError):
            return False


def _server(text: str) -> Server:
    """Of NAME=COMMAND or NAME=ADDRESS."""
    name, _, command = text.partition("=")
    try:
        words = shlex.split(command)
    except ValueError as problem:
        raise argparse.ArgumentTypeError(f"{text}: {problem}") from None
    if not name or not words:
        raise argparse.ArgumentTypeError(f"{text}: expected NAME=COMMAND, or NAME=http://HOST:PORT")
    if not command.startswith(("http://", "https://")):
        if "{port}" not in command:
            raise argparse.ArgumentTypeError(f"{text}: the command has no {{port}}")
        if shutil.which(words[0]) is None:
            raise argparse.ArgumentTypeError(f"{text}: there is no command {words[0]}")
    return Server(name, command)


def _rounds(text: str) -> int:
    if not text.isdecimal() or not int(text[:9]) >= 1:
        raise argparse.ArgumentTypeError(f"{text}: expected 1 or more")
    return int(text[:9])


def main() -> None:
    """Run the rounds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("servers", nargs="+", metavar="NAME=COMMAND", type=_server)
    parser.add_argument("--rounds", type=_rounds, default=3)
    own, load = sys.argv[1:], LOAD
    if "--" in own:
        own, load = own[: own.index("--")], own[own.index("--") + 1 :]
    options = parser.parse_args(own)
    servers: list[Server] = options.servers
    try:
        for server in servers:
            server.start()
            server.measure([*load, "--requests", "4", "--seed", "99"])  # warm
            server.reports.clear()
            server.signal(signal.SIGSTOP)
        for number in range(options.rounds):
            for server in servers:
                server.signal(signal.SIGCONT)
                server.measure([*load, "--seed", str(number)])
                server.signal(signal.SIGSTOP)
                print(f"round {number}, load {os.getloadavg()[0]:.1f}: {_line(server, -1)}", flush=True)
    finally:
        for server in servers:
            if server.process is not None:
                with contextlib.suppress(ProcessLookupError):  # it has ended by itself
                    server.signal(signal.SIGKILL)
                server.process.wait()
    _compare(servers)


def _line(server: Server, number: int) -> str:
    rate, first = server.values("requests_per_second")[number], server.values("ttft_ms", "p95")[number]
    return f"{server.name} {rate:.2f} requests/s, p95 to the first text {first:.0f} ms"


def _compare(servers: list[Server]) -> None:
    first = servers[0]
    for other in servers[1:]:
        for label, keys in (("requests/s", ("requests_per_second",)), ("p95 to first text", ("ttft_ms", "p95"))):
            ratios = [a / b for a, b in zip(first.values(*keys), other.values(*keys), strict=True)]
            middle = statistics.median(ratios)
            print(f"{label}: {first.name} / {other.name} = {middle:.2f} ({min(ratios):.2f} to {max(ratios):.2f})")


if __name__ == "__main__":
    main()
