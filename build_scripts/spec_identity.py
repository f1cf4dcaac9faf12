"""Greedy answers with drafts are those without, token by token, alone and many at once.

    build_scripts/spec_identity.py PROMPTS ENGINE ... --results FILE [--spec ngram medusa@8 draft=DIR] [--new 128]

"@8": trees of so many nodes in every step, instead of what pays: much is compared where drafts are seldom right, too.
PROMPTS is as for bench_spec.py. A line of JSON for each engine, proposer, batch and group of prompts is added to FILE;
what is there already is not run again. All is compared with the answers of each prompt alone, without drafts.
A batch is mixed: a group's prompts come at once and wait until one of so many places is free. Fails if a token differs.
"""

import argparse
import hashlib
import itertools
import json
import sys
from pathlib import Path
from typing import Any

from bench_spec import PLAIN, answers, read_prompts
from llmc import LLM
from llmc.errors import LlmcError
from llmc.runtime.speculative.opening import Speculation

Key = tuple[str, str, int, int]


class Results:
    """The lines of a file, by what they are of."""

    def __init__(self, path: Path, asked: dict[str, Any]) -> None:
        self.asked, self._path = asked, path
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        if lines and not lines[-1].endswith("\n"):  # it was cut off
            path.write_text("".join(lines := lines[:-1]))
        rows = [json.loads(line) for line in lines]
        self.rows = {self._key(row): row for row in rows if asked.items() <= row.items()}

    def add(self, row: dict[str, Any]) -> None:
        """Append it; what is printed leaves the tokens away."""
        row = self.asked | row
        self.rows[self._key(row)] = row
        with self._path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(json.dumps({key: value for key, value in row.items() if key != "answers"}), flush=True)

    @staticmethod
    def _key(row: dict[str, Any]) -> Key:
        return row["digest"], row["spec"], row["batch"], row["start"]


def _digest(engine: Path) -> str:
    return hashlib.sha256((engine / "engine.json").read_bytes()).hexdigest()[:16]


def compare(
    results: Results, engine: Path, name: str, size: int, groups: dict[int, list[str]], threads: int | None
) -> None:
    """Run what is missing of one engine, proposer and batch."""
    digest = _digest(engine)
    missing = [start for start in groups if (digest, name, size, start) not in results.rows]
    if not missing:
        return
    proposer, _, nodes = name.partition("@")
    speculation = Speculation(proposer, int(nodes) if nodes else None)
    llm = LLM(engine, speculative=speculation, threads=threads, max_sequences=size)
    counted = llm.scheduler.statistics
    for start in missing:
        before = counted.drafted, counted.accepted
        found, _ = answers(llm, groups[start], results.asked["new"])
        row = {"engine": str(engine), "digest": digest, "spec": name, "batch": size, "start": start}
        row["tokens"] = sum(map(len, found))
        if name == PLAIN:
            results.add(row | {"different": [], "answers": found})
            continue
        expected = results.rows[digest, PLAIN, 1, start]["answers"]
        pairs = enumerate(zip(found, expected, strict=True), start)
        results.add(
            row
            | {"different": [number for number, (one, other) in pairs if list(one) != list(other)]}
            | {"drafted": counted.drafted - before[0], "accepted": counted.accepted - before[1]}
        )
    llm.close()


def main() -> int:
    """Run all that is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts", type=Path)
    parser.add_argument("engines", type=Path, nargs="+")
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--spec", nargs="+", default=["ngram"])
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--count", type=int, default=80)
    parser.add_argument("--group", type=int, default=20, help="prompts of a line")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--threads", type=int)
    arguments = parser.parse_args()
    prompts = read_prompts(arguments.prompts, arguments.count)
    groups = {start: prompts[start : start + arguments.group] for start in range(0, len(prompts), arguments.group)}
    results = Results(arguments.results, {"new": arguments.new, "group": arguments.group})
    asked = [(PLAIN, 1), *itertools.product(arguments.spec, arguments.batch)]
    try:
        for engine, (name, size) in itertools.product(arguments.engines, asked):
            compare(results, engine, name, size, groups, arguments.threads)
    except (OSError, ValueError, LlmcError) as problem:
        print(f"error: {problem}", file=sys.stderr)
        return getattr(problem, "exit_code", 4)
    wanted = [(_digest(e), *pair, n) for e, pair, n in itertools.product(arguments.engines, asked, groups)]
    return int(any(results.rows[key]["different"] for key in wanted))


if __name__ == "__main__":
    raise SystemExit(main())
