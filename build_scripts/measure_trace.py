"""Trace, fuse and lower a 70B-shaped Llama from its config alone; print seconds and peak resident memory as JSON."""

import json
import resource
import time

from transformers import LlamaConfig

from llmc.compiler.trace import trace

start = time.monotonic()
config = LlamaConfig(
    vocab_size=128256,
    hidden_size=8192,
    intermediate_size=28672,
    num_hidden_layers=80,
    num_attention_heads=64,
    num_key_value_heads=8,
    max_position_embeddings=131072,
    tie_word_embeddings=False,
)
trace(config, max_seq_len=32768)
rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
print(json.dumps({"seconds": round(time.monotonic() - start, 1), "peak_rss_mib": rss}))
