"""/tokenize and /detokenize."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from llmc.runtime.server.schema.base import ModelName, Strict, TokenId
from llmc.runtime.server.schema.chat import Messages, TemplateVariables


class TokenizeRequest(Strict):
    """A text or a chat to tokens."""

    model: ModelName | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = Field(default=None, description="Of a prompt: with what belongs around it.")
    add_generation_prompt: bool | None = None
    chat_template_kwargs: TemplateVariables | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Strict):
    """Tokens to text."""

    model: ModelName | None = None
    tokens: Annotated[list[TokenId], Field(fail_fast=True)]
