"""What a constraint is: a specification that comes with a request, and what the sampler asks of a compiled one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from llmc.errors import LlmcError, RequestError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from llmc.runtime.tokenizer import Tokenizer

KINDS = ("json_object", "json_schema", "regex", "grammar", "choice")
MAX_BYTES, MAX_NESTING = 256 << 10, 64


class ConstraintError(LlmcError):
    """A compiled constraint can't go on; the request that has it ends with this error."""


class TokenConstraint(Protocol):
    """The tokens that may come next in one sequence. Not for several threads at once."""

    def mask(self) -> NDArray[np.uint32] | None:
        """A bit for each token that may come next, 32 a word, lowest first; tokens beyond its end may not come.

        End tokens are not in it: they may come where `is_complete`. None: all may come.

        Raises:
            ConstraintError: the limits for one step are exceeded.
        """
        ...

    def accept(self, token: int) -> None:
        """The token has come."""
        ...

    @property
    def is_complete(self) -> bool:
        """Whether the text may end here."""
        ...

    @property
    def is_finished(self) -> bool:
        """Whether it must."""
        ...

    def clone(self) -> TokenConstraint:
        """One in the same state, for another sequence."""
        ...


@dataclass(frozen=True)
class ConstraintSpec:
    """What the output has to be.

    Attributes:
        kind: ``json_object``: any object; ``json_schema``: JSON that satisfies the schema; ``regex``: a text that the
            expression (ECMA-262 syntax, without look-around and back-references) matches as a whole; ``grammar``: a
            text of the grammar in llguidance's Lark syntax; ``choice``: one of several texts.
        text: the schema as JSON, the expression, the grammar, or the choices as a JSON list.
        control_tokens: a grammar may name control tokens, as in ``<|python_tag|>``. Not for what clients send.

    Raises:
        RequestError: it is too large, too deeply nested, or not what the kind says.
    """

    kind: str
    text: str = ""
    control_tokens: bool = False

    def __post_init__(self) -> None:
        from llmc.runtime.constraints.checks import check

        if self.kind not in KINDS:
            raise RequestError(f"unknown kind {self.kind!r}; known: {', '.join(KINDS)}", "constraint")
        check(self.kind, self.text)

    @staticmethod
    def of(value: Any) -> ConstraintSpec | None:
        """From JSON: an object with one key, the kind, such as ``{"regex": "[0-9]+"}``. Empty texts: no constraint.

        Raises:
            RequestError: names the kind as the field.
        """
        if value is None or isinstance(value, ConstraintSpec):
            return value
        if not isinstance(value, Mapping):
            raise RequestError(f"expected an object with one of {', '.join(KINDS)}", "constraint")
        given = {kind: v for kind, v in value.items() if v is not None and v != ""}
        if unknown := set(given) - set(KINDS):
            raise RequestError(f"unknown kind {min(unknown)!r}; known: {', '.join(KINDS)}", "constraint")
        if len(given) > 1:
            raise RequestError(f"only one of {' and '.join(given)} can hold", "constraint")
        for kind, content in given.items():
            return _spec(kind, content)
        return None


def _spec(kind: str, content: Any) -> ConstraintSpec | None:
    if kind == "json_object":
        if not isinstance(content, bool):
            raise RequestError("expected true or false", kind)
        return ConstraintSpec(kind) if content else None
    if kind == "json_schema" and isinstance(content, str):
        from llmc.runtime.constraints.checks import parsed

        content = parsed(content, kind)
    if kind in ("json_schema", "choice"):
        try:
            return ConstraintSpec(kind, json.dumps(content, ensure_ascii=False, allow_nan=False))
        except (ValueError, TypeError, RecursionError) as problem:
            raise RequestError(f"not JSON, or nested too deeply ({problem})"[:200], kind) from None
    if not isinstance(content, str):
        raise RequestError(f"expected a text, found {type(content).__name__}", kind)
    return ConstraintSpec(kind, content)


def compile_constraint(spec: ConstraintSpec, tokenizer: Tokenizer) -> TokenConstraint:
    """The constraint at its start, from the tokenizer's cache or new. Safe to call from any thread; may take 2 s.

    Raises:
        RequestError: it can't be compiled within the limits; names the kind as the field.
        UsageError: the extra for it is not installed.
    """
    return tokenizer.grammars.compile(spec)
