"""llmc itself: llmc_peer.py ENGINE THREADS."""

import sys
import time
from collections.abc import Sequence

from llmc import LLM, SamplingParams
from peers.worker import Request, serve


class Llmc:
    """An engine behind the public API."""

    def __init__(self, engine: str, threads: int) -> None:
        self.llm = LLM(engine, threads=threads, prefix_cache=False)  # rounds repeat their prompts

    def generate(self, requests: Sequence[Request]) -> list[list[float]]:
        """See Peer."""
        times: dict[int, list[float]] = {}
        for ids, new in requests:
            params = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True)
            times[self.llm.add_request(ids, params)] = []
        while self.llm.has_unfinished:
            for event in self.llm.step():
                times[event.request_id] += [time.perf_counter()] * len(event.token_ids)
        return list(times.values())


if __name__ == "__main__":
    serve(lambda: Llmc(sys.argv[1], int(sys.argv[2])))
