"""Every option of the server, with its default: the command line, SECURITY.md and the code take them from here."""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import ipaddress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmc.errors import UsageError

MAX_HEADER_BYTES = 64 << 10
MAX_HEADER_LINES = 100
MAX_NESTING = 64
"""Of the JSON in a request."""
MAX_SEQUENCES_OF_A_REQUEST = 128
"""Prompts times choices."""
MAX_PENDING = 16_384
"""Increments of one stream that wait for its client."""


def _option(default: Any, text: str, **more: Any) -> Any:
    return dataclasses.field(default=default, metadata={"help": text, **more})


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How the server behaves. Times are seconds."""

    # ruff: noqa: RUF009
    host: str = _option("127.0.0.1", "Address to listen on. Other than loopback: needs a key, or --insecure.")
    port: int = _option(8000, "Port to listen on; 0 takes a free one.", bounds=(0, 65535))
    api_key: tuple[str, ...] = _option((), "Key that clients must send. Repeatable; visible in lists of processes.")
    api_key_file: Path | None = _option(None, "File with one key a line.")
    insecure: bool = _option(False, "Listen on any address without a key.")
    allowed_host: tuple[str, ...] = _option((), "Name that the Host header may have. Repeatable.")
    allowed_origin: tuple[str, ...] = _option((), "Origin whose web pages may send requests. Repeatable.")
    max_queue: int = _option(256, "Sequences that may wait beyond those that can run; then 429.", bounds=(0, 1 << 20))
    queue_timeout: float = _option(300.0, "After this time in the queue a request ends with 503.")
    request_timeout: float = _option(600.0, "After this time a request ends with 504, or an error event.")
    drain_timeout: float = _option(30.0, "How long running requests may take after SIGTERM.")
    stall_timeout: float = _option(30.0, "Not ready once a step of the engine takes longer.")
    header_timeout: float = _option(10.0, "For the head of a request to come in.")
    body_timeout: float = _option(30.0, "For the body of a request to come in.")
    send_timeout: float = _option(30.0, "A client that reads nothing for so long is dropped.")
    keep_alive: float = _option(30.0, "How long idle connections stay.")
    max_connections: int = _option(1024, "Connections at one time; more get 503.", bounds=(1, 1 << 20))
    max_body_mb: float = _option(2.0, "Size of a request's body, in MB; then 413.")
    tool_parser: str | None = _option(None, "Format of calls of functions. [default: by the chat template]")
    admin_listen: str | None = _option(None, "HOST:PORT of a listener for pause, resume, reload, cache reset.")
    admin_api_key: str | None = _option(None, "Its key; required with --admin-listen.")
    reload_in_place: bool = _option(
        False,
        "A reload ends the old engine before it loads the new one, for devices without room for two; new requests get "
        "503 meanwhile. An engine that hangs for --stall-timeout stays.",
    )
    otel: bool = _option(False, "Send spans of requests by OTLP, to where the standard OTEL_* variables say.")
    log_format: str = _option("plain", "plain or json: a line for each request, without prompts.")
    log_level: str = _option("info", "error, warning, info or debug.")

    def __post_init__(self) -> None:
        for f in dataclasses.fields(self):
            value = getattr(self, f.name)
            name = "--" + f.name.replace("_", "-")
            if isinstance(value, float) and not 0 < value <= 1e6:
                raise UsageError(f"{name}: {value} is not more than 0 and at most 1000000")
            if "bounds" in f.metadata and not f.metadata["bounds"][0] <= value <= f.metadata["bounds"][1]:
                raise UsageError(f"{name}: {value} is not in {f.metadata['bounds'][0]} to {f.metadata['bounds'][1]}")
        for name, known in (("log_format", ("plain", "json")), ("log_level", ("error", "warning", "info", "debug"))):
            if getattr(self, name) not in known:
                raise UsageError(f"--{name.replace('_', '-')}: {getattr(self, name)!r} is none of {', '.join(known)}")

    @property
    def max_body_bytes(self) -> int:
        """The same in bytes."""
        return int(self.max_body_mb * 1_000_000)


class Keys:
    """API keys, kept as digests and compared in constant time: all of them, whichever fits.

    Raises:
        UsageError: a key is empty, or the file can't be read or has none.
    """

    def __init__(self, keys: tuple[str, ...], file: Path | None = None) -> None:
        listed = list(keys)
        if file is not None:
            try:
                lines = [line.strip() for line in file.read_text(encoding="utf-8").splitlines()]
            except (OSError, UnicodeDecodeError) as problem:
                raise UsageError(f"--api-key-file {file}: can't be read ({problem})") from None
            found = [line for line in lines if line]
            if not found:
                raise UsageError(f"--api-key-file {file}: has no key")
            listed += found
        if any(not key.strip() for key in listed):
            raise UsageError("--api-key: an empty key would let everybody in; leave it out for no key")
        self._digests = [hashlib.sha256(key.encode()).digest() for key in listed]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def find(self, key: bytes) -> str | None:
        """A name for the key that fits, which does not give it away; None if none does."""
        digest, found = hashlib.sha256(key).digest(), None
        for known in self._digests:
            if hmac.compare_digest(known, digest):
                found = hashlib.sha256(b"llmc key\0" + known).hexdigest()[:32]
        return found


def is_loopback(host: str) -> bool:
    """Whether a listener on this address is reached from this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_exposure(host: str, keys: Keys, insecure: bool, option: str = "--api-key") -> None:
    """Refuse to serve the network without a key.

    Raises:
        UsageError: it would.
    """
    if not (is_loopback(host) or keys or insecure):
        raise UsageError(f"{host} can be reached from other machines: set {option}, or --insecure to serve everybody")
