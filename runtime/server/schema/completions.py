"""/v1/completions."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, PlainValidator, WithJsonSchema

from llmc.runtime.request import INT32_MAX
from llmc.runtime.server.schema.base import ModelName, SamplingFields, bounded
from llmc.runtime.server.schema.constraints import ConstraintFields
from llmc.runtime.server.settings import MAX_SEQUENCES_OF_A_REQUEST

Prompt = str | list[int]


def prompts(value: Any) -> list[Prompt]:
    """One text or list of token ids, or several, as a list. By hand: the errors of a union would be one per entry."""
    entries = value if isinstance(value, list) and value and isinstance(value[0], str | list) else [value]
    if len(entries) > MAX_SEQUENCES_OF_A_REQUEST:
        raise ValueError(f"{len(entries)} prompts; at most {MAX_SEQUENCES_OF_A_REQUEST} are allowed")
    for entry in entries:
        is_ids = isinstance(entry, list) and entry and all(type(t) is int and 0 <= t <= INT32_MAX for t in entry)
        if not (isinstance(entry, str) or is_ids):
            raise ValueError("expected a text, a list of token ids, or a list of such")
    return entries


_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": INT32_MAX}, "minItems": 1}
PROMPT_SCHEMA = {
    "anyOf": [
        {"type": "string"},
        _IDS,
        {
            "type": "array",
            "items": {"anyOf": [{"type": "string"}, _IDS]},
            "minItems": 1,
            "maxItems": MAX_SEQUENCES_OF_A_REQUEST,
        },
    ]
}


class CompletionRequest(ConstraintFields, SamplingFields):
    """Continue a prompt."""

    model: ModelName | None = None
    prompt: Annotated[list[Prompt], PlainValidator(prompts), WithJsonSchema(PROMPT_SCHEMA)]
    max_tokens: int | None = bounded("max_tokens")
    best_of: int | None = bounded("best_of")
    logprobs: int | None = bounded("logprobs")
    prompt_logprobs: int | None = bounded("prompt_logprobs")
    echo: bool | None = Field(default=None, description="The text begins with the prompt.")
