"""What speculation gives on real prompts: the same answers, and how much sooner, with each proposer in turn.

    build_scripts/bench_spec.py PROMPTS ENGINE ... --spec ngram medusa draft=DIR [--new 128] [--count 80] [--batch 1 16]

PROMPTS is the question.jsonl of MT-bench (first turns are asked), or lines of {"prompt": ...}. Of each engine and batch
size, the same requests run without drafts and with each proposer, in turn; fails if a greedy token differs.
"""

import argparse
import itertools
import json
import statistics
import sys
import time
from pathlib import Path

from llmc import LLM, SamplingParams
from llmc.errors import LlmcError
from llmc.runtime.speculative.opening import Speculation

PLAIN = "off"


def read_prompts(path: Path, count: int) -> list[str]:
    """The first ones of the file."""
    lines = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    return [line["turns"][0] if "turns" in line else line["prompt"] for line in lines[:count]]


def answers(llm: LLM, prompts: list[str], new: int) -> tuple[list[tuple[int, ...]], float]:
    """Greedy token ids of each, and seconds."""
    params = SamplingParams(max_tokens=new)
    begin = time.perf_counter()
    if llm.tokenizer is not None and llm.tokenizer.chat_template is not None:
        results = llm.chat([[{"role": "user", "content": prompt}] for prompt in prompts], params)
    else:
        results = llm.generate(list(prompts), params)
    return [result.token_ids for result in results], time.perf_counter() - begin


def compare(engine: Path, names: list[str], prompts: list[str], size: int, arguments: argparse.Namespace) -> list[dict]:
    """One row for each proposer."""
    kinds = {name: Speculation(name, arguments.tokens) for name in names}
    llms = {
        name: LLM(engine, speculative=kind, threads=arguments.threads, max_sequences=size, prefix_cache=False)
        for name, kind in {PLAIN: Speculation(), **kinds}.items()
    }
    seconds: dict[str, list[float]] = {name: [] for name in llms}
    tokens = 0
    different: dict[str, list[int]] = {name: [] for name in names}
    for llm in llms.values():
        answers(llm, prompts[:1], 2)  # first touch of weights and memory
    for start in range(0, len(prompts), size):
        expected: list[tuple[int, ...]] = []
        for name, llm in llms.items():
            found, took = answers(llm, prompts[start : start + size], arguments.new)
            seconds[name].append(took)
            if name == PLAIN:
                expected = found
                tokens += sum(map(len, found))
            else:
                pairs = enumerate(zip(found, expected, strict=True), start)
                different[name] += [number for number, pair in pairs if pair[0] != pair[1]]
    rows = []
    for name in names:
        speculator = llms[name].scheduler.speculator
        assert speculator is not None, "it drafts"
        ratios = [plain / drafted for plain, drafted in zip(seconds[PLAIN], seconds[name], strict=True)]
        rows.append(
            {
                "engine": str(engine),
                "batch": size,
                "prompts": len(prompts),
                "tokens": tokens,
                "tokens_per_second": round(tokens / sum(seconds[name]), 2),
                "without": round(tokens / sum(seconds[PLAIN]), 2),
                "ratio": round(sum(seconds[PLAIN]) / sum(seconds[name]), 3),
                "ratio_median": round(statistics.median(ratios), 3),
                "different": different[name],
                **speculator.acceptance.to_json(),
            }
        )
    for llm in llms.values():
        llm.close()
    return rows


def main() -> int:
    """Run all; prints one line of JSON for each engine, batch size and proposer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts", type=Path)
    parser.add_argument("engines", type=Path, nargs="+")
    parser.add_argument("--spec", nargs="+", default=["ngram"])
    parser.add_argument("--tokens", type=int, help="nodes of a tree; default: adaptive")
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--count", type=int, default=80)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--threads", type=int)
    arguments = parser.parse_args()
    if PLAIN in arguments.spec:
        parser.error(f"--spec {PLAIN} is what every proposer is compared with; name those only")
    try:
        prompts, failed = read_prompts(arguments.prompts, arguments.count), False
    except (OSError, ValueError, KeyError) as problem:
        parser.error(f"{arguments.prompts}: not a file of prompts: {problem}")
    try:
        for engine, size in itertools.product(arguments.engines, arguments.batch):
            for row in compare(engine, arguments.spec, prompts, size, arguments):
                print(json.dumps(row), flush=True)
                failed |= bool(row["different"])
    except LlmcError as problem:
        print(f"error: {problem}", file=sys.stderr)
        return problem.exit_code
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
