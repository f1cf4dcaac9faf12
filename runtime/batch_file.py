"""`llmc run --input requests.jsonl --output results.jsonl`: many requests, one result a line, in their order.

Results gather in a file beside the output, ``.NAME.partial``, which replaces it in the end. What a run that was
interrupted or killed has left there is not computed again.
"""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Self

import click

from llmc.errors import RequestError, ResourceError, UsageError
from llmc.runtime import strict
from llmc.runtime.batch_openai import is_openai, run_openai
from llmc.runtime.output import RequestOutput, request_output
from llmc.runtime.request import SamplingParams
from llmc.runtime.request_options import RequestOptions
from llmc.runtime.terminal import INTERRUPTED

if TYPE_CHECKING:
    from llmc.runtime.llm import LLM

AHEAD = 4
"""Requests that are read ahead, times the sequences that run at one time."""


def run_file(llm: LLM, input_file: str, output_file: str | None, defaults: Mapping[str, Any]) -> int:
    """Run every line of a file; a line that can't be run has its error in its place. Returns the exit code.

    The results replace ``output_file`` when all are there. After an interruption, the same command goes on.

    Raises:
        UsageError: there are results of another input, or another run is writing them.
        ResourceError: they can't be written.
    """
    if output_file not in (None, "-") and input_file == output_file:
        raise UsageError("--input and --output are the same file")
    with _opened(input_file) as (lines, total), _results(output_file) as out, _Progress(total) as progress:
        requests = (line for line in lines if line.strip())
        if out is not sys.stdout.buffer:
            for record in _done(out, requests):
                progress.count(_failed(record))
            if progress.done:
                click.echo(f"going on after {progress.done} results of an earlier run", err=True)
        try:
            for record in run_lines(llm, requests, defaults, progress.done):
                out.write(to_line(record))
                out.flush()
                progress.count(_failed(record))
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


def to_line(record: Mapping[str, Any]) -> bytes:
    """JSON in UTF-8; half of a surrogate pair, which has none, as an escape of JSON: a later run finds it again."""
    try:
        return json.dumps(record, ensure_ascii=False).encode() + b"\n"
    except UnicodeEncodeError:
        return json.dumps(record).encode() + b"\n"


def run_lines(
    llm: LLM, lines: Iterable[bytes], defaults: Mapping[str, Any], start: int = 0
) -> Iterator[dict[str, Any]]:
    """One record for each line, in order; as many in flight as the engine takes. ``start``: number of the first line.

    The first line tells whether all are of OpenAI's batch format.
    """
    ahead = AHEAD * llm.scheduler.config.max_sequences
    lines = iter(lines)
    if (first := next(lines, None)) is None:
        return
    lines = itertools.chain([first], lines)
    if is_openai(first):
        if defaults:
            raise UsageError(f"lines of OpenAI's batch format have their own values; {', '.join(defaults)}: not here")
        yield from run_openai(llm, lines, start, ahead)
        return
    queue: list[_Entry] = []
    numbered = enumerate(lines, start)
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
    options: RequestOptions = {"adapter": _adapter(llm, values.pop("model", None))} if llm.adapters else {}
    params = SamplingParams.from_mapping({**defaults, **{k: v for k, v in values.items() if v is not None}})
    if given == ["messages"]:
        return llm.add_chat(prompt, params, tools=sources["tools"], **options)
    if sources["tools"] is not None:
        raise RequestError("only for messages", "tools")
    if given == ["token_ids"] and not isinstance(prompt, list):
        raise RequestError("expected a list of token ids", "token_ids")
    if not isinstance(prompt, str | list):
        raise RequestError("expected a text or a list of token ids", "prompt")
    return llm.add_request(prompt, params, **options)


def _adapter(llm: LLM, name: Any) -> str | None:
    """That of a line's model; None: the engine alone."""
    if name is None or name in llm.adapters:
        return name  # type: ignore[no-any-return]
    raise RequestError(f"there is no such adapter; known: {', '.join(llm.adapters)}; or leave it out", "model")


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


@contextmanager
def _results(name: str | None) -> Iterator[IO[bytes]]:
    """Where results are collected: stdout, or a file beside the one that they will replace."""
    if name in (None, "-"):
        yield sys.stdout.buffer
        return
    path = Path(str(name))
    partial = path.with_name(f".{path.name}.partial")
    try:
        file = open(partial, "a+b")  # noqa: SIM115 - closed below
    except OSError as problem:
        raise UsageError(f"{path}: can't be written ({problem.strerror})") from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UsageError(f"{partial}: another run is writing it") from None
        try:
            yield file
        finally:
            if partial.exists() and not partial.stat().st_size:
                partial.unlink()


def _done(out: IO[bytes], requests: Iterator[bytes]) -> Iterator[dict[str, Any]]:
    """The records that are there, each with its request taken; what a kill left half written is cut off."""
    out.seek(0)
    end = 0
    for index, line in enumerate(iter(out.readline, b"")):
        try:
            record = json.loads(line) if line.endswith(b"\n") else None
        except ValueError:
            record = None
        if not isinstance(record, dict):
            break
        request = next(requests, None)
        if request is None or not _belongs(record, index, request):
            raise UsageError(f"{out.name}: result {index} is of another input; go on with that one, or remove the file")
        end += len(line)
        yield record
    out.truncate(end)
    out.seek(end)


def _belongs(record: dict[str, Any], index: int, request: bytes) -> bool:
    """Whether a record is that of a request, by its ids."""
    try:
        values = strict.parse_json(request, "line", RequestError)
    except RequestError:
        values = None
    values = values if isinstance(values, dict) else {}
    if "custom_id" in record:
        return bool(record["id"] == f"batch_req_{index}" and record["custom_id"] == values.get("custom_id"))
    return record.get("index") == index and ("error" in record or record.get("id") == values.get("id"))


def _failed(record: dict[str, Any]) -> bool:
    if "custom_id" in record:
        return bool(record["error"] is not None or record["response"]["status_code"] != 200)
    return "error" in record or any("error" in choice for choice in record["choices"])


def _publish(out: IO[bytes], path: Path) -> None:
    out.flush()
    os.fsync(out.fileno())
    umask = os.umask(0)
    os.umask(umask)
    os.chmod(out.name, 0o666 & ~umask)
    os.replace(out.name, path)


def _keep(out: IO[bytes], done: int) -> None:
    where = "" if out is sys.stdout.buffer else f"; they are in {out.name}, and the same command goes on from there"
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
