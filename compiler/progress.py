"""Tells people how far a build is: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any, Self


class Progress:
    """Steps with a name, one after the other; a step may count. This one keeps the times and shows nothing."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._name = ""
        self._started = 0.0

    def step(self, name: str, total: int | None = None, unit: str = "bytes") -> None:
        """Begin the next step; ``total``: bytes, or whatever ``unit`` names, that it will report."""
        self._end()
        self._name, self._started = name, time.monotonic()

    def advance(self, count: int) -> None:
        """So many more are done."""

    def note(self, text: str) -> None:
        """Something that the user should know."""

    def _end(self) -> None:
        if self._name:
            self.seconds[self._name] = self.seconds.get(self._name, 0.0) + time.monotonic() - self._started
        self._name = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._end()


REPORT_SECONDS = 15.0
"""How often plain lines say how far a long step is."""


class PlainProgress(Progress):
    """One line for each step, on stderr; for long ones, now and then, how far they are and how long they will take."""

    def __init__(self) -> None:
        super().__init__()
        self._total: int | None = None
        self._done = 0
        self._reported = 0.0

    def step(self, name: str, total: int | None = None, unit: str = "bytes") -> None:
        """Print the step."""
        super().step(name, total, unit)
        self._total, self._done, self._reported = total, 0, self._started
        size = "" if total is None else f" ({format_bytes(total) if unit == 'bytes' else f'{total} {unit}'})"
        print(f"{name}{size}", file=sys.stderr, flush=True)

    def advance(self, count: int) -> None:
        """Print how far it is, if the last line is a while ago."""
        self._done += count
        now = time.monotonic()
        if self._total and 0 < self._done < self._total and now - self._reported > REPORT_SECONDS:
            self._reported = now
            left = (now - self._started) * (self._total - self._done) / self._done
            share = 100 * self._done // self._total
            print(f"{self._name}: {share} %, about {format_seconds(left)} left", file=sys.stderr, flush=True)

    def note(self, text: str) -> None:
        """Print the note."""
        print(f"note: {text}", file=sys.stderr, flush=True)


class BarProgress(Progress):
    """A bar on the terminal, on stderr; it disappears at the end."""

    def __init__(self) -> None:
        super().__init__()
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            Progress,
            SpinnerColumn,
            TaskProgressColumn,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )

        text = TextColumn("{task.description}")
        columns = (SpinnerColumn(), text, BarColumn(), TaskProgressColumn(), TimeElapsedColumn(), TimeRemainingColumn())
        self._bar: Any = Progress(*columns, console=Console(stderr=True), transient=True)
        self._task: Any = None

    def step(self, name: str, total: int | None = None, unit: str = "bytes") -> None:
        """Show a new bar; it pulses where the size is not known."""
        super().step(name, total, unit)
        if self._task is not None:
            self._bar.remove_task(self._task)
        self._task = self._bar.add_task(name, total=total)

    def advance(self, count: int) -> None:
        """Move the bar."""
        self._bar.advance(self._task, count)

    def note(self, text: str) -> None:
        """Print the note above the bar."""
        self._bar.console.print(f"note: {text}", markup=False, highlight=False)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, traceback)
        self._bar.stop()


def progress_for(quiet: bool) -> Progress:
    """What fits the place where stderr goes."""
    if quiet:
        return Progress()
    return BarProgress() if sys.stderr.isatty() else PlainProgress()


def format_seconds(count: float) -> str:
    """A time for people: 40 s, 3 min, 1.5 h."""
    if count < 90:
        return f"{count:.0f} s"
    return f"{count / 60:.0f} min" if count < 5400 else f"{count / 3600:.1f} h"


def format_bytes(count: float) -> str:
    """A size for people: 268.5 MB (powers of 1000)."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"
