"""What programs print that people look at."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

INTERRUPTED = 130
"""Exit code after Ctrl-C."""

CONTROLS = {code: "\ufffd" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}
"""Characters that could steer a terminal: a model may write them, and its texts are not to be trusted."""


def show(text: str) -> None:
    """Print a part of generated text at once. On a terminal, control characters appear as U+FFFD."""
    if text:
        sys.stdout.write(text.translate(CONTROLS) if sys.stdout.isatty() else text)
        sys.stdout.flush()


class Interrupt:
    """Whether Ctrl-C was pressed."""

    def __init__(self) -> None:
        self.pressed = False


@contextmanager
def watched_interrupt() -> Iterator[Interrupt]:
    """Ctrl-C sets a flag, to be looked at between steps, instead of ending something half-way."""
    interrupt = Interrupt()
    if threading.current_thread() is not threading.main_thread():
        yield interrupt
        return

    def press(*_: object) -> None:
        interrupt.pressed = True

    before = signal.signal(signal.SIGINT, press)
    try:
        yield interrupt
    finally:
        signal.signal(signal.SIGINT, before)
