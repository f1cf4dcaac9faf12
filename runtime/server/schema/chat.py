"""/v1/chat/completions."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from llmc.runtime.request import INT32_MAX
from llmc.runtime.server.schema.base import ModelName, SamplingFields, Strict, bounded
from llmc.runtime.server.schema.constraints import ConstraintFields, Schema

Role = Annotated[str, Field(min_length=1, max_length=64)]
MAX_MESSAGES = 4096


class TextPart(Strict):
    """A part of a message."""

    type: Literal["text"]
    text: str


class FunctionCall(Strict):
    """A call that the model made; ``arguments`` is JSON in a string."""

    name: Annotated[str, Field(min_length=1, max_length=256)]
    arguments: str


class ToolCall(Strict):
    """One of a message's calls."""

    id: Annotated[str, Field(max_length=256)]
    type: Literal["function"]
    function: FunctionCall


class Message(Strict):
    """A turn."""

    role: Role
    content: str | Annotated[list[TextPart], Field(max_length=1024, fail_fast=True)] | None = None
    name: Annotated[str, Field(max_length=256)] | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=128, fail_fast=True)] | None = None
    tool_call_id: Annotated[str, Field(max_length=256)] | None = None
    refusal: str | None = None
    reasoning_content: str | None = None

    def for_template(self) -> dict[str, Any]:
        """As chat templates know it."""
        return self.model_dump(exclude_none=True, exclude={"refusal"}) | {"content": self._content()}

    def _content(self) -> Any:
        parts = self.content
        return [part.model_dump() for part in parts] if isinstance(parts, list) else parts


Messages = Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
TemplateVariables = Annotated[dict[Annotated[str, Field(max_length=64)], Any], Field(max_length=32)]


class Function(Strict):
    """A function that the model may call; ``parameters`` is a JSON schema."""

    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: Annotated[str, Field(max_length=16384)] | None = None
    parameters: Schema | None = None
    strict: bool | None = Field(default=None, description="Accepted, without effect.")


class Tool(Strict):
    """One of the tools."""

    type: Literal["function"]
    function: Function


class ToolName(Strict):
    """Which one."""

    name: Annotated[str, Field(min_length=1, max_length=256)]


class NamedTool(Strict):
    """The tool to call."""

    type: Literal["function"]
    function: ToolName


class ChatRequest(ConstraintFields, SamplingFields):
    """Answer a chat."""

    model: ModelName | None = None
    messages: Messages
    max_tokens: int | None = Field(default=None, ge=1, le=INT32_MAX)
    max_completion_tokens: int | None = Field(default=None, ge=1, le=INT32_MAX)
    logprobs: bool | None = None
    top_logprobs: int | None = bounded("logprobs")
    chat_template_kwargs: TemplateVariables | None = None
    tools: Annotated[list[Tool], Field(max_length=128, fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    modalities: Annotated[list[Literal["text"]], Field(max_length=1, fail_fast=True)] | None = None
