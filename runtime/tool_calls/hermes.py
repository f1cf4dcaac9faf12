"""Qwen 2.5 and 3, Hermes and others: <tool_call>, an object, </tool_call>."""

from llmc.runtime.tool_calls.json_format import JsonFormat


class Hermes(JsonFormat):
    """See the module."""

    name = "hermes"
    openings = ("<tool_call>",)
    hints = ("<tool_call>",)
    closing = "</tool_call>"
    blank = "\n"


FORMAT = Hermes()
