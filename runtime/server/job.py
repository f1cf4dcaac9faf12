"""An HTTP request on its way through the engine, as the event loop sees it."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from llmc.runtime.output import Delta, RequestOutput
from llmc.runtime.request import FinishReason, SamplingParams
from llmc.runtime.server.errors import ApiError, unavailable
from llmc.runtime.server.settings import MAX_PENDING

if TYPE_CHECKING:
    from llmc.runtime.constraints import TokenConstraint
    from llmc.runtime.request import Request
    from llmc.runtime.server.metrics import Metrics

SHOWN = ("the model computed logits that are not finite", "no token is allowed")
"""Errors of the engine that clients are told as they are; all others may hold what is none of their business."""


@dataclass(frozen=True)
class TicketOptions:
    """``salt``: who shares the prefix cache. ``pooling``: an embedding is wanted, not a text.

    ``adapter``: that of the model, by name. ``constraint``: that of the parameters, compiled. ``priority``: a lower one
    is served earlier. ``timeout``: seconds until the answer is given up, unless the server's own are fewer.
    """

    chat: bool = False
    streams: bool = False
    salt: str = ""
    adapter: str | None = None
    pooling: str | None = None
    constraint: TokenConstraint | None = None
    priority: int = 0
    timeout: float | None = None


@dataclass(eq=False)
class Ticket:
    """One prompt of a job. The engine's thread sets ``request_id`` and ``request``; the rest is the event loop's."""

    job: Job
    index: int
    prompt: list[int]
    params: SamplingParams
    options: TicketOptions
    request_id: int | None = None
    request: Request | None = None
    """Of the engine; what it says of the prompt is final once the first increment has come."""
    accepted: bool = False
    started: bool = False
    released: bool = False
    output: RequestOutput | None = None

    @property
    def sequences(self) -> int:
        """Choices to generate."""
        return self.params.num_choices


@dataclass(frozen=True)
class Update:
    """News of a ticket from the engine's thread. ``released``: the engine has forgotten it."""

    ticket: Ticket
    deltas: tuple[Delta, ...] = ()
    accepted: bool = False
    started: bool = False
    output: RequestOutput | None = None
    problem: ApiError | None = None
    released: bool = False
    at: float = 0.0
    """When the step began that made it; of the monotonic clock."""


@dataclass(eq=False)
class Job:
    """The prompts of one HTTP request, and what has come back. ``abort`` ends those that run.

    ``queue_deadline`` and ``deadline`` are times of the event loop's clock.
    """

    metrics: Metrics
    abort: Callable[[Ticket], None]
    queue_deadline: float
    deadline: float
    tickets: list[Ticket] = field(default_factory=list)
    _deltas: deque[tuple[int, Delta]] = field(default_factory=deque)
    _problem: ApiError | None = None
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    begun_at: float = field(default_factory=time.monotonic)
    started_at: float | None = None
    """When the step began in which its first prompt left the queue; ``first_at``: when its first tokens came."""
    first_at: float | None = None
    generated: int = 0
    _last: dict[tuple[int, int], float] = field(default_factory=dict)

    def receive(self, update: Update) -> None:
        """Take in news. Runs on the event loop."""
        ticket = update.ticket
        ticket.accepted |= update.accepted
        ticket.started |= update.started
        ticket.output = update.output or ticket.output
        if self.started_at is None and update.at:
            self.started_at = update.at
        if update.deltas:
            ticket.started = True
            self._count(ticket, update.deltas)
            if ticket.options.streams:
                self._deltas.extend((ticket.index, delta) for delta in update.deltas)
        self._problem = self._problem or update.problem
        if len(self._deltas) > MAX_PENDING:
            self.end(ApiError(500, "the client does not read what it asked for"))
        self._changed.set()

    def end(self, problem: ApiError) -> None:
        """End it from outside, with an error."""
        self._problem = self._problem or problem
        self._changed.set()
        self.close()

    def close(self) -> None:
        """Abort what still runs; nothing if all is done."""
        for ticket in self.tickets:
            if not ticket.released:
                self.abort(ticket)

    async def accepted(self) -> None:
        """Wait until the engine has looked at all prompts, or has produced something.

        Raises:
            ApiError: one is refused.
        """
        await self._until(lambda: all(t.accepted or t.output is not None for t in self.tickets))

    async def begun(self) -> None:
        """Wait for the first increment.

        Raises:
            ApiError: there will be none.
        """
        await self._until(lambda: bool(self._deltas) or self._done)
        if self._deltas and self._deltas[0][1].finish_reason is FinishReason.ERROR:
            raise failure(self._deltas[0][1].error)

    async def deltas(self) -> AsyncIterator[tuple[int, Delta]]:
        """(index of the prompt, increment), as they come.

        Raises:
            ApiError: the request failed, or took too long.
        """
        while True:
            await self._until(lambda: bool(self._deltas) or self._done)
            if not self._deltas:
                return
            index, delta = self._deltas.popleft()
            if delta.finish_reason is FinishReason.ERROR:
                raise failure(delta.error)
            yield index, delta

    async def results(self) -> list[RequestOutput]:
        """The answers, one for each prompt.

        Raises:
            ApiError: the request failed, or took too long.
        """
        await self._until(lambda: self._done)
        outputs = self.outputs
        for output in outputs:
            for choice in output.choices:
                if choice.finish_reason is FinishReason.ERROR:
                    raise failure(choice.error)
        return outputs

    @property
    def outputs(self) -> list[RequestOutput]:
        """What has finished."""
        return [ticket.output for ticket in self.tickets if ticket.output is not None]

    @property
    def failed(self) -> bool:
        """Whether something went wrong, also after the answer had begun."""
        choices = [choice for output in self.outputs for choice in output.choices]
        return self._problem is not None or any(c.finish_reason is FinishReason.ERROR for c in choices)

    @property
    def _done(self) -> bool:
        return all(ticket.output is not None for ticket in self.tickets)

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            if self._problem is not None:
                raise self._problem
            waiting = not any(ticket.started for ticket in self.tickets)
            limit = min(self.deadline, self.queue_deadline) if waiting else self.deadline
            self._changed.clear()
            try:
                async with asyncio.timeout_at(limit):
                    await self._changed.wait()
            except TimeoutError:
                self.close()
                if waiting and limit < self.deadline:
                    raise unavailable("the request waited too long in the queue", "queue_timeout") from None
                raise ApiError(504, "the request took too long", code="request_timeout") from None
        if self._problem is not None and not self._deltas:
            raise self._problem

    def _count(self, ticket: Ticket, deltas: tuple[Delta, ...]) -> None:
        now = time.monotonic()
        for delta in deltas:
            if delta.token_ids:
                key = (ticket.index, delta.choice)
                self.metrics.tokens(
                    len(delta.token_ids), now - self._last.get(key, self.begun_at), key not in self._last
                )
                self._last[key] = now
                self.first_at = self.first_at or now
                self.generated += len(delta.token_ids)


def failure(error: str | None) -> ApiError:
    """500 for what went wrong in the engine."""
    if error is not None and error.startswith(SHOWN):
        return ApiError(500, error, code="generation_failed")
    return ApiError(500, "the engine failed to compute this request", code="generation_failed")
