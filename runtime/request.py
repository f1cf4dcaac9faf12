"""What a client asks for (`SamplingParams`), and the state of a request until it is answered."""

from __future__ import annotations

import dataclasses
import enum
import secrets
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from llmc.errors import RequestError
from llmc.runtime.constraints.base import ConstraintSpec
from llmc.runtime.field_checks import INT32_MAX as INT32_MAX
from llmc.runtime.field_checks import LOGIT_BIAS_BOUND as LOGIT_BIAS_BOUND
from llmc.runtime.field_checks import MAX_STRING_BYTES as MAX_STRING_BYTES
from llmc.runtime.field_checks import POSITIVE as POSITIVE
from llmc.runtime.field_checks import integer, logit_bias, real, shown, strings, token_ids

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from llmc.runtime.constraints.base import TokenConstraint
    from llmc.runtime.detokenizer import TextStream
    from llmc.runtime.embedding import Pool
    from llmc.runtime.kv_cache import BlockTable
    from llmc.runtime.prefix_cache import Content
    from llmc.runtime.sampling import PenaltyState, TokenLogprob

INT64_MAX = 2**63 - 1

INTEGERS = {
    "max_tokens": (0, INT32_MAX),
    "min_tokens": (0, INT32_MAX),
    "n": (1, 128),
    "best_of": (1, 128),
    "top_k": (-1, INT32_MAX),
    "seed": (-INT64_MAX - 1, INT64_MAX),
    "logprobs": (0, 20),
    "prompt_logprobs": (0, 20),
}
"""Both bounds of each whole number, included."""

REALS = {
    "temperature": (0.0, 2.0),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.0, 10.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
}
"""Both bounds of each real number, included but for those of POSITIVE."""

FLAGS = ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens")
STRINGS = {"stop": 16, "bad_words": 64}
"""The most entries of each list of strings."""

OVERTAKEN = 1000
"""Later requests that go before one whose priority is worse by 1, at most: so that it does not wait for ever."""

MAX_STOP_IDS, MAX_LOGIT_BIAS = 64, 1024


class FinishReason(enum.StrEnum):
    """Why a sequence ended.

    STOP at an end token or stop string (or with the embedding), LENGTH at a limit, ABORT by its owner, TIMEOUT at its
    deadline, ERROR by us.
    """

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    TIMEOUT = "timeout"
    ERROR = "error"


@dataclass(frozen=True)
class SamplingParams:
    """How to continue a prompt. The default is greedy: always the most likely token. None means: not set.

    Attributes:
        max_tokens: tokens to generate at most; cut to the room left in the context. Default: max_new_tokens of the
            model's generation config, else 16 for a prompt and the room left for a chat. 0 only scores the prompt.
        min_tokens: tokens before which neither an end token, nor a stop string ends it.
        n: independent choices. ``best_of`` generates more and keeps the n with the highest mean log-probability.
        temperature: 0 is greedy; otherwise logits are divided by it before a token is drawn.
        top_k: draw from the k most likely tokens; -1 and 0: all.
        top_p: draw from the smallest set of most likely tokens whose probabilities (after top_k) sum to this.
        min_p: draw from tokens at least this fraction as likely as the most likely one.
        repetition_penalty: logits of tokens of prompt and output are divided by it if positive, else multiplied.
        presence_penalty: subtracted from the logits of tokens that the output has; frequency_penalty: once each time.
        seed: makes sampling reproducible, whatever else runs. Default: a new one for each request.
        logprobs: report the log-probability of each token, and of this many most likely ones. Of the model's own
            distribution: before temperature, penalties and filters. prompt_logprobs: the same for the prompt.
        logit_bias: {token id: number added to its logit}.
        stop: strings that end the text before them. stop_token_ids: tokens that end it.
        bad_words: strings that the text never contains.
        ignore_eos: the model's end tokens are ordinary tokens.
        include_stop_str_in_output: the text includes the stop string or end token that ended it.
        skip_special_tokens: special tokens have no text.
        constraint: what the text has to be: a ConstraintSpec, or such as ``{"regex": "[0-9]+"}``. What is complete and
            can't go on ends, whatever min_tokens; what max_tokens or a stop string cuts is incomplete.

    Raises:
        RequestError: a value is of the wrong type or out of bounds; names the field.
    """

    max_tokens: int | None = None
    min_tokens: int = 0
    n: int = 1
    best_of: int | None = None
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    stop: str | Collection[str] = ()
    stop_token_ids: Collection[int] = ()
    bad_words: str | Collection[str] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    constraint: ConstraintSpec | None = None

    def __post_init__(self) -> None:
        for f in dataclasses.fields(self):  # None is "not set", also where a default stands
            if getattr(self, f.name) is None and f.default is not None:
                default = {} if f.name == "logit_bias" else f.default
                object.__setattr__(self, f.name, default)
        for name, bounds in INTEGERS.items():
            self._set(name, integer, bounds)
        for name, real_bounds in REALS.items():
            self._set(name, real, real_bounds)
        for name, limit in STRINGS.items():
            self._set(name, strings, limit)
        for name in FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"expected true or false, found {shown(getattr(self, name))}", name)
        self._set("stop_token_ids", token_ids, MAX_STOP_IDS)
        self._set("logit_bias", logit_bias, MAX_LOGIT_BIAS)
        object.__setattr__(self, "constraint", ConstraintSpec.of(self.constraint))
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(f"{self.min_tokens} is more than max_tokens, {self.max_tokens}", "min_tokens")
        if self.best_of is not None and self.best_of < self.n:
            raise RequestError(f"{self.best_of} is less than n, {self.n}", "best_of")

    def _set(self, name: str, check: Any, bounds: Any) -> None:
        value = getattr(self, name)
        if value is not None:
            object.__setattr__(self, name, check(name, value, bounds))

    @staticmethod
    def from_mapping(values: Mapping[str, Any]) -> SamplingParams:
        """From JSON: null is "not set".

        Raises:
            RequestError: an unknown field, or a value out of bounds; names the field.
        """
        known = {f.name for f in dataclasses.fields(SamplingParams)}
        for name in values:
            if name not in known:
                raise RequestError(f"unknown field; known are {', '.join(sorted(known))}", name)
        return SamplingParams(**values)

    @property
    def num_choices(self) -> int:
        """Sequences to generate."""
        return self.best_of or self.n

    @property
    def needs_penalties(self) -> bool:
        """Whether logits depend on the tokens so far."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0


@dataclass(eq=False)
class Request:
    """A prompt and its choices. ``max_tokens`` is resolved and fits the context; ``seed`` is set.

    ``deadline``: of time.monotonic(). ``salt``: what is computed for this prompt is found again by requests with the
    same salt only. ``pool`` makes it one for an embedding: nothing is generated.
    """

    id: int
    prompt: list[int]
    params: SamplingParams
    max_tokens: int
    eos_token_ids: frozenset[int] = frozenset()
    priority: int = 0
    seed: int = field(default_factory=lambda: secrets.randbits(63))
    sequences: list[Sequence] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=list)
    """One for each token of the prompt, None for the first; filled by the scheduler as the prompt is computed."""
    salt: str = ""
    adapter: str | None = None
    adapter_number: int = -1
    """Its place among those of the LLM; -1: none."""
    deadline: float | None = None
    pool: Pool | None = None
    constraint: TokenConstraint | None = None
    """That of the parameters, at its start; each sequence has a clone."""
    num_cached_tokens: int | None = None
    """Tokens of the prompt that were in the prefix cache when the first choice began; None before that."""
    root: Content | None = None
    """The prefix cache's."""
    is_plain: bool = field(init=False)
    """Whether only the largest logits matter, but for min_tokens."""

    def __post_init__(self) -> None:
        p = self.params
        adjusted = p.needs_penalties or p.logit_bias or p.bad_words or self.constraint is not None
        reported = p.logprobs is not None or p.prompt_logprobs is not None or p.num_choices != p.n
        self.is_plain = not (p.temperature or adjusted or reported or self.pool is not None)
        if self.params.seed is not None:
            self.seed = self.params.seed
        if not self.sequences:
            self.sequences = [Sequence(self, choice) for choice in range(self.params.num_choices)]
        if self.params.prompt_logprobs is not None:
            self.prompt_logprobs = [None]

    @property
    def finished(self) -> bool:
        """Whether all choices have ended."""
        return all(s.finish_reason is not None for s in self.sequences)

    @property
    def embedding(self) -> NDArray[np.float32] | None:
        """[hidden size], of a finished request that has a ``pool``."""
        return None if self.pool is None or not self.finished else self.pool.result

    @property
    def end_token_ids(self) -> frozenset[int]:
        """Tokens that end a sequence."""
        eos = frozenset() if self.params.ignore_eos else self.eos_token_ids
        return eos.union(self.params.stop_token_ids)


@dataclass(eq=False)
class Sequence:
    """One choice of a request: its tokens, what of them is in the KV cache, and its text."""

    request: Request
    choice: int
    tokens: list[int] = field(init=False)
    end_token_ids: frozenset[int] = field(init=False)
    num_computed: int = 0
    """Tokens in the KV cache. The scheduler's, like the next two."""
    table: BlockTable | None = None
    state_slot: int | None = None
    contents: list[Content] = field(default_factory=list)
    """The prefix cache's, like the next one: names of the full blocks."""
    num_named: int = 0
    """Blocks that have been found, or can be."""
    text: TextStream | None = None
    """None: tokens only."""
    penalties: PenaltyState | None = None
    """The sampler's."""
    hidden: NDArray[np.float32] | None = None
    """For a proposer of drafts that wants it: what went into the head for the rows that the last step took."""
    constraint: TokenConstraint | None = field(init=False)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    cumulative_logprob: float = 0.0
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    """The token id or string of the request that ended it; None for the model's own end tokens."""
    error: str | None = None
    num_reported: int = 0
    """Generated tokens that the owner of the request knows of."""

    def __post_init__(self) -> None:
        self.tokens = list(self.request.prompt)
        self.constraint = None if self.request.constraint is None else self.request.constraint.clone()
        self.end_token_ids = self.request.end_token_ids

    @property
    def num_prompt(self) -> int:
        """Tokens of the prompt."""
        return len(self.request.prompt)

    @property
    def num_generated(self) -> int:
        """Tokens generated so far, end tokens included."""
        return len(self.tokens) - len(self.request.prompt)

    @property
    def order(self) -> tuple[int, int, int]:
        """Sequences are served in this order, and preempted in the opposite one."""
        return self.request.id + OVERTAKEN * self.request.priority, self.request.id, self.choice

    @property
    def scored(self) -> int | None:
        """Of a sequence that scores its prompt and is not done with that: tokens scored so far; else None."""
        if not self.request.prompt_logprobs:
            return None
        scored = len(self.request.prompt_logprobs)
        return scored if self.choice == 0 and 0 < scored < self.num_prompt else None

    @property
    def first_row(self) -> int:
        """The first token whose row of logits, or of the embedding, is needed; those before only fill the cache."""
        if self.request.pool is not None and self.request.pool.takes_all:
            return self.request.pool.count
        return len(self.tokens) - 1 if self.scored is None else self.scored - 1

    def append(self, token: int, logprob: TokenLogprob | None = None) -> None:
        """Take the next token, extend the text, and end the sequence if this token ends it."""
        params = self.request.params
        self.tokens.append(token)
        if logprob is not None:
            self.cumulative_logprob += logprob.logprob
            if params.logprobs is not None:
                self.logprobs.append(logprob)
        if token in self.end_token_ids and self.num_generated >= params.min_tokens:
            if self.text is not None:
                self.text.end(token if params.include_stop_str_in_output else None)
            ended_by_request = token in params.stop_token_ids and token not in self.request.eos_token_ids
            self.finish(FinishReason.STOP, token if ended_by_request else None)
            return
        if self.constraint is not None:
            self.constraint.accept(token)
        stop = None if self.text is None else self.text.append(token, may_stop=self.num_generated >= params.min_tokens)
        if stop is None and self.constraint is not None and self.constraint.is_finished:
            self.end()
            return
        if stop is None and self.num_generated >= self.request.max_tokens and self.text is not None:
            stop = self.text.flush()
        if stop is not None:
            self.finish(FinishReason.STOP, stop)
        elif self.num_generated >= self.request.max_tokens:
            self.finish(FinishReason.LENGTH)

    def end(self) -> None:
        """End it where its constraint allows nothing more."""
        stop = None if self.text is None else self.text.flush()
        self.finish(FinishReason.STOP, stop)

    def finish(self, reason: FinishReason, stop_reason: int | str | None = None, error: str | None = None) -> None:
        """End it, with all of its text. The scheduler frees what it holds."""
        if reason in (FinishReason.ABORT, FinishReason.ERROR, FinishReason.TIMEOUT) and self.text is not None:
            self.text.flush()
        self.finish_reason, self.stop_reason, self.error = reason, stop_reason, error
