"""The server process: listeners, signals, draining, and with what it exits."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import signal
import socket
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp

from llmc.errors import ResourceError, UsageError
from llmc.runtime.server.admin import ADMIN_ENDPOINTS, reload_all
from llmc.runtime.server.app import make_app
from llmc.runtime.server.errors import unavailable
from llmc.runtime.server.models import Models
from llmc.runtime.server.protocol import protocol_class
from llmc.runtime.server.settings import Keys, Settings, check_exposure

BACKLOG = 2048
CLOSE_SECONDS = 3
"""For answers that are complete to leave, at the end."""
TURN = 0.05

log = logging.getLogger("llmc.serve")


class Server:
    """Serves models until a signal comes, or an engine fails.

    Raises:
        UsageError: an address can't be used, or would be open to everybody.
    """

    def __init__(self, models: Models, settings: Settings) -> None:
        self._models, self._settings = models, settings
        keys = Keys(settings.api_key, settings.api_key_file)
        check_exposure(settings.host, keys, settings.insecure)
        self._socket = listen(settings.host, settings.port)
        self._listeners = [self._listener(make_app(models, keys, settings, settings.host), self._socket)]
        if settings.admin_listen is not None:
            if settings.admin_api_key is None:
                raise UsageError("--admin-listen needs a key of its own: --admin-api-key")
            host, port = _address(settings.admin_listen)
            admin = make_app(models, Keys((settings.admin_api_key,)), settings, host, ADMIN_ENDPOINTS)
            self._listeners.append(self._listener(admin, listen(host, port)))
        models.on_failure = self._engine_failed
        self._drain: asyncio.Task[None] | None = None
        self._failed = self._aborting = False
        self._tasks: set[asyncio.Task[bool]] = set()

    async def run(self) -> None:
        """Until the end.

        Raises:
            LlmcError: an engine can't be loaded.
            ResourceError: an engine failed, so that nothing can be served any more.
        """
        serving = [asyncio.create_task(server.serve([sock])) for server, sock in self._listeners]
        try:
            with self._signals():
                url = f"http://{_shown(self._settings.host)}:{self._socket.getsockname()[1]}"
                for _, sock in self._listeners[1:]:
                    host, port = sock.getsockname()[:2]
                    log.info("admin: on http://%s:%d", _shown(host), port)
                log.info("listening on %s", url)
                await self._load()
                if self._models.ready:
                    log.info("ready: %s on %s", ", ".join(self._models.all), url)
                await asyncio.gather(*serving)
        finally:
            for server, _ in self._listeners:
                server.should_exit = True
            await asyncio.gather(*serving, return_exceptions=True)
            await self._models.close()
        if self._failed:
            raise ResourceError("an engine has failed; its log says why. Start the server anew")

    async def _load(self) -> None:
        for model in self._models.all.values():
            if not self._models.draining:
                await self._models.load(model)

    def _listener(self, app: ASGIApp, sock: socket.socket) -> tuple[_Uvicorn, socket.socket]:
        config = uvicorn.Config(
            app,
            http=protocol_class(self._settings),
            ws="none",
            lifespan="off",
            loop="asyncio",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            backlog=BACKLOG,
            timeout_keep_alive=self._settings.keep_alive,  # type: ignore[arg-type]
            timeout_graceful_shutdown=CLOSE_SECONDS,
        )
        return _Uvicorn(config), sock

    # -- the end ------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop)
        loop.add_signal_handler(signal.SIGHUP, self._reload)
        try:
            yield
        finally:
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                loop.remove_signal_handler(number)

    def _stop(self) -> None:
        """The first time, let requests end; the second time, end them."""
        if self._drain is None:
            self._models.draining = True
            self._drain = asyncio.create_task(self._drained())
        else:
            self._aborting = True

    async def _drained(self) -> None:
        now = asyncio.get_running_loop().time
        deadline = now() + self._settings.drain_timeout
        log.info("draining for up to %g s", self._settings.drain_timeout)
        while not (self._models.idle or self._aborting or self._failed) and now() < deadline:
            await asyncio.sleep(TURN)
        self._models.end_all(unavailable("the server is shutting down", "draining"))
        for server, _ in self._listeners:
            server.should_exit = True

    def _engine_failed(self) -> None:
        self._failed = True
        if self._drain is None:
            self._stop()

    def _reload(self) -> None:
        task = asyncio.create_task(reload_all(self._models))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class _Uvicorn(uvicorn.Server):
    """Leaves the signals to `Server`."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Nothing."""
        yield


def listen(host: str, port: int) -> socket.socket:
    """A bound socket.

    Raises:
        UsageError: the address is unknown, taken or not allowed.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, kind, protocol)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except OSError as problem:
        raise UsageError(f"{host}:{port}: can't listen there ({problem.strerror or problem})") from None
    return sock


def raise_file_limit() -> None:
    """Each connection is an open file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 1 << 16 if hard == resource.RLIM_INFINITY else min(hard, 1 << 16)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise UsageError(f"--admin-listen {text}: expected HOST:PORT")
    return host.strip("[]"), int(port)


def _shown(host: str) -> str:
    return f"[{host}]" if ":" in host else host
