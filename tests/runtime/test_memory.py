"""The host's memory does not grow with the number of requests."""

from __future__ import annotations

import gc
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmc.runtime.request import SamplingParams

STATUS = Path("/proc/self/status")


def anonymous_bytes() -> int:
    """Memory that no file stands for, swapped out or not."""
    gc.collect()
    found = re.findall(r"(?:RssAnon|VmSwap):\s+(\d+) kB", STATUS.read_text())
    return sum(map(int, found)) << 10


@pytest.mark.skipif(not STATUS.exists(), reason="needs Linux's /proc")
def test_lif_08_two_thousand_mixed_requests(kit: Any) -> None:
    def model(history: tuple[int, ...]) -> Any:
        logits = kit.one_hot(3 + sum(history) % 300)
        if history[0] == 7:
            logits[5] = np.nan
        return logits

    llm = kit.llm(model, num_blocks=64)
    sizes = []
    for number in range(2000):
        prompt = [7 if number % 10 == 3 else 8, *([9] * (number % 30)), number % 300, 5]
        if number % 10 == 4:
            llm.add_embedding(prompt, "mean")
        else:
            stop = ["zz"] if number % 10 == 5 else []
            llm.add_request(
                prompt, SamplingParams(max_tokens=4, n=1 + number % 2, temperature=1, logprobs=2, stop=stop)
            )
        if number % 10 == 6:
            llm.step()
            llm.abort(max(llm._requests, default=0))
        while llm.has_unfinished:
            llm.step()
        llm.executor.batches.clear()
        if number in (500, 1999):
            sizes.append(anonymous_bytes())
    assert sizes[1] - sizes[0] < 10 << 20
    assert not llm._requests
    assert llm.counts["kv_used"] == 0
