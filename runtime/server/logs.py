"""Logs of the server: lines on stderr, plain or JSON, without prompts; nobody ever waits for them."""

from __future__ import annotations

import json
import logging
import logging.handlers
import queue
import sys
import time
from typing import Any

QUEUE = 10_000
"""Records that wait for a stderr that nobody reads; the rest is dropped and counted."""


class Logs:
    """From creation to `close`, the loggers of the server write here; ``dropped``: records that could not be."""

    def __init__(self, style: str, level: str) -> None:
        self.dropped = 0
        self._records: queue.Queue[Any] = queue.Queue(QUEUE)
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(_Json() if style == "json" else _Plain())
        handler.handleError = self._drop  # type: ignore[method-assign]
        sender = logging.handlers.QueueHandler(self._records)
        sender.handleError = self._drop  # type: ignore[method-assign]
        sender.prepare = lambda record: record  # type: ignore[method-assign]
        self._listener = logging.handlers.QueueListener(self._records, handler)
        for name, least in (("llmc.serve", level.upper()), ("uvicorn.error", "ERROR")):
            logger = logging.getLogger(name)
            logger.handlers, logger.propagate = [sender], False
            logger.setLevel(least)
        self._listener.start()

    def close(self) -> None:
        """Write what waits."""
        self._listener.stop()

    def _drop(self, record: logging.LogRecord) -> None:
        """The disk is full, stderr is closed or not read: requests are more important."""
        self.dropped += 1


class _Plain(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        begin = f"{time.strftime('%H:%M:%S', time.localtime(record.created))} {record.levelname.lower()}"
        fields = " ".join(f"{name}={value}" for name, value in _fields(record).items())
        return " ".join(part for part in (begin, record.getMessage(), fields, _trace(record)) if part)


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": round(record.created, 3),
            "level": record.levelname.lower(),
            "message": record.getMessage(),
            **_fields(record),
        }
        trace = _trace(record)
        return json.dumps(line | {"trace": trace} if trace else line)


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    return getattr(record, "fields", {})


def _trace(record: logging.LogRecord) -> str:
    """Where an exception came from: files and lines. Its message may hold what a client sent, and is left out."""
    if record.exc_info is None or record.exc_info[1] is None:
        return ""
    kind, places, frame = type(record.exc_info[1]).__name__, [], record.exc_info[2]
    while frame is not None:
        places.append(f"{frame.tb_frame.f_code.co_filename.rpartition('/')[2]}:{frame.tb_lineno}")
        frame = frame.tb_next
    return f"{kind} at {' > '.join(places)}"
