"""What the output has to be: OpenAI's response_format, and fields for expressions, grammars and choices."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from llmc.errors import RequestError
from llmc.runtime.constraints.base import MAX_BYTES, ConstraintSpec
from llmc.runtime.server.errors import ApiError, from_request_error
from llmc.runtime.server.schema.base import Strict

Schema = Annotated[dict[str, Any], Field(max_length=4096)]
Pattern = Annotated[str, Field(max_length=MAX_BYTES)]
Choices = Annotated[list[Annotated[str, Field(min_length=1, max_length=4096)]], Field(max_length=1024, fail_fast=True)]


class JsonSchema(Strict):
    """A schema with a name."""

    name: Annotated[str, Field(max_length=256)]
    schema_: Schema | None = Field(default=None, alias="schema")
    description: Annotated[str, Field(max_length=4096)] | None = None
    strict: bool | None = Field(default=None, description="Accepted: a schema always holds strictly.")


class ResponseFormat(Strict):
    """Text, any JSON object, or JSON that satisfies a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class ConstraintFields(Strict):
    """At most one of them."""

    response_format: ResponseFormat | None = None
    guided_json: Schema | Pattern | None = Field(default=None, description="A JSON schema.")
    guided_regex: Pattern | None = None
    guided_grammar: Pattern | None = Field(default=None, description="In llguidance's Lark syntax.")
    guided_choice: Choices | None = None
    regex: Pattern | None = Field(default=None, description="The same as guided_regex.")
    grammar: Pattern | None = Field(default=None, description="The same as guided_grammar.")

    def constraint(self) -> tuple[ConstraintSpec | None, Mapping[str, str]]:
        """The constraint, and what the engine's names of its kinds are called here. Empty texts: none.

        Raises:
            ApiError: 400, it is not what it should be, or there are two.
        """
        given: dict[str, tuple[str, Any]] = {}  # field: (kind, content)
        for field, kind in KINDS.items():
            if (value := getattr(self, field)) not in (None, ""):
                given[field] = (kind, value)
        response = self.response_format
        if response is not None and response.type == "json_object":
            given["response_format"] = ("json_object", True)
        elif response is not None and response.type == "json_schema":
            if response.json_schema is None:
                raise ApiError(400, "a json_schema is needed", param="response_format.json_schema")
            given["response_format"] = ("json_schema", response.json_schema.schema_ or {})
        if len(given) > 1:
            raise ApiError(400, f"only one of {' and '.join(given)} can hold", param=list(given)[-1])
        for field, (kind, content) in given.items():
            names = {kind: field}
            try:
                return ConstraintSpec.of({kind: content}), names
            except RequestError as problem:
                raise from_request_error(problem, names) from None
        return None, {}


KINDS = {
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "regex": "regex",
    "guided_grammar": "grammar",
    "grammar": "grammar",
    "guided_choice": "choice",
}


def arguments_of(text: str) -> Any:
    """The arguments of a call in a message, as templates want them.

    Raises:
        ApiError: 400, they are not JSON.
    """
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise ApiError(400, "arguments of a call are not JSON", param="messages") from None
