"""Granite 3: <|tool_call|> and a list."""

from llmc.runtime.tool_calls.json_format import JsonFormat


class Granite(JsonFormat):
    """See the module."""

    name = "granite"
    openings = ("<|tool_call|>", "<tool_call>")
    hints = ("<|tool_call|>",)
    lists = True


FORMAT = Granite()
