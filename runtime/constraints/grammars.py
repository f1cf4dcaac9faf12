"""Compiles constraints with llguidance, first in a process with limits, and keeps them in a cache bounded by bytes."""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from llmc.errors import RequestError, UsageError
from llmc.runtime.constraints.base import ConstraintError, ConstraintSpec
from llmc.runtime.limited_process import LimitedProcess

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

    from llmc.runtime.vocabulary import Vocabulary

WORKERS = 2
"""Constraints that are tried at one time."""

WHITESPACE = r"[ \n\r\t]{0,32}"
"""Between the parts of JSON; without a bound some models never stop writing it."""

OPTIONS = '\n%llguidance {"no_forcing": true}\n'
"""The model chooses how a text that is forced is cut into tokens: finding that out in advance takes time without
bound, for one grammar of 30 lines."""


class Grammars:
    """The compiled constraints of a vocabulary. Safe to use from several threads."""

    def __init__(self, vocabulary: Vocabulary, cache_bytes: int) -> None:
        if not vocabulary.exact:
            raise RequestError(
                "the tokenizer of this engine has no bytes for each token, so nothing can be constrained"
            )
        self.cache_bytes, self.cached_bytes = cache_bytes, 0
        self._vocabulary = vocabulary
        self._lock = threading.Lock()
        self._cache: OrderedDict[ConstraintSpec, tuple[GrammarConstraint, int]] = OrderedDict()
        self._idle: list[LimitedProcess] = []
        self._free = threading.BoundedSemaphore(WORKERS)
        self._tokenizer: LLTokenizer | None = None

    def compile(self, spec: ConstraintSpec) -> GrammarConstraint:
        """See `compile_constraint`."""
        with self._lock:
            if (found := self._cache.get(spec)) is not None:
                self._cache.move_to_end(spec)
                return found[0].clone()
        grammar = lark(spec)
        size = self._try(spec.kind, grammar)
        with self._lock:
            if self._tokenizer is None:
                self._tokenizer = library_tokenizer(*token_table(self._vocabulary))
        matcher = make_matcher(self._tokenizer, grammar, spec.kind)
        if problem := matcher.get_error():  # not what the other process found
            raise RequestError(_short(problem), spec.kind)
        never = () if spec.control_tokens else tuple(self._vocabulary.special_ids)
        constraint = GrammarConstraint(matcher, _bits(never, self._vocabulary.size + 1))
        with self._lock:
            if size <= self.cache_bytes and spec not in self._cache:
                self._cache[spec] = constraint, size
                self.cached_bytes += size
            while self.cached_bytes > self.cache_bytes:
                self.cached_bytes -= self._cache.popitem(last=False)[1][1]
        return constraint.clone()

    def close(self) -> None:
        """End the processes."""
        with self._lock:
            idle, self._idle = self._idle, []
        for worker in idle:
            worker.stop()

    def _try(self, kind: str, grammar: str) -> int:
        """Compile it where that can do no harm; returns the bytes that it takes.

        Raises:
            RequestError: it can't be compiled within the limits.
        """
        with self._free:
            with self._lock:
                worker = self._idle.pop() if self._idle else None
            if worker is None:
                _library()
                tokens, special = token_table(self._vocabulary)
                setup = {"tokens": [token.decode("latin-1") for token in tokens], "special": special}
                worker = LimitedProcess("llmc.runtime.constraints.worker", setup)
                if worker.first is None:
                    raise UsageError(f"the process that compiles constraints {worker.why()}")
            answer = worker.ask([kind, grammar])
            if answer is None:
                raise RequestError(f"can't be compiled within the limits: it {worker.why()}", kind)
            with self._lock:
                self._idle.append(worker)
        if "error" in answer:
            raise RequestError(_short(answer["error"]), kind)
        return int(answer["bytes"])


class GrammarConstraint:
    """A TokenConstraint by llguidance. ``never``: words of bits of tokens that may not come whatever the grammar says;
    their last bit is that of the library's end token, which no model has.
    """  # noqa: D205

    def __init__(self, matcher: LLMatcher, never: NDArray[np.uint32]) -> None:
        self._matcher, self._allowed = matcher, ~never

    def mask(self) -> NDArray[np.uint32]:
        """See TokenConstraint."""
        if self._matcher.is_stopped():
            self._check()
            return np.zeros_like(self._allowed)
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint32) & self._allowed
        self._check()
        return bits

    def accept(self, token: int) -> None:
        """See TokenConstraint."""
        self._matcher.consume_token(token)  # a failure shows in `mask`

    @property
    def is_complete(self) -> bool:
        """See TokenConstraint."""
        return bool(self._matcher.is_accepting())

    @property
    def is_finished(self) -> bool:
        """See TokenConstraint."""
        return bool(self._matcher.is_stopped()) and not self._matcher.is_error()

    def clone(self) -> GrammarConstraint:
        """See TokenConstraint."""
        return GrammarConstraint(self._matcher.deep_copy(), ~self._allowed)

    def _check(self) -> None:
        if self._matcher.is_error():
            raise ConstraintError(f"the constraint went beyond its limits: {_short(self._matcher.get_error())}")


def lark(spec: ConstraintSpec) -> str:
    """A specification as a grammar of llguidance."""
    if spec.kind == "json_object":
        grammar = f"start: {json_rule({'type': 'object'})}"
    elif spec.kind == "json_schema":
        grammar = f"start: {json_rule(json.loads(spec.text))}"
    elif spec.kind == "choice":
        grammar = f"start: {' | '.join(literal(choice) for choice in json.loads(spec.text))}"
    elif spec.kind == "regex":
        grammar = f"start: /{_library().regex_to_lark(spec.text, 'dw')}/"
    elif "%llguidance" in spec.text:
        raise RequestError("options (%llguidance) can't be set", spec.kind)
    else:
        grammar = spec.text
    return grammar + OPTIONS


def json_rule(schema: Any) -> str:
    """JSON of a schema, as part of a grammar."""
    if schema is False:
        raise RequestError("nothing satisfies the schema false", "json_schema")
    schema = {} if schema is True else schema
    return f"%json {json.dumps({**schema, 'x-guidance': {'whitespace_pattern': WHITESPACE}})}"


def literal(text: str) -> str:
    """A text as it is, as part of a grammar."""
    return "/" + "".join(c if c.isascii() and c.isalnum() else rf"\x{{{ord(c):x}}}" for c in text) + "/"


def token_table(vocabulary: Vocabulary) -> tuple[list[bytes], list[int]]:
    """The bytes of each token, and which are special. The last one is an end token that the vocabulary lacks."""
    size = vocabulary.size
    special = sorted(i for i in vocabulary.special_ids if i < size)
    return [*(vocabulary.piece(i) for i in range(size)), b"<end>"], [*special, size]


class _Table:
    """What the library reads."""

    is_tokenizer_wrapper, bos_token_id = True, None

    def __init__(self, tokens: list[bytes], special: list[int]) -> None:
        self.tokens, self.special_token_ids, self.eos_token_id = tokens, special, len(tokens) - 1

    def __call__(self, text: bytes) -> list[int]:
        """Only for texts that are forced, and for the library's own check of it: bytes by bytes will do."""
        if not hasattr(self, "_single"):
            self._single = {token: i for i, token in enumerate(self.tokens) if len(token) == 1}
        data = text if isinstance(text, bytes) else text.encode()
        return [self._single[data[i : i + 1]] for i in range(len(data)) if data[i : i + 1] in self._single]


def library_tokenizer(tokens: list[bytes], special: list[int]) -> LLTokenizer:
    """The tokenizer for the library."""
    table: Any = _Table(tokens, special)
    result: LLTokenizer = _library().LLTokenizer(table, n_vocab=len(tokens), eos_token=len(tokens) - 1)
    return result


def make_matcher(tokenizer: LLTokenizer, grammar: str, kind: str) -> LLMatcher:
    """Compile; whether that worked is in its get_error."""
    result: LLMatcher = _library().LLMatcher(tokenizer, grammar, log_level=0, limits=_limits(kind))
    return result


def _limits(kind: str) -> LLParserLimits:
    """So that one step takes milliseconds, at worst a tenth of a second, and a lexer at most some 40 MB."""
    free = kind == "grammar"  # may be ambiguous as it likes
    result: LLParserLimits = _library().LLParserLimits(
        max_items_in_row=500 if free else 2000,
        step_max_items=5_000 if free else 10_000,
        max_lexer_states=20_000,
        verbose_errors=False,
    )
    return result


def _library() -> Any:
    try:
        import llguidance
    except ImportError:
        raise UsageError("constraints need llguidance: install llmc-engine[serve]") from None
    return llguidance


def _bits(tokens: tuple[int, ...], size: int) -> NDArray[np.uint32]:
    flags = np.zeros((size + 31) // 32 * 32, bool)
    flags[[*tokens, size - 1]] = True
    return np.packbits(flags, bitorder="little").view(np.uint32)


def _short(problem: str) -> str:
    """The library's message without the lines of the grammar, and without what it adds for its own developers."""
    message = re.split(r"\n +\d+ \| ", problem.replace("<non-verbose/>", ""))[0]
    return " ".join(message.split())[:300]
