"""What every worker process does: answer workloads, one line of JSON each, until its input ends."""

import json
import sys
import time
from collections.abc import Sequence
from typing import Protocol

from peers.workloads import BATCH16, NEW_TOKENS, prompt

Request = tuple[list[int], int]
"""(prompt ids, tokens to generate)."""


class Peer(Protocol):
    """One inference engine, loaded with one model."""

    vocabulary: int

    def generate(self, requests: Sequence[Request]) -> list[list[float]]:
        """Run all requests at once, greedily, without an early stop; each one's token times (perf_counter seconds)."""
        ...


def measure(peer: Peer, workload: str) -> float:
    """The workload's figure, in tokens a second."""
    if workload == "batch16":
        requests = [(prompt(n, peer.vocabulary, i), new) for i, (n, new) in enumerate(BATCH16)]
        start = time.perf_counter()
        times = peer.generate(requests)
        return sum(map(len, times)) / (max(t[-1] for t in times) - start)
    if workload.startswith("prefill"):
        length = int(workload.removeprefix("prefill"))
        start = time.perf_counter()
        ((first,),) = peer.generate([(prompt(length, peer.vocabulary), 1)])
        return length / (first - start)
    length = int(workload.removeprefix("decode"))
    (times,) = peer.generate([(prompt(length, peer.vocabulary), NEW_TOKENS + 1)])
    return NEW_TOKENS / (times[-1] - times[0])


def serve(peer: Peer) -> None:
    """Read workload names from standard input, write figures to standard output."""
    for line in sys.stdin:
        print(json.dumps(measure(peer, line.strip())), flush=True)
