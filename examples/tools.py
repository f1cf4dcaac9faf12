"""A call of a function, forced and parsed: python examples/tools.py ENGINE (its chat template has to know tools)."""

import json
import sys

from llmc import LLM, SamplingParams
from llmc.runtime.tool_calls import ToolCallParser, find_format, joined, tool_constraint

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 30}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
llm = LLM(sys.argv[1])
template = llm.tokenizer.chat_template
tool_format = find_format(template.source if template else None, None if template else "hermes")
if tool_format is None:
    sys.exit("the chat template of this engine teaches no calls")
params = SamplingParams(
    constraint=tool_constraint(tool_format, [WEATHER], llm.tokenizer, several=False), max_tokens=400
)
(result,) = llm.chat([{"role": "user", "content": "What is the weather in Paris?"}], params, tools=[WEATHER])
parser = ToolCallParser(tool_format, [WEATHER])
text, calls = joined(parser.feed(result.text, final=True))
for call in calls:
    print(call.name, json.loads(call.arguments))
print(text)
llm.close()
