"""The models and workloads that llmc and its peers are measured on. Speed does not depend on the weights' values."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """A decoder's sizes."""

    architecture: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    vocabulary: int
    rope_theta: float
    qkv_bias: bool = False


MODELS = {
    "smol135m": Shape("llama", 576, 30, 9, 3, 1536, 49152, 100000.0),
    "qwen05b": Shape("qwen2", 896, 24, 14, 2, 4864, 151936, 1000000.0, qkv_bias=True),
    "llama1b": Shape("llama", 2048, 16, 32, 8, 8192, 128256, 500000.0),
}

BATCH16 = (
    *((430, 128), (91, 17), (78, 249), (512, 222), (330, 24), (375, 193), (74, 41), (424, 106)),
    *((153, 20), (47, 217), (40, 104), (363, 175), (279, 173), (269, 54), (78, 62), (397, 45)),
)
"""(prompt, generated) tokens of 16 requests that are submitted at once."""

NEW_TOKENS = 128
LOAD_PROMPT = 16

WORKLOADS = {
    "prefill512": "tokens/s",  # of the prompt, until the first token
    "prefill2048": "tokens/s",
    "decode128": "tokens/s",  # of one sequence after a prompt of that length
    "decode2048": "tokens/s",
    "batch16": "tokens/s",  # generated, by 16 requests submitted at once
    "load": "s",  # from the start of the process to the first token of a prompt of 16
    "rss": "MB",  # most that was ever resident, in a process that ran prefill512 and decode128
}
FRESH = ("load", "rss")
"""Workloads that get a process of their own. Less of them is better."""


def prompt(length: int, vocabulary: int, seed: int = 0) -> list[int]:
    """Token ids that stand in for a text; the same for every peer."""
    return [(seed * 7919 + i * 104729 + 17) % (vocabulary - 300) + 280 for i in range(length)]
