"""Output of a given shape: python examples/structured.py ENGINE (needs llmc-engine[serve])."""

import json
import sys

from llmc import LLM, SamplingParams

CITY = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "inhabitants": {"type": "integer", "minimum": 0}},
    "required": ["name", "inhabitants"],
    "additionalProperties": False,
}
llm = LLM(sys.argv[1])
for constraint in ({"json_schema": CITY}, {"regex": "[A-Z][a-z]{2,9}"}, {"choice": ["yes", "no"]}):
    params = SamplingParams(constraint=constraint, max_tokens=200)
    (result,) = llm.generate("The largest city of Japan: ", params)
    ended = result.finish_reason == "stop"  # else max_tokens cut it
    print(json.loads(result.text) if ended and "json_schema" in constraint else result.text)
llm.close()
