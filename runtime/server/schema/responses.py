"""/v1/responses: text only."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from llmc.runtime.request import INT32_MAX
from llmc.runtime.server.schema.base import IgnoredFields, ModelName, Priority, Salt, Strict, Timeout, bounded
from llmc.runtime.server.schema.chat import Message, Role, TemplateVariables
from llmc.runtime.server.schema.constraints import Schema


class InputText(Strict):
    """A part of a message; ``output_text``: of an earlier answer."""

    type: Literal["input_text", "output_text"]
    text: str
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None
    logprobs: Annotated[list[Any], Field(max_length=0)] | None = None


class InputMessage(Strict):
    """A turn."""

    role: Role
    content: str | Annotated[list[InputText], Field(max_length=1024, fail_fast=True)]
    type: Literal["message"] | None = None
    id: Annotated[str, Field(max_length=256)] | None = None
    status: Literal["completed", "incomplete", "in_progress"] | None = None

    def for_chat(self) -> Message:
        """As a chat has it."""
        parts = self.content
        text = parts if isinstance(parts, str) else "".join(part.text for part in parts)
        return Message(role=self.role, content=text)


class TextFormat(Strict):
    """Text, any JSON object, or JSON that satisfies a schema."""

    type: Literal["text", "json_object", "json_schema"]
    name: Annotated[str, Field(max_length=256)] | None = None
    schema_: Schema | None = Field(default=None, alias="schema")
    description: Annotated[str, Field(max_length=4096)] | None = None
    strict: bool | None = None


class TextOptions(Strict):
    """Of the answer."""

    format: TextFormat | None = None


class ResponseRequest(IgnoredFields):
    """Answer a text or a chat. Nothing is stored, so there is no earlier response to go on from."""

    model: ModelName | None = None
    input: str | Annotated[list[InputMessage], Field(min_length=1, max_length=4096, fail_fast=True)]
    instructions: str | None = None
    max_output_tokens: int | None = Field(default=None, ge=1, le=INT32_MAX)
    temperature: float | None = bounded("temperature")
    top_p: float | None = bounded("top_p")
    text: TextOptions | None = None
    stream: bool | None = None
    chat_template_kwargs: TemplateVariables | None = None
    cache_salt: Salt | None = None
    priority: Priority | None = None
    timeout: Timeout | None = None
    truncation: Literal["disabled"] | None = None

    @property
    def messages(self) -> list[Message]:
        """The chat."""
        system = [] if self.instructions is None else [Message(role="system", content=self.instructions)]
        if isinstance(self.input, str):
            return [*system, Message(role="user", content=self.input)]
        return [*system, *(message.for_chat() for message in self.input)]
