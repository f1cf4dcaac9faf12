"""Stream one answer of a chat model: python examples/chat.py ENGINE QUESTION."""

import sys

from llmc import LLM, SamplingParams

llm = LLM(sys.argv[1])
messages = [{"role": "user", "content": sys.argv[2]}]
for piece in llm.stream(messages, SamplingParams(temperature=0, max_tokens=80)):
    print(piece.text, end="", flush=True)
print()
