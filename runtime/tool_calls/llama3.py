"""Llama 3.1 to 3.3: the whole answer is an object, or several with semicolons, perhaps behind <|python_tag|>."""

from llmc.runtime.tool_calls.json_format import JsonFormat


class Llama3(JsonFormat):
    """See the module."""

    name = "llama3"
    openings = ("{", "<|python_tag|>", ";")
    hints = ("<|python_tag|>", '"parameters": dictionary of argument name')
    at_start = True
    key = "parameters"
    separator = "; "


FORMAT = Llama3()
