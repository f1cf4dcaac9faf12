"""Offline batch on a Ray cluster: python examples/ray_batch.py ENGINE IN.jsonl OUT_FOLDER [REPLICAS].

Each line of IN has a "prompt"; results have a "text" and a "finish_reason" beside it. Which replica computes a line,
and next to which others, changes nothing in it. Needs ray[data]; every machine has llmc-engine and ENGINE.
"""

import sys
from typing import Any

import ray.data

from llmc import LLM, SamplingParams

PARAMS = SamplingParams(temperature=0, max_tokens=32)


class Generate:
    """A replica: loads the engine once, then takes batch after batch."""

    def __init__(self, engine: str) -> None:
        self.llm = LLM(engine, threads=1)

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """The batch, with two more columns."""
        results = self.llm.generate([str(prompt) for prompt in batch["prompt"]], PARAMS)
        more = {"text": [r.text for r in results], "finish_reason": [str(r.finish_reason) for r in results]}
        return batch | more


def main(engine: str, source: str, target: str, replicas: str = "2") -> None:
    """Read, generate, write."""
    lines = ray.data.read_json(source, lines=True).repartition(2 * int(replicas))
    workers = ray.data.ActorPoolStrategy(size=int(replicas))
    lines.map_batches(Generate, fn_constructor_args=(engine,), batch_size=64, compute=workers).write_json(target)


if __name__ == "__main__":
    main(*sys.argv[1:])
