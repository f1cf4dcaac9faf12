"""What a format of calls is, and the parser of a stream, which is the same for all of them."""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeVar

from llmc.errors import LlmcError
from llmc.runtime import strict

Tools = Sequence[Mapping[str, Any]]
"""As in requests: ``{"type": "function", "function": {"name": ..., "parameters": schema}}``."""


@dataclass(frozen=True)
class Call:
    """A function and its arguments, a JSON object in a string."""

    name: str
    arguments: str


@dataclass(frozen=True)
class ToolDelta:
    """What a part of a stream brings: ``text`` that is no call, or more of call number ``index`` of the answer.

    The first delta of a call has its name; its arguments are those of all its deltas, joined.
    """

    text: str = ""
    index: int = 0
    name: str | None = None
    arguments: str = ""

    @property
    def of_call(self) -> bool:
        """Whether it is not text."""
        return self.name is not None or bool(self.arguments)


class Source:
    """Text that comes in pieces. ``held``: what is not understood yet; ``final``: nothing follows."""

    def __init__(self) -> None:
        self.held, self.final = "", False

    def take(self, size: int) -> str:
        """Remove that many characters from the front."""
        text, self.held = self.held[:size], self.held[size:]
        return text


Result = TypeVar("Result")
Steps = Generator[ToolDelta | None, None, Result]
"""Reads from a source; gives None where it goes on with the next piece. See `more`."""


class ToolFormat(ABC):
    """How a family of models writes calls.

    Attributes:
        name: for ``--tool-parser``.
        openings: what calls begin with. One that is a control token of the model is seen in its text only with
            skip_special_tokens off.
        at_start: they can only be the whole answer, and only of functions that were offered: else it is text.
    """

    name: ClassVar[str]
    openings: ClassVar[tuple[str, ...]]
    at_start: ClassVar[bool] = False

    @abstractmethod
    def fits(self, template: str) -> bool:
        """Whether a chat template teaches this format."""

    @abstractmethod
    def read(self, source: Source, tools: Tools) -> Steps[None]:
        """Read the calls that begin with the opening at the front; if there is none, take and give nothing.

        A name is given once it is certain that this is a call. There is no way back then: one that the model does not
        end well has arguments that are no JSON. What is given in all does not depend on the pieces.
        """

    @abstractmethod
    def grammar(self, tools: Tools, token: Callable[[str], str], *, several: bool) -> str:
        """Calls of one of the tools as a grammar; ``token`` makes the part of a text that may be a control token."""


class ToolCallParser:
    """Takes the text of an answer in any pieces; what it gives, joined, does not depend on the pieces.

    Text that could still become a call is held back. Blanks after a call are nothing.
    """

    def __init__(self, tool_format: ToolFormat, tools: Tools) -> None:
        self._format, self._tools = tool_format, tools
        self._source, self._count = Source(), 0
        self._steps: Steps[None] | None = None
        self._before, self._opened, self._begun = "", "", False  # of these steps: is it a call?
        self._plain, self._blank = False, False  # no more calls; what is blank now is nothing
        self._opening = re.compile("|".join(map(re.escape, sorted(tool_format.openings, key=len, reverse=True))))

    @property
    def found(self) -> bool:
        """Whether there was a call."""
        return self._count > 0

    def feed(self, text: str, *, final: bool = False) -> list[ToolDelta]:
        """The next piece; at the ``final`` one, what could have become a call is text."""
        self._source.held += text
        self._source.final = final
        return self._advance()

    def _advance(self) -> list[ToolDelta]:
        deltas: list[ToolDelta] = []
        source = self._source
        while source.held or (self._steps is not None and source.final):
            if self._steps is not None:
                if not self._read(self._steps, deltas):
                    break
            elif self._blank:
                source.held = source.held.lstrip()
                self._blank = not source.held
            elif self._plain:
                _give(deltas, ToolDelta(text=source.take(len(source.held))))
            elif not self._at_opening(deltas):
                break
        return deltas

    def _at_opening(self, deltas: list[ToolDelta]) -> bool:
        """Begin to read at the next opening; False: there is none yet."""
        source = self._source
        if self._format.at_start:
            blank = len(source.held) - len(source.held.lstrip())
            match = self._opening.match(source.held, blank)
            if match is None:
                self._plain = source.final or not any(o.startswith(source.held[blank:]) for o in self._format.openings)
                return self._plain
            self._before = source.take(blank)
        else:
            match = self._opening.search(source.held)
            size = (
                match.start()
                if match
                else len(source.held) - (0 if source.final else cut_off(source.held, *self._format.openings))
            )
            if size:
                _give(deltas, ToolDelta(text=source.take(size)))
            if match is None:
                return False
        self._opened, self._begun = match[0], False
        self._steps = self._format.read(source, self._tools)
        return True

    def _read(self, steps: Steps[None], deltas: list[ToolDelta]) -> bool:
        """Go on reading; False: up to the next piece."""
        for delta in steps:
            if delta is None:
                assert not self._source.final, "there is nothing to wait for"
                return False
            self._begun = True
            self._count += delta.name is not None
            _give(deltas, replace(delta, index=self._count - 1))
        self._steps = None
        if self._begun:
            self._blank = True
        else:
            self._plain = self._format.at_start
            _give(deltas, ToolDelta(text=self._before + self._source.take(len(self._opened))))
        return True


def _give(deltas: list[ToolDelta], delta: ToolDelta) -> None:
    """Add it, to the last one if that is of the same text or call."""
    last = deltas[-1] if deltas else None
    if last is None or delta.name is not None or last.of_call != delta.of_call:
        deltas.append(delta)
    else:
        deltas[-1] = replace(last, text=last.text + delta.text, arguments=last.arguments + delta.arguments)


def joined(deltas: Iterable[ToolDelta]) -> tuple[str, list[Call]]:
    """The text and the calls that deltas make."""
    text, calls = "", list[Call]()
    for delta in deltas:
        text += delta.text
        if delta.name is not None:
            calls.append(Call(delta.name, delta.arguments))
        elif delta.arguments:
            calls[delta.index] = replace(calls[delta.index], arguments=calls[delta.index].arguments + delta.arguments)
    return text, calls


# -- parts that formats share ------------------------------------------------------------------------------------------


class Nesting:
    """Finds the end of a value in brackets that comes in pieces. ``depth``: of brackets that are open before it."""

    def __init__(self, brackets: str = "{}[]", quotes: str = '"', depth: int = 0) -> None:
        self._marks = re.compile(f"[{re.escape(brackets + quotes)}\\\\]")
        self._opening, self._quotes, self._depth = brackets[::2], quotes, depth
        self._quote, self._escaped = "", False

    def end(self, text: str, start: int = 0) -> int | None:
        """Where it ends in the next piece, which begins at ``start`` of the text; None: later."""
        if start == len(text):
            return None
        at = start + self._escaped
        for match in self._marks.finditer(text, at):
            mark = match[0]
            if match.start() < at:
                continue
            if self._quote:
                at = match.end() + (mark == "\\")
                self._quote = "" if mark == self._quote else self._quote
            elif mark in self._quotes:
                self._quote = mark
            elif mark != "\\":
                self._depth += 1 if mark in self._opening else -1
                if self._depth == 0:
                    return match.end()
        self._escaped = at > len(text)
        return None


def cut_off(text: str, *wholes: str) -> int:
    """Length of the longest end of the text that only begins one of these."""
    longest = max(map(len, wholes)) - 1
    return next((n for n in range(min(longest, len(text)), 0, -1) if any(w.startswith(text[-n:]) for w in wholes)), 0)


def more(source: Source) -> Steps[bool]:
    """Wait for the next piece; False: there is none."""
    if source.final:
        return False
    yield None
    return True


def skip(source: Source, *texts: str) -> Steps[str | None]:
    """Drop blanks and the one of these texts that follows; which, or None. One that the end cuts off is dropped too."""
    while True:
        source.held = source.held.lstrip()
        for text in texts:
            if source.held.startswith(text):
                return source.take(len(text))
        if not any(text.startswith(source.held) for text in texts):
            return None
        if not (yield from more(source)):
            source.held = ""
            return None


def verbatim(source: Source) -> Steps[None]:
    """The arguments at the front, an object, as they are written."""
    nesting = Nesting()
    while True:
        end = nesting.end(source.held)
        if source.held:
            yield ToolDelta(arguments=source.take(len(source.held) if end is None else end))
        if end is not None or not (yield from more(source)):
            return


def blanks(text: str, at: int) -> int:
    """Where the blanks at ``at`` end."""
    while at < len(text) and text[at].isspace():
        at += 1
    return at


def parsed(text: str) -> Any:
    """JSON, or None."""
    try:
        return strict.parse_json(text.encode(errors="replace"), "call", LlmcError)
    except LlmcError:
        return None


def call_of(value: Any) -> Call | None:
    """A call from ``{"name": ..., "arguments" or "parameters": {...}}``."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    arguments = parsed(arguments) if isinstance(arguments, str) else arguments
    return Call(value["name"], json.dumps(arguments, ensure_ascii=False)) if isinstance(arguments, dict) else None


def function(tool: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Name and schema of the arguments."""
    inner = tool.get("function", tool)
    return str(inner["name"]), dict(inner.get("parameters") or {"type": "object", "properties": {}})


def known(names: Iterable[str], tools: Tools) -> bool:
    """Whether all are functions that were offered."""
    return set(names) <= {function(tool)[0] for tool in tools}


def call_schema(tools: Tools, key: str) -> dict[str, Any]:
    """The JSON schema of a call as an object with a name, and arguments under ``key``."""
    each = [
        {
            "type": "object",
            "properties": {"name": {"const": name}, key: schema},
            "required": ["name", key],
            "additionalProperties": False,
        }
        for name, schema in map(function, tools)
    ]
    return each[0] if len(each) == 1 else {"anyOf": each}


def repeated(rule: str, separator: str, *, several: bool) -> str:
    """One, or one or more with something between."""
    return f"start: {rule} ({separator} {rule})*\n" if several else f"start: {rule}\n"
