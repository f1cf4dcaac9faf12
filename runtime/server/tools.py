"""Functions that a chat offers to the model: in its prompt, as a constraint, and as calls in the answer."""

from __future__ import annotations

import uuid
from typing import Any

from llmc.errors import RequestError, UsageError
from llmc.runtime.constraints.base import ConstraintSpec
from llmc.runtime.server.errors import ApiError, from_request_error
from llmc.runtime.server.schema.chat import ChatRequest, NamedTool
from llmc.runtime.tokenizer import Tokenizer
from llmc.runtime.tool_calls import ToolCallParser, ToolDelta, find_format, tool_constraint
from llmc.runtime.tool_calls.choice import shows_control_tokens


class ToolUse:
    """The tools of one request. ``offered``: those that the prompt shows, None without any.

    Raises:
        ApiError: 400, the model has no known format of calls, or tool_choice names none of the tools.
    """

    def __init__(self, body: ChatRequest, tokenizer: Tokenizer, parser: str | None) -> None:
        self._choice, self._several = body.tool_choice, body.parallel_tool_calls is not False
        uses = bool(body.tools) and body.tool_choice != "none"
        tools = [tool.model_dump(exclude_none=True) for tool in body.tools or ()]
        self.offered: list[dict[str, Any]] | None = tools if uses else None
        self._tokenizer = tokenizer
        if not tools and body.tool_choice not in (None, "none"):
            raise ApiError(400, "there are no tools to choose from", param="tool_choice")
        template = tokenizer.chat_template
        self._format = find_format(template.source if template else None, parser) if uses else None
        if uses and self._format is None:
            raise ApiError(400, "no known format of calls for this model; see --tool-parser", param="tools")

    @property
    def skip_special_tokens(self) -> bool:
        """Off where control tokens mark calls."""
        return self._format is None or not shows_control_tokens(self._format, self._tokenizer)

    def constraint(self) -> ConstraintSpec | None:
        """What makes the model call: for ``required``, or a function that is named.

        Raises:
            ApiError: 400.
        """
        if self._format is None or self._choice in (None, "auto", "none"):
            return None
        name = self._choice.function.name if isinstance(self._choice, NamedTool) else None
        try:
            return tool_constraint(self._format, self.offered or (), self._tokenizer, name=name, several=self._several)
        except UsageError as problem:
            raise ApiError(400, str(problem), param="tool_choice") from None
        except RequestError as problem:
            raise from_request_error(problem, {"grammar": "tools"}) from None

    def reader(self) -> CallReader:
        """For one choice of the answer."""
        parser = None if self._format is None else ToolCallParser(self._format, self.offered or ())
        return CallReader(parser, self._several)


class CallReader:
    """Splits what the model writes into text and calls. ``found``: whether there was a call."""

    def __init__(self, parser: ToolCallParser | None, several: bool) -> None:
        self._parser, self._several, self.found = parser, several, False

    def feed(self, text: str, *, final: bool) -> tuple[str, list[dict[str, Any]]]:
        """What the next part brings: (text, parts of calls in OpenAI's shape, the first of each with its name)."""
        if self._parser is None:
            return text, []
        deltas = self._parser.feed(text, final=final)
        calls = [_part(d) for d in deltas if d.of_call and (self._several or d.index == 0)]
        self.found |= bool(calls)
        return "".join(d.text for d in deltas), calls


def _part(delta: ToolDelta) -> dict[str, Any]:
    if delta.name is None:
        return {"index": delta.index, "function": {"arguments": delta.arguments}}
    function = {"name": delta.name, "arguments": delta.arguments}
    return {"index": delta.index, "id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}
