"""What a build is asked for."""

from __future__ import annotations

from dataclasses import dataclass

from llmc.errors import UsageError
from llmc.plugins.paged_attention.storage import ALIASES as KV_ALIASES
from llmc.plugins.paged_attention.storage import KV_DTYPES


@dataclass(frozen=True)
class Limits:
    """What an engine is built for: tokens of a sequence, tokens of a step, sequences that run at the same time."""

    max_seq_len: int
    max_batch_tokens: int = 512
    max_sequences: int = 64

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not 1 <= value < 1 << 31:
                option = "--" + name.replace("_", "-")
                raise UsageError(f"{option} {value}: expected a number from 1 to 2147483647")


DTYPES = ("float32", "bfloat16", "float16")
"""What weights can be stored in; the KV cache also in the types of plugins/paged_attention/storage.py."""

DEFAULT_MAX_SEQ_LEN = 32768
"""The longest sequence of an engine, unless the model's own limit is lower or the user asks for another."""

BLOCK_SIZE = 16
"""Positions of a block of the paged KV cache."""


@dataclass(frozen=True)
class BuildConfig:
    """What the user asks for.

    ``max_seq_len`` None: the model's limit, at most DEFAULT_MAX_SEQ_LEN. ``dtype`` and ``kv_dtype`` "auto": that of the
    checkpoint, and that of the weights.
    """

    target: str = "cpu"
    dtype: str = "auto"
    kv_dtype: str = "auto"
    max_seq_len: int | None = None
    max_batch_tokens: int = 512
    max_sequences: int = 64
    quantization: str = "none"
    allow_hard_links: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "kv_dtype", KV_ALIASES.get(self.kv_dtype, self.kv_dtype))
        for option, value, known in (("--dtype", self.dtype, DTYPES), ("--kv-dtype", self.kv_dtype, KV_DTYPES)):
            if value not in ("auto", *known):
                raise UsageError(f"{option} {value}: unknown; known: auto, {', '.join(known)}")
        if self.quantization != "none":
            raise UsageError(f"--quant {self.quantization}: not supported by this version; known: none")
        Limits(self.max_seq_len or 1, self.max_batch_tokens, self.max_sequences)

    def limits(self, model_limit: int | None) -> Limits:
        """The limits for a model that was made for so many positions (None: for any number)."""
        longest = self.max_seq_len or min(model_limit or DEFAULT_MAX_SEQ_LEN, DEFAULT_MAX_SEQ_LEN)
        return Limits(longest, self.max_batch_tokens, self.max_sequences)
