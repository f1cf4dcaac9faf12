"""Chat templates, rendered in a process of their own (template_worker.py)."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

from llmc.errors import RequestError
from llmc.runtime.limited_process import LimitedProcess

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
        self._worker: LimitedProcess | None = None

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
            if self._worker is None or not self._worker.alive:
                self._start()
            worker = self._worker
            assert worker is not None, "it has just been started"
            try:
                return self._answer(worker, worker.ask(context))
            except (TypeError, ValueError) as problem:
                raise RequestError(f"not JSON: {problem}", "messages") from None

    def close(self) -> None:
        """End the worker."""
        with self._lock:
            worker, self._worker = self._worker, None
            if worker is not None:
                worker.stop()

    def _start(self) -> None:
        worker = LimitedProcess("llmc.runtime.template_worker", self.source)
        self._answer(worker, worker.first)
        self._worker = worker

    def _answer(self, worker: LimitedProcess, answer: dict[str, Any] | None) -> str:
        if answer is None:
            raise RequestError(f"the chat template {worker.why()}", "messages")
        if "error" in answer:
            raise RequestError(answer["error"], "messages")
        text: str = answer["text"]
        return text
