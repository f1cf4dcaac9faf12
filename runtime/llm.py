"""The Python API: load an engine, generate, chat, stream; or add requests and step by yourself."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping
from collections.abc import Sequence as ListOf
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar, Unpack

import numpy as np
from numpy.typing import NDArray

from llmc.errors import EngineError, RequestError, UsageError
from llmc.runtime import resources
from llmc.runtime.batch import Closeable, EmbeddingExecutor, Executor
from llmc.runtime.embedding import POOLINGS, Pool, embedding_of
from llmc.runtime.kv_budget import config_of
from llmc.runtime.output import Delta, RequestOutput, next_delta, request_output
from llmc.runtime.request import Request, SamplingParams, Sequence
from llmc.runtime.request_options import (
    Prompt,
    RequestOptions,
    check_options,
    check_request,
    params_for_each,
    prompt_list,
    with_constraint,
)
from llmc.runtime.sampling import Sampler
from llmc.runtime.scheduler import Scheduler, SchedulerConfig
from llmc.runtime.speculative.opening import Speculation, load_drafter, open_speculator
from llmc.runtime.stream import Stream

if TYPE_CHECKING:
    from llmc.runtime.engine import Engine
    from llmc.runtime.speculative.speculator import Speculator
    from llmc.runtime.tokenizer import Tokenizer

T = TypeVar("T")
Messages = ListOf[Mapping[str, Any]]

DEFAULT_MAX_TOKENS = 16
"""For prompts, if neither the request nor the model says otherwise; chats have the room left in the context."""


class LLM:
    """A loaded engine. Not for use from several threads at once.

    ``generate`` and ``chat`` run a list to its end, ``stream`` yields one answer as it comes; for anything else there
    is ``add_request``, ``step`` and ``abort``. What is added while others run joins the batch and changes no result.

    Args:
        engine_dir: the engine.
        threads: default: the physical cores that this process may use.
        kv_memory: bytes of KV cache, or a text such as ``2GiB``. Default: enough for all sequences at full length,
            but at most a quarter of the available memory, or what fits ``gpu_memory``.
        num_blocks: the same in blocks.
        gpu_memory: what an engine for CUDA takes of its device in all: a share such as 0.9 (default) or ``90%``, or
            bytes such as ``40GiB``.
        max_sequences, max_batch_tokens: lower than what the engine was built for, to save memory or shorten steps.
        isa: an instruction set of `llmc.plugins.kernels.isas`. Default: the best.
        lora: directories of LoRA adapters in PEFT's format, by the names that requests use.
        prefix_cache: find the keys and values of a prompt's beginning that an earlier request has computed, as long as
            their memory is not needed. Changes no result.
        parse_special_in_messages: texts of control tokens in chat messages become those tokens. Off: ordinary text.
        check: recount the KV cache after every step.
        expect_digest: ``sha256:...`` of engine.json.
        speculative: what drafts tokens for the engine to verify: ``ngram``, ``draft=DIR``, ... As that, it changes no
            result; a Speculation may also choose how drafts are accepted.

    Raises:
        EngineError: the engine is missing, damaged or of another version.
        ResourceError: the KV cache would not hold one sequence.
        UsageError: an argument makes no sense.
    """

    def __init__(
        self,
        engine_dir: str | Path,
        *,
        threads: int | None = None,
        kv_memory: int | str | None = None,
        num_blocks: int | None = None,
        gpu_memory: float | str | None = None,
        max_sequences: int | None = None,
        max_batch_tokens: int | None = None,
        isa: str | None = None,
        lora: Mapping[str, str | Path] | None = None,
        prefix_cache: bool = True,
        parse_special_in_messages: bool = False,
        check: bool = False,
        expect_digest: str | None = None,
        speculative: Speculation | str | None = None,
    ) -> None:
        # long: one argument for each option, then one step after the other
        from llmc.runtime.devices import cpu, make_executor, open_device
        from llmc.runtime.engine import load_engine
        from llmc.runtime.lora import adapters_of, with_adapters
        from llmc.runtime.tokenizer import tokenizer_of

        engine = load_engine(engine_dir, expect_digest=expect_digest)
        if lora:
            engine = with_adapters(engine, adapters_of(lora))
        facts = engine.model
        drafter = load_drafter(Speculation.of(speculative), engine)
        self.threads = resources.physical_cores() if threads is None else threads
        if self.threads < 1:
            raise UsageError(f"threads: {threads} is less than 1")
        default = engine.generation_config.get("max_new_tokens")
        if default is not None and (type(default) is not int or default < 1):
            raise EngineError(f"{engine.path}: max_new_tokens in generation_config.json is {default!r}")
        with ExitStack() as opened:  # what is open is closed if the rest fails
            if (device := open_device(engine)) is not None:
                opened.callback(device.close)
            config = config_of(
                engine,
                device,
                drafter,
                sizes=(max_sequences, max_batch_tokens),
                kv_memory=kv_memory,
                num_blocks=num_blocks,
                gpu_memory=gpu_memory,
                prefix_cache=prefix_cache,
                check=check,
            )
            tokenizer = tokenizer_of(engine, parse_special_in_messages=parse_special_in_messages)
            blocks, count = config.num_blocks, self.threads
            executor = make_executor(engine, num_blocks=blocks, threads=count, isa=isa, device=device)
            if isinstance(executor, Closeable):
                opened.callback(executor.close)
            drafts = open_speculator(drafter, executor, config, threads=self.threads, isa=isa)
            if drafts is not None:
                opened.callback(drafts.close)
            self._opened = opened.pop_all()
        self.engine: Engine | None = engine
        self.adapters = tuple(lora or ())
        self._set_up(executor, config, facts.vocab_size, tokenizer, facts.eos_token_ids, default, engine.digest, drafts)
        if cpu.POISON and isinstance(executor, cpu.CpuExecutor):
            self.scheduler.kv_cache.on_free = executor.poison_blocks

    @classmethod
    def from_parts(
        cls,
        executor: Executor,
        config: SchedulerConfig,
        *,
        vocab_size: int,
        tokenizer: Tokenizer | None = None,
        eos_token_ids: Collection[int] = (),
        default_max_tokens: int | None = None,
        speculator: Speculator | None = None,
    ) -> Self:
        """One around another executor, for tests."""
        self = cls.__new__(cls)
        self.engine, self.threads, self.adapters, self._opened = None, 1, (), ExitStack()
        self._set_up(executor, config, vocab_size, tokenizer, eos_token_ids, default_max_tokens, "", speculator)
        return self

    def _set_up(
        self,
        executor: Executor,
        config: SchedulerConfig,
        vocab_size: int,
        tokenizer: Tokenizer | None,
        eos_token_ids: Collection[int],
        default_max_tokens: int | None,
        digest: str = "",
        speculator: Speculator | None = None,
    ) -> None:
        self.executor, self.tokenizer, self.vocab_size = executor, tokenizer, vocab_size
        self.eos_token_ids = frozenset(i for i in eos_token_ids if i < vocab_size)  # others can't come
        self._default_max_tokens = default_max_tokens
        sampler = Sampler(None if tokenizer is None else tokenizer.vocabulary.tokens_containing)
        self.scheduler = Scheduler(executor, sampler, config, model=digest, speculator=speculator)
        self._requests: dict[int, Request] = {}
        self._touched: dict[Sequence, None] = {}
        self._next_id = 0

    # -- whole answers ------------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | ListOf[Prompt],
        params: SamplingParams | ListOf[SamplingParams] | None = None,
        **options: Unpack[RequestOptions],
    ) -> list[RequestOutput]:
        """Continue prompts (texts or token ids), all in flight at once; one result for each, in order.

        Raises:
            RequestError: a prompt or value is out of bounds; nothing is run then.
        """
        each = prompt_list(prompts)
        pairs = zip(each, params_for_each(params, len(each)), strict=True)
        return self._run_all([partial(self.add_request, prompt, p, **options) for prompt, p in pairs], request_output)

    def chat(
        self,
        messages: Messages | ListOf[Messages],
        params: SamplingParams | ListOf[SamplingParams] | None = None,
        **options: Any,
    ) -> list[RequestOutput]:
        """Answer one chat, a list of ``{"role": ..., "content": ...}``, or several; options as in `add_chat`."""
        chats: Any = [messages] if len(messages) == 0 or isinstance(messages[0], Mapping) else messages
        each = params_for_each(params, len(chats))
        additions = [partial(self.add_chat, chat, p, **options) for chat, p in zip(chats, each, strict=True)]
        return self._run_all(additions, request_output)

    def embed(
        self, prompts: Prompt | ListOf[Prompt], pooling: str = "last", **options: Unpack[RequestOptions]
    ) -> list[NDArray[np.float32]]:
        """The embedding of each prompt, as of `add_embedding`.

        Raises:
            RequestError: a prompt or value is out of bounds; nothing is run then.
            LlmcError: one has failed or was too late.
        """
        additions = [partial(self.add_embedding, prompt, pooling, **options) for prompt in prompt_list(prompts)]
        return self._run_all(additions, embedding_of)

    def stream(self, prompt: Prompt | Messages, params: SamplingParams | None = None, **options: Any) -> Stream:
        """The continuation of a prompt, or the answer to a chat, as it comes: an iterator of deltas.

        Raises:
            RequestError: the prompt or a value is out of bounds.
        """
        is_chat = not isinstance(prompt, str) and len(prompt) > 0 and isinstance(prompt[0], Mapping)
        add: Any = self.add_chat if is_chat else self.add_request
        return Stream(self, self._requests[add(prompt, params, **options)])

    # -- in flight ----------------------------------------------------------------------------------------------------

    def add_request(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        chat: bool = False,
        **options: Unpack[RequestOptions],
    ) -> int:
        """Queue a prompt; returns the id of the request.

        ``chat``: the tokens are those of `Tokenizer.encode_chat`, to be treated as `add_chat` does.

        Raises:
            RequestError: the prompt or a value is out of bounds; names the field.
        """
        return self._add(self._encoded(prompt), params or SamplingParams(), options, chat=chat)

    def add_embedding(self, prompt: Prompt, pooling: str = "last", **options: Unpack[RequestOptions]) -> int:
        """Queue a prompt of which the embedding is wanted; returns the id of the request.

        It joins the batches of the others; `Request.embedding` and the last `Delta` have the result: what goes into the
        model's head, float32 [hidden size], of the last token or the mean over all.

        Raises:
            RequestError: the prompt or a value is out of bounds; names the field.
        """
        if pooling not in POOLINGS:
            raise RequestError(f"{pooling!r} is not one of {', '.join(POOLINGS)}", "pooling")
        if not isinstance(self.executor, EmbeddingExecutor):
            raise RequestError("the engine's executor gives no embeddings", "pooling")
        return self._add(self._encoded(prompt), SamplingParams(max_tokens=0), options, chat=False, pool=Pool(pooling))

    def add_chat(
        self,
        messages: Messages,
        params: SamplingParams | None = None,
        *,
        tools: ListOf[Mapping[str, Any]] | None = None,
        documents: ListOf[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        template_variables: Mapping[str, Any] | None = None,
        **options: Unpack[RequestOptions],
    ) -> int:
        """Queue a chat; returns the id of the request. ``template_variables``: such as ``{"enable_thinking": False}``.

        Raises:
            RequestError: the messages or a value are out of bounds; names the field.
        """
        if self.tokenizer is None:
            raise RequestError("the engine has no tokenizer; use generate with token ids", "messages")
        prompt = self.tokenizer.encode_chat(
            messages,
            tools=tools,
            documents=documents,
            add_generation_prompt=add_generation_prompt,
            variables=template_variables,
        )
        return self._add(prompt, params or SamplingParams(), options, chat=True)

    def request(self, request_id: int) -> Request:
        """The state of a request that has not been reported as finished."""
        return self._requests[request_id]

    @property
    def counts(self) -> dict[str, int]:
        """What goes on, as plain numbers; cheap, and may be read while another thread runs `step`."""
        scheduler = self.scheduler
        return {
            "running": len(scheduler.running),
            "waiting": len(scheduler.waiting),
            "kv_used": scheduler.kv_cache.num_used,
            "kv_cached": scheduler.kv_cache.num_cached,
            "kv_total": scheduler.kv_cache.num_blocks,
            **dataclasses.asdict(scheduler.statistics),
        }

    @property
    def has_unfinished(self) -> bool:
        """Whether `step` has something to do."""
        return bool(self._touched) or self.scheduler.has_work

    def step(self) -> list[Delta]:
        """Run one batch; returns what is new, of all requests."""
        if not self._touched:
            self._advance()
        touched, self._touched = list(self._touched), {}
        deltas = [next_delta(sequence) for sequence in touched]
        for sequence in touched:
            if sequence.request.finished:
                self._requests.pop(sequence.request.id, None)
        return deltas

    def abort(self, request_id: int) -> None:
        """End a request at any moment; unknown or finished ones are ignored."""
        request = self._requests.pop(request_id, None)
        if request is not None:
            self.scheduler.abort(request)
            self._forget(request)

    def close(self) -> None:
        """End the processes for templates and constraints, and free memory of devices. The rest goes with `self`."""
        if self.tokenizer is not None:
            self.tokenizer.close()
        self._opened.close()

    # -- behind it ----------------------------------------------------------------------------------------------------

    def _encoded(self, prompt: Prompt) -> list[int]:
        if not isinstance(prompt, str):
            return list(prompt)
        if self.tokenizer is None:
            raise RequestError("the engine has no tokenizer; use token ids", "prompt")
        return self.tokenizer.encode(prompt)

    def _add(
        self,
        prompt: list[int],
        params: SamplingParams,
        options: RequestOptions,
        *,
        chat: bool,
        pool: Pool | None = None,
    ) -> int:
        number = check_options(options, self.adapters)
        check_request(prompt, params, self.vocab_size, self.tokenizer is not None)
        options = with_constraint(options, params, self.tokenizer)
        room = max(0, self.scheduler.config.context - len(prompt))
        max_tokens = params.max_tokens if params.max_tokens is not None else self._default_max_tokens
        if max_tokens is None:
            max_tokens = room if chat else max(DEFAULT_MAX_TOKENS, params.min_tokens)
        request = Request(self._next_id, prompt, params, max_tokens, self.eos_token_ids, pool=pool, **options)
        request.adapter_number = number
        self.scheduler.add(request)
        for sequence in request.sequences:
            if self.tokenizer is not None:
                sequence.text = self.tokenizer.stream(params, prompt, chat=chat)
            if sequence.finish_reason is not None:
                self._touched[sequence] = None
        self._next_id += 1
        self._requests[request.id] = request
        return request.id

    def _run_all(self, additions: ListOf[Callable[[], int]], result: Callable[[Request], T]) -> list[T]:
        requests: list[Request] = []
        try:
            requests.extend(self._requests[add()] for add in additions)
            while not all(request.finished for request in requests):
                self._advance()
            return [result(request) for request in requests]
        except RequestError as problem:
            if len(additions) == 1:
                raise
            raise RequestError(f"prompt {len(requests)}: {problem}") from None
        finally:
            for request in requests:
                self.abort(request.id)

    def _advance(self) -> None:
        for sequence in self.scheduler.step():
            self._touched[sequence] = None

    def _forget(self, request: Request) -> None:
        for sequence in request.sequences:
            self._touched.pop(sequence, None)
