"""What the bodies of all requests have in common: strict types, bounds from the engine's own tables."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from llmc.runtime.request import (
    INT32_MAX,
    INTEGERS,
    MAX_LOGIT_BIAS,
    MAX_STOP_IDS,
    MAX_STRING_BYTES,
    POSITIVE,
    REALS,
    STRINGS,
)
from llmc.runtime.request import LOGIT_BIAS_BOUND as BIAS

Text = Annotated[str, Field(min_length=1, max_length=MAX_STRING_BYTES)]
Stop = Annotated[list[Text], Field(max_length=STRINGS["stop"], fail_fast=True)]
BadWords = Annotated[list[Text], Field(max_length=STRINGS["bad_words"], fail_fast=True)]
TokenId = Annotated[int, Field(ge=0, le=INT32_MAX)]
StopIds = Annotated[list[TokenId], Field(max_length=MAX_STOP_IDS, fail_fast=True)]
BiasKey = Annotated[str, Field(pattern=r"^[0-9]{1,10}$")]
LogitBias = Annotated[dict[BiasKey, Annotated[float, Field(ge=-BIAS, le=BIAS)]], Field(max_length=MAX_LOGIT_BIAS)]
Ignored = Annotated[str, Field(max_length=4096, description="Accepted, without effect.")]
Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]],
    Field(max_length=16, description="Accepted, without effect."),
]
Salt = Annotated[
    str, Field(min_length=1, max_length=256, description="Only requests with the same salt share their prefixes.")
]
Priority = Annotated[
    int, Field(ge=0, le=100, description="Default 0; a higher one lets others go first, though not for ever.")
]
Timeout = Annotated[
    float,
    Field(gt=0, le=86400, description="Seconds until the answer is given up, if that is less than the server's own."),
]
ModelName = Annotated[str, Field(min_length=1, max_length=128, description="One of /v1/models; default: the first.")]


def bounded(name: str, default: Any = None) -> Any:
    """A field that has the bounds of the sampling parameter of this name."""
    low, high = (INTEGERS | REALS)[name]
    if name in POSITIVE:
        return Field(default=default, gt=low, le=high)
    return Field(default=default, ge=low, le=high)


class Strict(BaseModel):
    """An object whose fields are all known, and whose values are exactly of their types."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)


class StreamOptions(Strict):
    """Of a stream."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = Field(default=None, description="Accepted, without effect.")


class IgnoredFields(Strict):
    """OpenAI's fields that change no answer here."""

    user: Ignored | None = None
    metadata: Metadata | None = None
    store: bool | None = Field(default=None, description="Accepted, without effect: nothing is stored.")
    service_tier: Ignored | None = None
    safety_identifier: Ignored | None = None
    prompt_cache_key: Ignored | None = None
    prompt_cache_retention: Ignored | None = None


class SamplingFields(IgnoredFields):
    """How to continue, for chats and prompts."""

    temperature: float | None = bounded("temperature")
    top_p: float | None = bounded("top_p")
    top_k: int | None = bounded("top_k")
    min_p: float | None = bounded("min_p")
    repetition_penalty: float | None = bounded("repetition_penalty")
    presence_penalty: float | None = bounded("presence_penalty")
    frequency_penalty: float | None = bounded("frequency_penalty")
    seed: int | None = bounded("seed")
    n: int | None = bounded("n")
    min_tokens: int | None = bounded("min_tokens")
    logit_bias: LogitBias | None = None
    stop: Text | Stop | None = None
    stop_token_ids: StopIds | None = None
    bad_words: Text | BadWords | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    cache_salt: Salt | None = None
    priority: Priority | None = None
    timeout: Timeout | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    def sampling(self) -> dict[str, Any]:
        """Values for SamplingParams; OpenAI's default temperature is 1."""
        values = {name: getattr(self, name) for name in SAMPLING if getattr(self, name) is not None}
        return {"temperature": 1.0} | values

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with a chunk of usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)


SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "n",
    "min_tokens",
    "logit_bias",
    "stop",
    "stop_token_ids",
    "bad_words",
    "ignore_eos",
    "include_stop_str_in_output",
    "skip_special_tokens",
)
"""Fields that mean the same to the engine."""
