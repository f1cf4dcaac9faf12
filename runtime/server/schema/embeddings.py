"""/v1/embeddings."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import PlainValidator, WithJsonSchema

from llmc.runtime.server.schema.base import Ignored, ModelName, Salt, Strict
from llmc.runtime.server.schema.completions import PROMPT_SCHEMA, Prompt, prompts


class EmbeddingRequest(Strict):
    """Vectors of texts."""

    model: ModelName | None = None
    input: Annotated[list[Prompt], PlainValidator(prompts), WithJsonSchema(PROMPT_SCHEMA)]
    encoding_format: Literal["float", "base64"] | None = None
    pooling: Literal["last", "mean"] | None = None
    cache_salt: Salt | None = None
    user: Ignored | None = None
