"""Writes the tables of SECURITY.md from the code: routes, options with their limits, fields, and fixed limits.

Usage: python build_scripts/security_tables.py    (tests/runtime/server/test_security_page.py says when it is due)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

from llmc.runtime.server import settings
from llmc.runtime.server.admin import ADMIN_ENDPOINTS
from llmc.runtime.server.app import ENDPOINTS
from llmc.runtime.server.guard import OPEN
from llmc.runtime.server.openapi import describe, fields

PAGE = Path(__file__).parents[1] / "SECURITY.md"
BEGIN = "<!-- made by build_scripts/security_tables.py from the code -->\n"

LIMITS = (
    (f"{settings.MAX_HEADER_BYTES >> 10} KiB and {settings.MAX_HEADER_LINES} lines", "head of a request", "431"),
    ("--max-body-mb", "body of a request", "413"),
    (f"{settings.MAX_NESTING} levels", "nesting of JSON", "400"),
    (f"{settings.MAX_SEQUENCES_OF_A_REQUEST}", "prompts times choices of a request", "400"),
    ("--header-timeout, --body-timeout", "time for a request to come in", "408"),
    ("--max-connections", "connections", "503"),
    ("--max-queue", "sequences that wait", "429"),
    ("--queue-timeout", "time in the queue", "503"),
    ("--request-timeout", "time of a request", "504, or an error event"),
    ("--send-timeout", "time without progress of a send", "dropped"),
    (f"{settings.MAX_PENDING}", "increments that wait for a client", "error event"),
)


def tables() -> str:
    """The generated part of the page."""
    return "\n".join([*_routes(), *_limits(), *_options(), *_fields()]) + "\n"


def page() -> str:
    """The whole page."""
    return PAGE.read_text(encoding="utf-8").partition(BEGIN)[0] + BEGIN + tables()


def _routes() -> Iterator[str]:
    yield from ("", "## Routes", "", "| listener | route | key | what |", "|---|---|---|---|")
    for listener, endpoints in (("main", ENDPOINTS), ("--admin-listen", ADMIN_ENDPOINTS)):
        for e in endpoints:
            key = "no" if e.path.encode() in OPEN else "its own" if listener != "main" else "if one is set"
            yield f"| {listener} | `{e.method} {e.path}` | {key} | {e.text} |"


def _limits() -> Iterator[str]:
    yield from ("", "## Limits", "", "| limit | of what | beyond it |", "|---|---|---|")
    for limit, what, answer in LIMITS:
        yield f"| {limit} | {what} | {answer} |"


def _options() -> Iterator[str]:
    yield from ("", "## Options of llmc serve", "", "| option | default | what |", "|---|---|---|")
    for f in dataclasses.fields(settings.Settings):
        default = "" if f.default in (None, (), False) else f.default
        yield f"| `--{f.name.replace('_', '-')}` | {default} | {f.metadata['help']} |"


def _fields() -> Iterator[str]:
    schemas = describe(ENDPOINTS)["components"]["schemas"]
    for e in ENDPOINTS:
        if e.body is not None:
            yield from ("", f"## Fields of {e.path}", "", "| field | accepted | note |", "|---|---|---|")
            for name, accepted, note in fields(schemas[e.body.__name__], schemas):
                yield f"| `{name}` | {accepted} | {note} |"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
