"""Workers end without a word when the process that asked them is killed, wherever they are."""

from __future__ import annotations

import json
import struct
import subprocess
import sys

import pytest

WORKERS = ("llmc.runtime.template_worker", "llmc.runtime.constraints.worker")


def start(module: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-P", "-m", module]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe)


def message(value: object) -> bytes:
    data = json.dumps(value).encode()
    return struct.pack("<I", len(data)) + data


@pytest.mark.parametrize("module", WORKERS)
@pytest.mark.parametrize("sent", [0, 2, 4, 10])
def test_killed_while_it_asks(module: str, sent: int) -> None:
    worker = start(module)
    _, errors = worker.communicate(message("x" * 100)[:sent], timeout=120)
    assert (worker.returncode, errors) == (0, b"")


def test_killed_while_the_answer_comes() -> None:
    worker = start(WORKERS[0])
    assert worker.stdin is not None and worker.stdout is not None and worker.stderr is not None
    worker.stdin.write(message("{{ 'x' * 1000000 }}"))
    worker.stdin.flush()
    size = struct.unpack("<I", worker.stdout.read(4))[0]
    assert json.loads(worker.stdout.read(size)) == {"text": ""}
    worker.stdin.write(message({}))
    worker.stdin.flush()
    worker.stdout.read(4)  # more than a pipe holds is on its way
    worker.stdout.close()
    assert worker.wait(120) == 0
    assert worker.stderr.read() == b""
    worker.stdin.close()
    worker.stderr.close()
