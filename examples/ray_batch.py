"""Offline batch on a Ray cluster: python examples/ray_batch.py ENGINE IN.jsonl OUT_FOLDER --replicas 2.

Each line of IN has a "prompt"; results have a "text" and a "finish_reason" beside it. Which replica computes a line,
and next to which others, changes nothing in it. Needs ray[data]; every machine has llmc-engine and ENGINE.
"""

from typing import Any

import click
import ray.data

from llmc import LLM, SamplingParams


class Generate:
    """A replica: loads the engine once, then takes batch after batch."""

    def __init__(self, engine: str, threads: int, max_tokens: int) -> None:
        self.llm, self.params = LLM(engine, threads=threads), SamplingParams(temperature=0, max_tokens=max_tokens)

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """The batch, with two more columns."""
        results = self.llm.generate([str(prompt) for prompt in batch["prompt"]], self.params)
        more = {"text": [r.text for r in results], "finish_reason": [str(r.finish_reason) for r in results]}
        return batch | more


@click.command()
@click.argument("engine", type=click.Path(exists=True, file_okay=False, resolve_path=True))
@click.argument("source", type=click.Path(exists=True, dir_okay=False))
@click.argument("target", type=click.Path(file_okay=False))
@click.option("--replicas", type=click.IntRange(1), default=2, show_default=True)
@click.option("--threads", type=click.IntRange(1), default=1, show_default=True, help="Of each replica.")
@click.option("--max-tokens", type=click.IntRange(1), default=32, show_default=True)
def main(engine: str, source: str, target: str, replicas: int, threads: int, max_tokens: int) -> None:
    """Read, generate, write."""
    lines = ray.data.read_json(source, lines=True).repartition(2 * replicas)
    workers = ray.data.ActorPoolStrategy(size=replicas)
    arguments = (engine, threads, max_tokens)
    results = lines.map_batches(Generate, fn_constructor_args=arguments, batch_size=64, compute=workers)
    results.write_json(target)


if __name__ == "__main__":
    main()
