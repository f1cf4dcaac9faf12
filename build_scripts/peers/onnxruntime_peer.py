"""ONNX Runtime GenAI: onnxruntime_peer.py DIRECTORY THREADS."""

import json
import sys
import time
from collections.abc import Sequence

import numpy as np
import onnxruntime_genai as genai

from peers.worker import Request, serve


class OnnxRuntime:
    """A converted model. On the CPU it has no batching in flight: requests run one after the other."""

    def __init__(self, directory: str, threads: int) -> None:
        config = genai.Config(directory)
        options = {"intra_op_num_threads": threads}
        config.overlay(json.dumps({"model": {"decoder": {"session_options": options}}}))
        self.model = genai.Model(config)

    def generate(self, requests: Sequence[Request]) -> list[list[float]]:
        """See Peer."""
        return [self._one(ids, new) for ids, new in requests]

    def _one(self, ids: list[int], new: int) -> list[float]:
        params = genai.GeneratorParams(self.model)
        length = len(ids) + new
        params.set_search_options(max_length=length, min_length=length, do_sample=False, batch_size=1)
        generator = genai.Generator(self.model, params)
        generator.append_tokens(np.array(ids, np.int32))
        times = []
        for _ in range(new):
            generator.generate_next_token()
            times.append(time.perf_counter())
        return times


if __name__ == "__main__":
    serve(lambda: OnnxRuntime(sys.argv[1], int(sys.argv[2])))
