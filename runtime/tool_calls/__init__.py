"""Calls of functions in what a model writes: one file for each format, found by the chat template or by name."""

from llmc.runtime.tool_calls.base import Call, ToolCallParser, ToolDelta, ToolFormat, joined
from llmc.runtime.tool_calls.choice import find_format, tool_constraint

__all__ = ["Call", "ToolCallParser", "ToolDelta", "ToolFormat", "find_format", "joined", "tool_constraint"]
