"""The models of a server: each has an engine that can be replaced while requests run on the old one."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from llmc.errors import EngineError, RequestError, UsageError
from llmc.runtime.constraints import ConstraintSpec, compile_constraint
from llmc.runtime.request import SamplingParams
from llmc.runtime.server.engine_loop import EngineLoop
from llmc.runtime.server.errors import ApiError, from_request_error, unavailable
from llmc.runtime.server.job import Job, Ticket, TicketOptions
from llmc.runtime.server.metrics import Metrics
from llmc.runtime.server.settings import Settings

if TYPE_CHECKING:
    from llmc.runtime.constraints import TokenConstraint
    from llmc.runtime.llm import LLM
    from llmc.runtime.server.tracing import Tracing
    from llmc.runtime.tokenizer import Tokenizer

T = TypeVar("T")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:-]{0,127}")
ENDED_EVERY = 0.05
"""Seconds after which an engine that is to end is looked at again."""

ENCODERS = 2
"""Threads that tokenize and parse large bodies, beside the event loop and the engines."""

log = logging.getLogger("llmc.serve")


@dataclass(eq=False)
class Model:
    """A name, the engine directory behind it, and the thread that runs it, once it is loaded.

    ``adapter``: this is model ``base`` with that LoRA adapter.
    """

    name: str
    path: Path
    engine: EngineLoop | None = None
    base: Model | None = None
    adapter: str | None = None
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def running(self) -> EngineLoop:
        """The engine.

        Raises:
            ApiError: 503, it is still being loaded.
        """
        engine = (self.base or self).engine
        if engine is None:
            raise unavailable("the model is being loaded", "model_loading")
        if engine.failed:
            raise ApiError(503, "the engine has failed", code="engine_failed")
        return engine

    @property
    def adapted(self) -> list[Model]:
        """This model with each of its adapters, under their names."""
        names = () if self.engine is None else self.engine.llm.adapters
        return [Model(name, self.path, None, self, name, self.created) for name in names]

    @property
    def llm(self) -> LLM:
        """For what never changes: tokenizer, limits. Requests go to the thread."""
        return self.running.llm

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer.

        Raises:
            ApiError: 400, the engine has none.
        """
        if self.llm.tokenizer is None:
            raise ApiError(400, "this model has no tokenizer; send token ids", param="prompt")
        return self.llm.tokenizer

    @property
    def context(self) -> int:
        """Tokens of a sequence."""
        return self.llm.scheduler.config.context

    @property
    def fingerprint(self) -> str:
        """Which build answers: OpenAI's ``system_fingerprint``."""
        engine = self.llm.engine
        return "llmc" if engine is None else f"llmc-{engine.digest[:12]}"

    def summary(self) -> dict[str, Any]:
        """As /v1/models lists it."""
        result = {"id": self.name, "object": "model", "created": self.created, "owned_by": "llmc"}
        if self.base is not None:
            result["parent"] = self.base.name
        return result if (self.base or self).engine is None else result | {"max_model_len": self.context}


class Models:
    """All models, and what their requests have in common.

    Args:
        paths: engine directories by name; the first is the default of the page.
        load: makes an LLM of a directory; may take long, runs in a thread.
        tracing: where spans of requests go.
    """

    def __init__(
        self,
        paths: Mapping[str, Path],
        load: Callable[[Path], LLM],
        settings: Settings,
        metrics: Metrics,
        tracing: Tracing | None = None,
    ) -> None:
        for name in paths:
            if NAME.fullmatch(name) is None:
                raise UsageError(f"--model {name}: a name has up to 128 letters, digits and . _ / : -")
        self.all = {name: Model(name, path) for name, path in paths.items()}
        self.settings, self.metrics, self.tracing, self.draining = settings, metrics, tracing, False
        self.on_failure: Callable[[], None] = lambda: None
        self._load = load
        self._encoders = ThreadPoolExecutor(ENCODERS, thread_name_prefix="encode")
        self._compilers = ThreadPoolExecutor(ENCODERS, thread_name_prefix="compile")
        self._reloading = asyncio.Lock()
        self._retired: dict[asyncio.Task[None], EngineLoop] = {}

    def find(self, name: str | None) -> Model:
        """A model by name; None: the first one.

        Raises:
            ApiError: 404.
        """
        named = {model.name: model for model in self.listed}
        model = self.listed[0] if name is None else named.get(name)
        if model is None:
            known = ", ".join(named)
            raise ApiError(404, f"there is no such model; known: {known}", param="model", code="model_not_found")
        return model

    @property
    def listed(self) -> list[Model]:
        """All models, then those with adapters."""
        return [*self.all.values(), *(adapted for model in self.all.values() for adapted in model.adapted)]

    @property
    def ready(self) -> bool:
        """Whether requests can be served."""
        engines = [model.engine for model in self.all.values()]
        alive = all(engine is not None and engine.is_alive(self.settings.stall_timeout) for engine in engines)
        return alive and not self.draining

    @property
    def _engines(self) -> list[EngineLoop]:
        return [*(m.engine for m in self.all.values() if m.engine is not None), *self._retired.values()]

    @property
    def idle(self) -> bool:
        """Whether no request is on its way."""
        return all(model.engine is None or model.engine.idle for model in self.all.values()) and not self._retired

    async def load(self, model: Model) -> None:
        """Load the engine of a model, or a new one in place of the old, which ends once its requests have.

        With `Settings.reload_in_place` that comes first.

        Raises:
            EngineError: the old one is to end first, and hangs; it stays.
            LlmcError: it can't be loaded; the old one stays, or if that has ended, the server has failed.
        """
        async with self._reloading:
            old, events = model.engine, asyncio.get_running_loop()
            if old is not None and self.settings.reload_in_place:
                await self._end_first(model, old)
            try:
                llm = await asyncio.to_thread(self._load, model.path)
            except BaseException:
                if old is not None and model.engine is None:
                    self._failed()  # nothing is left to serve
                raise
            model.engine = EngineLoop(llm, events, self.settings.max_queue, self._failed)
            log.info("%s: loaded %s", model.name, model.path)
            if (memory := getattr(llm.executor, "memory", None)) is not None:
                log.info("%s: takes %s", model.name, memory)
            if old is not None:
                model.engine.pause(old.paused)
                if not self.settings.reload_in_place:
                    self._retire(old)

    async def _end_first(self, model: Model, old: EngineLoop) -> None:
        """Wait for the requests of an engine, for as long as its steps end."""
        stall = self.settings.stall_timeout
        model.engine = None  # new requests get 503
        ending = self._retire(old)
        while not (await asyncio.wait([ending], timeout=ENDED_EVERY))[0]:
            if not (old.idle or old.failed or old.is_alive(stall)):
                ending.cancel()
                await asyncio.wait([ending])
                model.engine = old
                raise EngineError(
                    f"its requests can't end: a step has taken longer than --stall-timeout, {stall:g} s; if it hangs, "
                    "start the server anew"
                )
        await ending

    def _retire(self, engine: EngineLoop) -> asyncio.Task[None]:
        """Let an engine end once its requests have."""
        task = asyncio.create_task(_ended(engine))
        self._retired[task] = engine
        task.add_done_callback(lambda done: self._retired.pop(done, None))
        return task

    def _failed(self) -> None:
        self.on_failure()

    async def compile(
        self, model: Model, spec: ConstraintSpec | None, names: Mapping[str, str]
    ) -> TokenConstraint | None:
        """A constraint, compiled where it holds up nobody: not the engine, and not requests without one.

        Raises:
            ApiError: 400, it is beyond the limits.
        """
        if spec is None:
            return None
        tokenizer = model.tokenizer
        return await self.in_thread(lambda: compile_constraint(spec, tokenizer), names, self._compilers)

    async def in_thread(
        self, function: Callable[[], T], names: Mapping[str, str] | None = None, pool: ThreadPoolExecutor | None = None
    ) -> T:
        """Do what may take a while beside the event loop.

        Raises:
            ApiError: 400, for a RequestError.
        """
        try:
            return await asyncio.get_running_loop().run_in_executor(pool or self._encoders, function)
        except RequestError as problem:
            raise from_request_error(problem, names) from None

    def submit(self, model: Model, prompts: Sequence[list[int]], params: SamplingParams, options: TicketOptions) -> Job:
        """Queue prompts. Whoever asked closes the job.

        Raises:
            ApiError: 429 or 503.
        """
        now = asyncio.get_running_loop().time()
        engine, options = model.running, replace(options, adapter=model.adapter)
        longest = min(self.settings.request_timeout, options.timeout or self.settings.request_timeout)
        job = Job(self.metrics, engine.abort, now + self.settings.queue_timeout, now + longest)
        job.tickets += [Ticket(job, i, prompt, params, options) for i, prompt in enumerate(prompts)]
        if self.tracing is not None:
            self.tracing.note(model.name, job)
        engine.submit(job)
        return job

    def pause(self, paused: bool) -> None:
        """Stop the engines between two steps, or let them go on; also those that only end their last requests.

        Raises:
            ApiError: 503, one is being loaded or has failed.
        """
        models = [model for model in self.all.values() if model.engine is not None or not self._retired]
        for engine in [*(model.running for model in models), *self._retired.values()]:
            engine.pause(paused)

    def end_all(self, problem: ApiError) -> None:
        """End all requests."""
        for engine in self._engines:
            engine.fail_all(problem)

    async def close(self) -> None:
        """End all threads."""
        for task in self._retired:
            task.cancel()
        for engine in self._engines:
            await engine.stop()
        for pool in (self._encoders, self._compilers):
            pool.shutdown(wait=False, cancel_futures=True)


async def _ended(engine: EngineLoop) -> None:
    while not engine.idle:
        await asyncio.sleep(ENDED_EVERY)
    await engine.stop()
