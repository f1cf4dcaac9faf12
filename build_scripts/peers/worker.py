"""What every worker process does: answer workloads, one line of JSON each, until its input ends."""

import json
import os
import resource
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from peers.workloads import BATCH16, FRESH, LOAD_PROMPT, NEW_TOKENS, prompt

Request = tuple[list[int], int]
"""(prompt ids, tokens to generate)."""

LEAST_SECONDS = 1.0
"""A workload is repeated for so long: others have run since the last one, and emptied the caches."""


class Peer(Protocol):
    """One inference engine, loaded with one model."""

    def generate(self, requests: Sequence[Request]) -> list[list[float]]:
        """Run all requests at once, greedily, without an early stop; each one's token times (perf_counter seconds)."""
        ...


def measure(peer: Peer, workload: str, vocabulary: int) -> float:
    """The workload's figure: tokens a second; for "load" nothing, for "rss" megabytes."""
    if workload == "load":
        peer.generate([(prompt(LOAD_PROMPT, vocabulary), 1)])
        return 0
    if workload == "rss":
        measure(peer, "prefill512", vocabulary)
        measure(peer, "decode128", vocabulary)
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    if workload == "batch16":
        requests = [(prompt(n, vocabulary, i), new) for i, (n, new) in enumerate(BATCH16)]
        start = time.perf_counter()
        times = peer.generate(requests)
        assert [len(t) for t in times] == [new for _, new in BATCH16], "some tokens are missing"
        return sum(map(len, times)) / (max(t[-1] for t in times) - start)
    if workload.startswith("prefill"):
        length = int(workload.removeprefix("prefill"))
        start = time.perf_counter()
        ((first,),) = peer.generate([(prompt(length, vocabulary), 1)])
        return length / (first - start)
    length = int(workload.removeprefix("decode"))
    (times,) = peer.generate([(prompt(length, vocabulary), NEW_TOKENS + 1)])
    assert len(times) == NEW_TOKENS + 1, "some tokens are missing"
    return NEW_TOKENS / (times[-1] - times[0])


def repeat(peer: Peer, workload: str, vocabulary: int) -> float:
    """The median figure of as many runs as LEAST_SECONDS take; of one, if the process is there for that alone."""
    end = time.perf_counter() + LEAST_SECONDS
    figures = [measure(peer, workload, vocabulary)]
    while workload not in FRESH and time.perf_counter() < end:
        figures.append(measure(peer, workload, vocabulary))
    return statistics.median(figures)


def serve(load: Callable[[], Peer]) -> None:
    """Read "WORKLOAD VOCABULARY" from standard input, write figures to standard output."""
    figures = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # some peers print what they do
    peer = load()
    for line in sys.stdin:
        workload, vocabulary = line.split()
        print(json.dumps(repeat(peer, workload, int(vocabulary))), file=figures, flush=True)
