"""Phi 4 mini: <|tool_call|>, a list, <|/tool_call|>."""

from llmc.runtime.tool_calls.json_format import JsonFormat


class Phi(JsonFormat):
    """See the module."""

    name = "phi"
    openings = ("<|tool_call|>",)
    hints = ("<|/tool_call|>", "<|/tool|>")
    closing = "<|/tool_call|>"
    lists = True


FORMAT = Phi()
