"""OpenVINO GenAI's continuous batching: openvino_peer.py DIRECTORY THREADS."""

import sys
import time
from collections.abc import Sequence

import numpy as np
import openvino
import openvino_genai as genai

from peers.worker import Request, serve


class OpenVino:
    """A converted model with paged attention, its own defaults for the types of activations and of the KV cache."""

    def __init__(self, directory: str, threads: int) -> None:
        scheduler = genai.SchedulerConfig()
        scheduler.max_num_batched_tokens, scheduler.max_num_seqs = 2048, 16
        scheduler.enable_prefix_caching = False
        properties = {"INFERENCE_NUM_THREADS": threads}
        self.pipeline = genai.ContinuousBatchingPipeline(directory, scheduler, "CPU", properties)
        self.requests = 0

    def generate(self, requests: Sequence[Request]) -> list[list[float]]:
        """See Peer."""
        handles = []
        for ids, new in requests:
            config = genai.GenerationConfig(max_new_tokens=new, min_new_tokens=new, ignore_eos=True, do_sample=False)
            tensor = openvino.Tensor(np.array([ids], np.int64))
            handles.append(self.pipeline.add_request(self.requests, tensor, config))
            self.requests += 1
        times: list[list[float]] = [[] for _ in requests]
        while self.pipeline.has_non_finished_requests():
            self.pipeline.step()
            now = time.perf_counter()
            for handle, stamps in zip(handles, times, strict=True):
                while handle.can_read():
                    stamps += [now] * sum(len(output.generated_ids) for output in handle.read().values())
        return times


if __name__ == "__main__":
    serve(lambda: OpenVino(sys.argv[1], int(sys.argv[2])))
