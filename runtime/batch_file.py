"""`llmc run --input requests.jsonl --output results.jsonl`: many requests, one result a line, in their order."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Self

import click

from llmc.errors import RequestError, ResourceError, UsageError
from llmc.runtime import strict
from llmc.runtime.output import RequestOutput, request_output
from llmc.runtime.request import SamplingParams
from llmc.runtime.terminal import INTERRUPTED

if TYPE_CHECKING:
    from llmc.runtime.llm import LLM

AHEAD = 4
"""Requests that are read ahead, times the sequences that run at one time."""


def run_file(llm: LLM, input_file: str, output_file: str | None, defaults: Mapping[str, Any]) -> int:
    """Run every line of a file; a line that can't be run has its error in its place. Returns the exit code.

    The results replace ``output_file`` when all are there. After an interruption, the finished ones are in a file
    beside it, whose name is printed.
    """
    if output_file not in (None, "-") and input_file == output_file:
        raise UsageError("--input and --output are the same file")
    with _opened(input_file) as (lines, total), _results(output_file) as out, _Progress(total) as progress:
        try:
            for record in run_lines(llm, lines, defaults):
                out.write((json.dumps(record, ensure_ascii=False) + "\n").encode())
                out.flush()
                progress.count("error" in record or any("error" in c for c in record["choices"]))
        except KeyboardInterrupt:
            progress.stop()
            _keep(out, progress.done)
            return INTERRUPTED
        except BrokenPipeError:  # who reads the results has enough
            raise
        except OSError as problem:
            raise ResourceError(f"{output_file or 'stdout'}: can't be written ({problem.strerror})") from None
        progress.stop()
        if output_file not in (None, "-"):
            _publish(out, Path(str(output_file)))
    click.echo(f"{progress.done} requests, {progress.failed} failed", err=True)
    return 1 if progress.failed else 0


def run_lines(llm: LLM, lines: Iterable[bytes], defaults: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """One record for each line that is not blank, in order; as many in flight as the engine takes."""
    queue: list[_Entry] = []
    numbered = enumerate(line for line in lines if line.strip())
    ahead = AHEAD * llm.scheduler.config.max_sequences
    try:
        while True:
            while len(queue) < ahead and (item := next(numbered, None)) is not None:
                queue.append(_submit(llm, *item, defaults))
            if not queue:
                return
            llm.step()
            for entry in queue:
                entry.collect()
            while queue and queue[0].record is not None:
                yield queue.pop(0).record  # type: ignore[misc]
    finally:
        for entry in queue:
            if entry.request is not None:
                llm.abort(entry.request.id)


@dataclass
class _Entry:
    """A line on its way."""

    head: dict[str, Any]
    request: Any = None
    record: dict[str, Any] | None = field(default=None)

    def collect(self) -> None:
        """Make the record if the request has ended."""
        if self.record is None and self.request.finished:
            result: RequestOutput = request_output(self.request)
            self.record = self.head | result.to_json()


def _submit(llm: LLM, index: int, line: bytes, defaults: Mapping[str, Any]) -> _Entry:
    head: dict[str, Any] = {"index": index}
    try:
        values = _parse(line)
        if "id" in values:
            head["id"] = values.pop("id")
        request_id = _add(llm, values, defaults)
    except RequestError as problem:
        error: dict[str, Any] = {"message": str(problem)}
        if problem.field is not None:
            error["field"] = problem.field
        return _Entry(head, record=head | {"error": error})
    return _Entry(head, llm.request(request_id))


def _parse(line: bytes) -> dict[str, Any]:
    values = strict.parse_json(line, "line", RequestError)
    if not isinstance(values, dict):
        raise RequestError("expected an object with prompt or messages")
    return values


def _add(llm: LLM, values: dict[str, Any], defaults: Mapping[str, Any]) -> int:
    given = [name for name in ("prompt", "token_ids", "messages") if values.get(name) is not None]
    if len(given) != 1:
        raise RequestError(
            f"exactly one of prompt, token_ids and messages is needed, found {', '.join(given) or 'none'}"
        )
    sources = {name: values.pop(name, None) for name in ("prompt", "token_ids", "messages", "tools")}
    prompt = sources[given[0]]
    params = SamplingParams.from_mapping({**defaults, **{k: v for k, v in values.items() if v is not None}})
    if given == ["messages"]:
        return llm.add_chat(prompt, params, tools=sources["tools"])
    if sources["tools"] is not None:
        raise RequestError("only for messages", "tools")
    if given == ["token_ids"] and not isinstance(prompt, list):
        raise RequestError("expected a list of token ids", "token_ids")
    if not isinstance(prompt, str | list):
        raise RequestError("expected a text or a list of token ids", "prompt")
    return llm.add_request(prompt, params)


# -- files ---------------------------------------------------------------------------------------------------------


@contextmanager
def _opened(name: str) -> Iterator[tuple[IO[bytes], int | None]]:
    """The input, and how many requests it has if that can be known."""
    if name == "-":
        yield sys.stdin.buffer, None
        return
    try:
        file = open(name, "rb")  # noqa: SIM115 - closed below
    except OSError as problem:
        raise UsageError(f"{name}: can't be read ({problem.strerror})") from None
    with file:
        total = None
        if file.seekable():
            total = sum(1 for line in file if line.strip())
            file.seek(0)
        yield file, total


def _results(name: str | None) -> AbstractContextManager[IO[bytes]]:
    """Where results are collected: stdout, or a new file beside the one that they will replace."""
    if name in (None, "-"):
        return nullcontext(sys.stdout.buffer)
    path = Path(str(name))
    try:
        return tempfile.NamedTemporaryFile(
            "wb", dir=path.parent, prefix=f".{path.name}.", suffix=".partial", delete=False
        )
    except OSError as problem:
        raise UsageError(f"{path}: can't be written ({problem.strerror})") from None


def _publish(out: IO[bytes], path: Path) -> None:
    out.flush()
    os.fsync(out.fileno())
    umask = os.umask(0)
    os.umask(umask)
    os.chmod(out.name, 0o666 & ~umask)
    os.replace(out.name, path)


def _keep(out: IO[bytes], done: int) -> None:
    where = "" if out is sys.stdout.buffer else f"; they are in {out.name}"
    click.echo(f"interrupted after {done} results{where}", err=True)


class _Progress:
    """A bar on a terminal, else a line every few seconds; on stderr."""

    EVERY = 10.0
    """Seconds between lines."""

    def __init__(self, total: int | None) -> None:
        self.total, self.done, self.failed = total, 0, 0
        self._bar: Any = None
        self._task: Any = None
        self._last = time.monotonic()

    def __enter__(self) -> Self:
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import Progress

            self._bar = Progress(console=Console(stderr=True), transient=True)
            self._task = self._bar.add_task("requests", total=self.total)
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def count(self, failed: bool) -> None:
        """One more is done."""
        self.done += 1
        self.failed += failed
        if self._bar is not None:
            self._bar.advance(self._task)
        elif time.monotonic() - self._last >= self.EVERY:
            self._last = time.monotonic()
            click.echo(f"{self.done} of {self.total or '?'} requests", err=True)

    def stop(self) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
