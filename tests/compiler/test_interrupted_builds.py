"""`llmc build` killed, interrupted, not alone or out of disk, at moments spread over all of its steps."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from checkpoints import write_llama

from llmc.__main__ import INTERRUPTED
from llmc.compiler import api
from llmc.compiler.api import build_engine
from llmc.errors import ResourceError
from llmc.runtime.engine import load_engine

STEPS = 8
"""Lines that a build prints."""

FORKS = """
    import os, sys
    from llmc.__main__ import cli, main

    cli.main(["build", sys.argv[1], "--dry-run", "--quiet", "--json"], standalone_mode=False)
    for line in sys.stdin:
        log, *arguments = line.split()
        if log == "wait":
            _, status = os.waitpid(int(arguments[0]), 0)
            print(os.waitstatus_to_exitcode(status), flush=True)
        elif child := os.fork():
            print(child, flush=True)
        else:
            for target, name in ((0, os.devnull), (1, os.devnull), (2, log)):
                os.dup2(os.open(name, os.O_RDWR | os.O_CREAT | os.O_TRUNC), target)
            code = 70
            try:
                main(arguments)
                code = 0
            except SystemExit as end:
                code = end.code or 0
            finally:
                sys.stderr.flush()
                os._exit(code)
"""
"""Runs the command in processes of its own; none has to import and warm up everything anew."""


class Builder:
    """Runs `llmc build` on a model that takes a moment to write."""

    def __init__(self, folder: Path) -> None:
        self.model = write_llama(folder / "model", num_hidden_layers=1, vocab_size=40_000)
        self.logs, self.count = folder, 0
        command = [sys.executable, "-P", "-c", textwrap.dedent(FORKS), str(self.model)]
        self.server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.server.stdout is not None
        for line in self.server.stdout:
            if line == "}\n":  # the end of what the first run prints
                break

    def ask(self, line: str) -> int:
        assert self.server.stdin is not None and self.server.stdout is not None
        print(line, file=self.server.stdin, flush=True)
        return int(self.server.stdout.readline())

    def start(self, target: Path, *options: object) -> Run:
        self.count += 1
        log = self.logs / f"log{self.count}"
        pid = self.ask(" ".join(map(str, (log, "build", self.model, "-o", target, *options))))
        return Run(self, pid, log)


class Run:
    """One command."""

    def __init__(self, builder: Builder, pid: int, log: Path) -> None:
        self.builder, self.pid, self.log = builder, pid, log

    def signal(self, number: int, step: int, delay: float) -> int:
        """Send it so many seconds after it began that step (or ended); returns the exit code."""
        while self.printed().count("\n") < step and not self.ended():
            time.sleep(0.003)
        time.sleep(delay)
        os.kill(self.pid, number)  # it is ours until we have waited for it
        return self.wait()

    def printed(self) -> str:
        return self.log.read_text() if self.log.exists() else ""

    def ended(self) -> bool:
        return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"

    def wait(self) -> int:
        return self.builder.ask(f"wait {self.pid}")


@pytest.fixture(scope="module")
def builder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Builder]:
    builder = Builder(tmp_path_factory.mktemp("builds"))
    yield builder
    with builder.server as server:
        server.kill()


def limit(target: Path) -> int | None:
    """What tells engines apart, of the complete and verified one at this place; None if there is nothing."""
    return load_engine(target).limits.max_seq_len if target.exists() else None


def moments(count: int) -> list[tuple[int, float]]:
    """(step, seconds), each step at least once."""
    chance = random.Random(4)
    return [(i % STEPS + 1, chance.uniform(0, 0.06)) for i in range(count)]


def test_art_04_killed(builder: Builder, tmp_path: Path) -> None:
    """Afterwards there is nothing, the old or the new engine; the next build removes what is left."""
    target = tmp_path / "e"
    kept: int | None = None
    for number, (step, delay) in enumerate(moments(9), start=1):
        code = builder.start(target, "--force", "--max-seq-len", number).signal(signal.SIGKILL, step, delay)
        assert limit(target) in ((number,) if code == 0 else (kept, number))
        kept = limit(target)
        assert set(os.listdir(tmp_path)) <= {"e", ".e.llmc-build", ".e.llmc-lock"}
    last = builder.start(target, "--force", "--max-seq-len", 50)
    assert last.wait() == 0, last.printed()
    assert limit(target) == 50 and os.listdir(tmp_path) == ["e"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_art_04_interrupted(builder: Builder, tmp_path: Path, number: signal.Signals) -> None:
    """As above, and nothing is left that the next build would have to remove."""
    target = tmp_path / "e"
    for step, delay in moments(STEPS)[number == signal.SIGTERM :: 3]:
        shutil.rmtree(target, ignore_errors=True)
        code = builder.start(target, "--max-seq-len", 9).signal(number, step, delay)
        assert code in (0, INTERRUPTED)
        assert limit(target) == 9 if code == 0 else limit(target) in (None, 9)
        assert set(os.listdir(tmp_path)) <= {"e"}


def test_art_04_two_at_once(builder: Builder, tmp_path: Path) -> None:
    runs = [builder.start(tmp_path / "e", "--max-seq-len", 5 + i) for i in range(2)]
    codes = [run.wait() for run in runs]
    assert sorted(codes) == [0, 2]
    assert limit(tmp_path / "e") == 5 + codes.index(0) and os.listdir(tmp_path) == ["e"]
    first, second = (runs[codes.index(code)] for code in (0, 2))
    assert f"process {first.pid} is building this engine now" in second.printed()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 48 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=48m", "none", str(disk)]
    if not shutil.which("mount") or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("may not mount a file system")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_art_04_a_full_disk(builder: Builder, disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The old engine stays, whether it is known before that the new one does not fit, or found while it is written."""
    target = disk / "e"
    build_engine(write_llama(tmp_path / "model", num_hidden_layers=1), target)
    with (disk / "filler").open("wb") as filler:
        os.posix_fallocate(filler.fileno(), 0, shutil.disk_usage(disk).free - (1 << 20))
    with pytest.raises(ResourceError, match="are free"):
        build_engine(builder.model, target, force=True)
    assert limit(target) == 64 and sorted(os.listdir(disk)) == ["e", "filler"]
    monkeypatch.setattr(api, "check_disk", lambda *arguments: None)
    with pytest.raises(ResourceError, match="the disk is full"):
        build_engine(builder.model, target, force=True)
    assert limit(target) == 64 and sorted(os.listdir(disk)) == ["e", "filler"]
