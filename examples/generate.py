"""Generate text with an engine: python examples/generate.py ENGINE."""

import sys

from llmc import LLM, SamplingParams

llm = LLM(sys.argv[1])
prompts = ["The capital of France is", "Water boils at"]
for prompt, result in zip(prompts, llm.generate(prompts, SamplingParams(temperature=0, max_tokens=16)), strict=True):
    print(f"{prompt!r} -> {result.text!r} ({result.finish_reason})")
