"""What a format of calls is, and the parser of a stream, which is the same for all of them."""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from llmc.errors import LlmcError
from llmc.runtime import strict

Tools = Sequence[Mapping[str, Any]]
"""As in requests: ``{"type": "function", "function": {"name": ..., "parameters": schema}}``."""


LOOK_ALWAYS = 256
"""Characters of a call that may be coming; beyond them it is looked at only when it could have ended."""


@dataclass(frozen=True)
class Call:
    """A function and its arguments, a JSON object in a string."""

    name: str
    arguments: str


@dataclass(frozen=True)
class ToolDelta:
    """What a part of a stream brings: text that is no call, or a whole call, number ``index`` of the answer."""

    text: str = ""
    call: Call | None = None
    index: int = 0


@dataclass(frozen=True)
class Taken:
    """The first ``length`` characters are these calls; without calls, they are text."""

    length: int
    calls: tuple[Call, ...] = ()


class ToolFormat(ABC):
    """How a family of models writes calls.

    Attributes:
        name: for ``--tool-parser``.
        openings: what calls begin with. One that is a control token of the model is seen in its text only with
            skip_special_tokens off.
        at_start: they can only be the whole answer, and only of functions that were offered: else it is text.
        ends: characters one of which completes a call; between them there is nothing to look for.
    """

    name: ClassVar[str]
    openings: ClassVar[tuple[str, ...]]
    at_start: ClassVar[bool] = False
    ends: ClassVar[str] = "}]>"

    @abstractmethod
    def fits(self, template: str) -> bool:
        """Whether a chat template teaches this format."""

    @abstractmethod
    def take(self, text: str, tools: Tools, *, final: bool) -> Taken | None:
        """What the text, which begins with an opening, begins with; None while that is not certain.

        What it says of a text that is not final it also says of every longer one.
        """

    @abstractmethod
    def grammar(self, tools: Tools, token: Callable[[str], str], *, several: bool) -> str:
        """Calls of one of the tools as a grammar; ``token`` makes the part of a text that may be a control token."""


class ToolCallParser:
    """Takes the text of an answer in any pieces; what it gives in the end does not depend on the pieces.

    A call comes when it is complete and right, so that one that turns out to be wrong can be text. Blanks after a call
    are nothing.
    """

    def __init__(self, tool_format: ToolFormat, tools: Tools) -> None:
        self._format, self._tools = tool_format, tools
        self._held, self._count = "", 0
        self._plain, self._blank = False, False  # no more calls; what is blank now is nothing
        heads = {opening[:n] for opening in tool_format.openings for n in range(1, len(opening))}
        self._heads, self._longest = heads, max(map(len, tool_format.openings))
        self._opening = re.compile("|".join(map(re.escape, sorted(tool_format.openings, key=len, reverse=True))))

    @property
    def found(self) -> bool:
        """Whether there was a call."""
        return self._count > 0

    def feed(self, text: str) -> list[ToolDelta]:
        """The next piece."""
        inside = len(self._held) > LOOK_ALWAYS and not any(c in self._format.ends for c in text)
        self._held += text
        return [] if inside else self._advance(final=False)

    def finish(self) -> list[ToolDelta]:
        """The end of the text: a call that is not complete is text."""
        return self._advance(final=True)

    def _advance(self, *, final: bool) -> list[ToolDelta]:
        deltas: list[ToolDelta] = []
        while self._held:
            if self._blank:
                self._held = self._held.lstrip()
                self._blank = not self._held
            elif self._plain:
                self._give_text(deltas, len(self._held))
            elif not self._at_opening(deltas, final) or not self._take(deltas, final):
                break
        return deltas

    def _at_opening(self, deltas: list[ToolDelta], final: bool) -> bool:
        """Bring an opening to the front; whether there is one, or at least something was done."""
        if self._format.at_start:
            rest = self._held.lstrip()
            if self._opening.match(rest):
                return True
            if not final and (not rest or rest in self._heads):
                return False
            self._plain = True
            return True
        match = self._opening.search(self._held)
        size = match.start() if match else len(self._held) - (0 if final else self._partial())
        if size:
            self._give_text(deltas, size)
        return match is not None

    def _take(self, deltas: list[ToolDelta], final: bool) -> bool:
        """Take the calls at the front, or the opening as text; False: more is needed."""
        if self._plain:
            return True
        blank = len(self._held) - len(self._held.lstrip()) if self._format.at_start else 0
        taken = self._format.take(self._held[blank:], self._tools, final=final)
        if taken is None and not final:
            return False
        if taken is None or not taken.calls:
            self._plain = self._format.at_start
            self._give_text(deltas, blank + (taken.length if taken else 1))
            return True
        for call in taken.calls:
            deltas.append(ToolDelta(call=call, index=self._count))
            self._count += 1
        self._held, self._blank = self._held[blank + taken.length :], True
        return True

    def _partial(self) -> int:
        """Length of the longest end of what is held that begins an opening."""
        for count in range(min(self._longest - 1, len(self._held)), 0, -1):
            if self._held[-count:] in self._heads:
                return count
        return 0

    def _give_text(self, deltas: list[ToolDelta], size: int) -> None:
        text, self._held = self._held[:size], self._held[size:]
        if deltas and deltas[-1].call is None:
            text = deltas.pop().text + text
        deltas.append(ToolDelta(text=text))


# -- parts that formats share ------------------------------------------------------------------------------------------

STRUCTURE = re.compile(r'"(?:[^"\\]|\\.)*"|"|[{}\[\]]', re.DOTALL)


def balanced(text: str, start: int) -> int | None:
    """Where the JSON object or list ends that begins at ``start``; None: it does not end."""
    depth = 0
    for match in STRUCTURE.finditer(text, start):
        if match[0] == '"':  # a string that does not end
            return None
        if match[0] in "{[":
            depth += 1
        elif match[0] in "}]":
            depth -= 1
            if depth == 0:
                return match.end()
    return None


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


def known(calls: Sequence[Call | None], tools: Tools) -> bool:
    """Whether all are of functions that were offered."""
    names = {function(tool)[0] for tool in tools}
    return all(call is not None and call.name in names for call in calls)


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
