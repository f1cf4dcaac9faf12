"""The thread that owns an LLM: takes requests in between steps, hands increments to the event loop."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from llmc.errors import RequestError
from llmc.runtime.output import Delta, request_output
from llmc.runtime.request import FinishReason, Request
from llmc.runtime.server.errors import ApiError, from_request_error, overloaded
from llmc.runtime.server.job import SHOWN, Job, Ticket, Update

if TYPE_CHECKING:
    from llmc.runtime.llm import LLM

IDLE_SECONDS = 1.0
"""How often an idle thread shows that it is alive."""

MAX_FAILED_STEPS = 8
"""In a row: after that the engine is taken for broken, not the requests."""

log = logging.getLogger("llmc.serve")


class EngineLoop:
    """Runs an LLM in a thread of its own. All methods are for the event loop's thread, and none waits.

    Args:
        llm: from now on only the thread touches it.
        events: the event loop that gets the news.
        max_queue: sequences that may wait beyond those that can run.
        on_failure: called on the event loop if the thread ends though nobody asked.
    """

    def __init__(
        self, llm: LLM, events: asyncio.AbstractEventLoop, max_queue: int, on_failure: Callable[[], None]
    ) -> None:
        self.llm, self.failed, self.paused = llm, False, False
        self._events, self._on_failure = events, on_failure
        self._capacity = llm.scheduler.config.max_sequences + max_queue
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._tickets: dict[int, tuple[Ticket, Request]] = {}
        self._new: set[int] = set()
        self._outstanding: dict[Ticket, None] = {}
        self._stopping, self._held, self._failed_steps, self._turned = False, False, 0, time.monotonic()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    # -- for the event loop -------------------------------------------------------------------------------------------

    @property
    def outstanding(self) -> int:
        """Sequences that are queued or run."""
        return sum(ticket.sequences for ticket in self._outstanding)

    @property
    def idle(self) -> bool:
        """Whether there is no request."""
        return not self._outstanding

    def is_alive(self, stall_timeout: float) -> bool:
        """Whether the thread has turned lately."""
        return not self.failed and self._thread.is_alive() and time.monotonic() - self._turned < stall_timeout

    def submit(self, job: Job) -> None:
        """Queue all prompts of a job.

        Raises:
            ApiError: 429, the queue is full.
        """
        sequences = sum(ticket.sequences for ticket in job.tickets)
        if self._outstanding and self.outstanding + sequences > self._capacity:
            raise overloaded("too many requests are waiting; try again later")
        for ticket in job.tickets:
            self._outstanding[ticket] = None
            self._inbox.put(lambda ticket=ticket: self._add(ticket))  # type: ignore[misc]

    def abort(self, ticket: Ticket) -> None:
        """End a request at any moment."""
        self._inbox.put(lambda: self._abort(ticket))

    def pause(self, paused: bool) -> None:
        """Stop between two steps, or go on with all that was submitted before."""
        self.paused = paused
        self._inbox.put(lambda: self._hold(paused))

    def call(self, action: Callable[[LLM], None]) -> None:
        """Have the thread do something between two steps."""
        self._inbox.put(lambda: action(self.llm))

    def fail_all(self, problem: ApiError) -> None:
        """End all requests."""
        for ticket in list(self._outstanding):
            ticket.job.end(problem)

    async def stop(self) -> None:
        """End the thread."""
        self._stopping = True
        self._inbox.put(lambda: None)
        await asyncio.to_thread(self._thread.join, 5.0)
        self.llm.close()

    def _deliver(self, updates: list[Update]) -> None:
        for update in updates:
            if update.released:
                update.ticket.released = True
                self._outstanding.pop(update.ticket, None)
            update.ticket.job.receive(update)

    def _ended(self, problem: ApiError) -> None:
        self.failed = True
        for ticket in list(self._outstanding):
            self._deliver([Update(ticket, problem=problem, released=True)])
        self._on_failure()

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._turned = time.monotonic()
                self._take()
                if self.llm.has_unfinished and not self._held:
                    begin = time.monotonic()
                    deltas = self.llm.step()
                    self._report_started(begin)
                    self._publish(deltas, begin)
        except Exception:
            log.exception("the engine's thread failed")
        if not self._stopping:
            self._tell(self._ended, ApiError(500, "the engine has failed", code="engine_failed"))

    def _take(self) -> None:
        """Do what the inbox holds; wait for it if there is nothing else to do."""
        wait = self._held or not self.llm.has_unfinished
        try:
            while True:
                action = self._inbox.get(timeout=IDLE_SECONDS) if wait else self._inbox.get_nowait()
                wait = False
                action()
        except queue.Empty:
            pass

    def _hold(self, held: bool) -> None:
        self._held = held

    def _add(self, ticket: Ticket) -> None:
        try:
            ticket.request_id = self._queue(ticket)
        except RequestError as problem:
            self._send(Update(ticket, problem=from_request_error(problem), released=True))
            return
        ticket.request = self.llm.request(ticket.request_id)
        self._tickets[ticket.request_id] = (ticket, ticket.request)
        self._new.add(ticket.request_id)
        self._send(Update(ticket, accepted=True))

    def _queue(self, ticket: Ticket) -> int:
        options = ticket.options
        if options.pooling is not None:
            return self.llm.add_embedding(ticket.prompt, options.pooling, salt=options.salt, adapter=options.adapter)
        return self.llm.add_request(
            ticket.prompt,
            ticket.params,
            chat=options.chat,
            salt=options.salt,
            adapter=options.adapter,
            constraint=options.constraint,
            priority=options.priority,
        )

    def _abort(self, ticket: Ticket) -> None:
        if ticket.request_id is not None and self._tickets.pop(ticket.request_id, None) is not None:
            self._new.discard(ticket.request_id)
            self.llm.abort(ticket.request_id)
            self._send(Update(ticket, released=True))

    def _report_started(self, begin: float) -> None:
        """Once for each request: it has left the queue."""
        started = [i for i in self._new if any(s.num_computed for s in self._tickets[i][1].sequences)]
        for request_id in started:
            self._new.discard(request_id)
            self._send(Update(self._tickets[request_id][0], started=True, at=begin))

    def _publish(self, deltas: list[Delta], begin: float) -> None:
        grouped: dict[int, list[Delta]] = {}
        for delta in deltas:
            grouped.setdefault(delta.request_id, []).append(delta)
        updates = []
        for request_id, group in grouped.items():
            ticket, request = self._tickets[request_id]
            output = request_output(request) if request.finished else None
            if output is not None:
                del self._tickets[request_id]
                self._new.discard(request_id)
            updates.append(Update(ticket, tuple(group), output=output, released=output is not None, at=begin))
        if updates:
            self._tell(self._deliver, updates)
        self._watch_failures(deltas)

    def _watch_failures(self, deltas: list[Delta]) -> None:
        """One step that fails is the fault of its requests; many in a row are the device's."""
        if not deltas:
            return
        failed = [d for d in deltas if d.finish_reason is FinishReason.ERROR and not (d.error or "").startswith(SHOWN)]
        for delta in failed:
            log.error("a step failed: %s", delta.error)
        self._failed_steps = self._failed_steps + 1 if len(failed) == len(deltas) else 0
        if self._failed_steps >= MAX_FAILED_STEPS:
            raise RuntimeError(f"{MAX_FAILED_STEPS} steps in a row have failed")

    def _send(self, update: Update) -> None:
        self._tell(self._deliver, [update])

    def _tell(self, function: Callable[..., None], *arguments: object) -> None:
        if not self._events.is_closed():
            self._events.call_soon_threadsafe(function, *arguments)
