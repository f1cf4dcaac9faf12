"""Chat templates, rendered in a process of their own (template_worker.py)."""

from __future__ import annotations

import json
import selectors
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from llmc.errors import RequestError

START_SECONDS = 60.0
"""For Python to start and import Jinja."""

WAIT_SECONDS = 20.0
"""For an answer. Its processor time is limited to 2 s by the worker itself; this is for a machine under load."""

RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt"}) | {
    *("conversation", "chat_template", "tokenize", "continue_final_message", "return_dict", "tokenizer_kwargs")
}
"""Variables that callers can't set by name, and arguments of what renders in transformers, which some take for such.

Neither can they set the special tokens.
"""


class ChatTemplate:
    """A template of a model. Safe to use from several threads; the worker starts on first use and after a failure.

    Args:
        source: Jinja source.
        special_tokens: texts that the template may use, such as bos_token.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self.source, self.special_tokens = source, dict(special_tokens)
        self._lock = threading.Lock()
        self._worker: subprocess.Popen[bytes] | None = None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The text of a chat.

        Raises:
            RequestError: the template refuses the messages, fails, or needs more time, memory or output than allowed.
        """
        for name in variables or {}:
            if name in RESERVED or name in self.special_tokens or name.startswith("_") or not name.isidentifier():
                raise RequestError(f"{name!r} can't be set", "template_variables")
        context = {
            **self.special_tokens,
            **(variables or {}),
            "messages": messages,
            "tools": tools,
            "documents": documents,
            "add_generation_prompt": add_generation_prompt,
        }
        with self._lock:
            if self._worker is None:
                self._start()
            return self._ask(context, WAIT_SECONDS)

    def close(self) -> None:
        """End the worker."""
        with self._lock:
            self._stop()

    def __del__(self) -> None:
        if getattr(self, "_worker", None) is not None:
            self._stop()

    def _start(self) -> None:
        self._worker = subprocess.Popen(
            [sys.executable, "-P", "-m", "llmc.runtime.template_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,  # Ctrl-C is for this process
        )
        self._ask(self.source, START_SECONDS)

    def _stop(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.kill()
            worker.wait()
            for pipe in (worker.stdin, worker.stdout):
                if pipe is not None:
                    pipe.close()

    def _ask(self, message: Any, seconds: float) -> str:
        worker = self._worker
        assert worker is not None and worker.stdin is not None and worker.stdout is not None, "the worker has pipes"
        try:
            data = json.dumps(message).encode()
        except (TypeError, ValueError) as problem:
            raise RequestError(f"not JSON: {problem}", "messages") from None
        answer: dict[str, str] | None = None
        try:
            answer = self._exchange(worker, struct.pack("<I", len(data)) + data, time.monotonic() + seconds)
        finally:
            if answer is None:  # also when interrupted: the next request must not read this one's answer
                code = worker.poll()
                self._stop()
        if answer is None:
            ended = {-signal.SIGPROF: "needed more than 2 s", None: "did not answer"}
            raise RequestError(f"the chat template {ended.get(code, 'ended its process')}", "messages")
        if "error" in answer:
            raise RequestError(answer["error"], "messages")
        return answer["text"]

    def _exchange(self, worker: subprocess.Popen[bytes], data: bytes, deadline: float) -> dict[str, str] | None:
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
        answer: dict[str, str] = json.loads(received[4:])
        return answer
