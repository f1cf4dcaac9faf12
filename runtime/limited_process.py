"""Work that a hostile input could make endless, huge or fatal, in a process of its own with limits.

Messages are JSON, each behind its length (4 bytes, little endian), on stdin and stdout of ``python -m MODULE``. The
first message sets the process up; then comes one answer for each message.
"""

from __future__ import annotations

import json
import os
import resource
import selectors
import signal
import struct
import subprocess
import sys
import time
from typing import Any, BinaryIO

START_SECONDS = 60.0
"""For Python to start and import what it needs."""

WAIT_SECONDS = 60.0
"""For an answer. Processor time is limited by the process itself; this is for a machine under load."""

MAX_SECONDS = 2.0
"""Processor time for one answer; the process is ended by a signal after that."""


class LimitedProcess:
    """The process that ``python -m module`` is; starts at once. Not for several threads at once."""

    def __init__(self, module: str, setup: Any) -> None:
        self.ended: int | None = None
        """The exit code after a failure; negative: the signal. None: it did not answer."""
        self._process: subprocess.Popen[bytes] | None = subprocess.Popen(
            [sys.executable, "-P", "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,  # Ctrl-C is for this process
        )
        self.first = self.ask(setup, START_SECONDS)

    @property
    def alive(self) -> bool:
        """Whether it takes another message."""
        return self._process is not None

    def ask(self, message: Any, seconds: float = WAIT_SECONDS) -> dict[str, Any] | None:
        """The answer to a message; None if the process ended (see ``ended``) or the time is over: then it is gone.

        Raises:
            TypeError, ValueError: the message is not JSON.
        """
        process = self._process
        assert process is not None, "it has ended"
        data = json.dumps(message).encode()
        answer: dict[str, Any] | None = None
        try:
            answer = _exchange(process, struct.pack("<I", len(data)) + data, time.monotonic() + seconds)
        finally:
            if answer is None:  # also when interrupted: the next request must not read this one's answer
                self.ended = process.poll()
                self.stop()
        return answer

    def why(self) -> str:
        """What happened when there was no answer."""
        ended = {
            -signal.SIGPROF: f"needed more than {MAX_SECONDS:g} s",
            -signal.SIGABRT: "needed more memory than allowed",
            None: "did not answer",
        }
        return ended.get(self.ended, "ended its process")

    def stop(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()

    def __del__(self) -> None:
        if getattr(self, "_process", None) is not None:
            self.stop()


def _exchange(worker: subprocess.Popen[bytes], data: bytes, deadline: float) -> dict[str, Any] | None:
    """Send and receive; None if the worker ends or the deadline passes."""
    assert worker.stdin is not None and worker.stdout is not None, "the worker has pipes"
    unsent, received = memoryview(data), bytearray()
    with selectors.DefaultSelector() as selector:
        selector.register(worker.stdin, selectors.EVENT_WRITE)
        selector.register(worker.stdout, selectors.EVENT_READ)
        while len(received) < 4 or len(received) < 4 + int.from_bytes(received[:4], "little"):
            events = selector.select(max(0.0, deadline - time.monotonic()))
            if not events:
                return None
            for key, _ in events:
                if key.fileobj is worker.stdin:
                    try:
                        unsent = unsent[worker.stdin.write(unsent[:4096]) :]
                    except BrokenPipeError:
                        return None
                    if not unsent:
                        selector.unregister(worker.stdin)
                elif chunk := worker.stdout.read(1 << 16):
                    received += chunk
                else:
                    worker.wait(5)
                    return None
    answer: dict[str, Any] = json.loads(received[4:])
    return answer


# -- in the process ----------------------------------------------------------------------------------------------------


def read(stream: BinaryIO) -> Any:
    """One message, or None at the end, also if that comes in the middle of one: who wrote it has been killed."""
    header = stream.read(4)
    size = struct.unpack("<I", header)[0] if len(header) == 4 else 0
    body = stream.read(size)
    return json.loads(body) if size and len(body) == size else None


def write(stream: BinaryIO, message: Any) -> None:
    """One answer; what comes next has its own time."""
    data = json.dumps(message).encode()
    unsent = memoryview(struct.pack("<I", len(data)) + data)
    try:
        while unsent:  # with PYTHONUNBUFFERED the stream takes a part
            unsent = unsent[stream.write(unsent) :]
        stream.flush()
    except BrokenPipeError:  # whoever asked has been killed; an ordinary exit would try to write again, and complain
        os._exit(0)
    signal.setitimer(signal.ITIMER_PROF, 0)


def start_clock() -> None:
    """From here to the answer, MAX_SECONDS of processor time."""
    signal.setitimer(signal.ITIMER_PROF, MAX_SECONDS)


def limit_memory(size: int) -> None:
    """Allow ``size`` bytes of address space beyond what the process has now, and no core files."""
    with open("/proc/self/statm", "rb") as file:
        have = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (have + size, have + size))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
