"""What the prefix cache saves: the same load of shared prompts with and without it, in turns.

    build_scripts/bench_prefix.py ENGINE [--rounds 5] [--system 256] [--question 91] [--new 8] [--requests 32]

Each request is a system prompt that all share, a question of its own, and some tokens of answer; by default the prompts
have 3.5 times as many tokens as there are to compute. Prints requests/s of both and the ratio of each round, and fails
if an answer differs by a bit.
"""

import argparse
import json
import statistics
import time

import numpy as np

from llmc import LLM, SamplingParams


def load(llm: LLM, prompts: list[list[int]], new: int) -> tuple[float, list[object]]:
    """Seconds for all of them, submitted at once, and what came out."""
    start = time.perf_counter()
    results = llm.generate(prompts, SamplingParams(max_tokens=new, ignore_eos=True, logprobs=1))
    return time.perf_counter() - start, [(r.token_ids, r.logprobs) for r in results]


def main() -> None:
    """Run the rounds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine")
    for name, default in (("rounds", 5), ("system", 256), ("question", 91), ("new", 8), ("requests", 32)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--threads", type=int)
    arguments = parser.parse_args()
    engines = {on: LLM(arguments.engine, threads=arguments.threads, prefix_cache=on) for on in (False, True)}
    random = np.random.default_rng(0)

    def tokens(count: int) -> list[int]:
        return [int(t) for t in random.integers(300, engines[True].vocab_size - 20, count)]

    for llm in engines.values():
        load(llm, [tokens(16)], 2)  # first touch of weights and memory
    seconds: dict[bool, list[float]] = {False: [], True: []}
    for number in range(arguments.rounds):
        system = tokens(arguments.system)  # a new one each round: the first request of a round has to compute it
        prompts = [system + tokens(arguments.question) for _ in range(arguments.requests)]
        answers = {}
        for on in (False, True) if number % 2 else (True, False):
            taken, answers[on] = load(engines[on], prompts, arguments.new)
            seconds[on].append(taken)
        assert answers[True] == answers[False], "the prefix cache changed an answer"
    ratios = [off / on for off, on in zip(seconds[False], seconds[True], strict=True)]
    statistics_of = engines[True].scheduler.statistics
    total = arguments.requests * (arguments.system + arguments.question)
    report = {
        "prompt tokens per one to compute": total / (arguments.system + arguments.requests * arguments.question),
        "requests/s off": arguments.requests / statistics.median(seconds[False]),
        "requests/s on": arguments.requests / statistics.median(seconds[True]),
        "ratios": ratios,
        "median ratio": statistics.median(ratios),
        "share of prompt tokens found": statistics_of.prefix_hits / statistics_of.prefix_queries,
    }
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
