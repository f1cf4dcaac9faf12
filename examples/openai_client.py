"""Chat and stream with the openai client: llmc serve ENGINE, then python examples/openai_client.py [URL]."""

import sys

from openai import OpenAI

client = OpenAI(base_url=sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1", api_key="none")
model = client.models.list().data[0].id
messages = [{"role": "user", "content": "Name three rivers."}]
answer = client.chat.completions.create(model=model, messages=messages, max_tokens=32, temperature=0)
print(answer.choices[0].message.content, f"({answer.usage.completion_tokens} tokens)")
for chunk in client.chat.completions.create(model=model, messages=messages, max_tokens=32, temperature=0, stream=True):
    for choice in chunk.choices:
        print(choice.delta.content or "", end="", flush=True)
print()
