"""llama.cpp through the low-level API of llama-cpp-python: llama_cpp_peer.py MODEL.gguf THREADS.

llama_cpp_peer.py quantize MODEL.gguf OUTPUT.gguf Q4_0 writes a model with all weights in that format.
"""

import ctypes
import sys
import time
from collections.abc import Sequence

import llama_cpp as api
import numpy as np

from peers.worker import Request, serve

BUDGET = 512  # tokens a step, prompt chunks and decodes together, as llama-server does it


@api.llama_log_callback
def _quiet(level: int, text: bytes, user_data: ctypes.c_void_p) -> None: ...


class LlamaCpp:
    """A model with 16 slots, flash attention and continuous batching."""

    def __init__(self, path: str, threads: int) -> None:
        api.llama_log_set(_quiet, ctypes.c_void_p(0))
        api.llama_backend_init()
        self.model = api.llama_model_load_from_file(path.encode(), api.llama_model_default_params())
        assert self.model, f"llama.cpp can't load {path}"
        self.vocabulary = api.llama_vocab_n_tokens(api.llama_model_get_vocab(self.model))
        params = api.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch, params.n_seq_max = 8192, BUDGET, BUDGET, 16
        params.n_threads = params.n_threads_batch = threads
        params.kv_unified = True
        params.flash_attn_type = 1
        self.context = api.llama_init_from_model(self.model, params)
        assert self.context, "llama.cpp can't make a context"
        self.batch = api.llama_batch_init(BUDGET, 0, 1)

    def generate(self, requests: Sequence[Request]) -> list[list[float]]:
        """See Peer."""
        api.llama_memory_clear(api.llama_get_memory(self.context), True)
        todo = [list(ids) for ids, _ in requests]
        done = [0] * len(requests)
        times: list[list[float]] = [[] for _ in requests]
        while running := [i for i, (_, new) in enumerate(requests) if len(times[i]) < new]:
            rows, room = [], BUDGET
            for i in sorted(running, key=lambda i: len(todo[i]) > 1):  # decodes first
                part = todo[i][:room]
                rows += [(token, done[i] + p, i, p + 1 == len(todo[i])) for p, token in enumerate(part)]
                room -= len(part)
            self._decode(rows)
            for row, (_, _, i, last) in enumerate(rows):
                done[i] += 1
                todo[i].pop(0)
                if last:
                    logits = api.llama_get_logits_ith(self.context, row)
                    todo[i] = [int(np.ctypeslib.as_array(logits, (self.vocabulary,)).argmax())]
                    times[i].append(time.perf_counter())
        return times

    def _decode(self, rows: list[tuple[int, int, int, bool]]) -> None:
        self.batch.n_tokens = len(rows)
        for r, (token, position, sequence, logits) in enumerate(rows):
            self.batch.token[r], self.batch.pos[r] = token, position
            self.batch.n_seq_id[r], self.batch.seq_id[r][0] = 1, sequence
            self.batch.logits[r] = logits
        status = api.llama_decode(self.context, self.batch)
        assert status == 0, f"llama_decode returned {status}"


def quantize(source: str, target: str, name: str) -> None:
    """Write a file whose matrices, the embedding too, have one format."""
    api.llama_log_set(_quiet, ctypes.c_void_p(0))
    params = api.llama_model_quantize_default_params()
    params.ftype = getattr(api, f"LLAMA_FTYPE_MOSTLY_{name}")
    params.pure = True
    status = api.llama_model_quantize(source.encode(), target.encode(), ctypes.byref(params))
    assert status == 0, f"llama_model_quantize returned {status}"


if __name__ == "__main__":
    if sys.argv[1] == "quantize":
        quantize(*sys.argv[2:])
    else:
        serve(lambda: LlamaCpp(sys.argv[1], int(sys.argv[2])))
