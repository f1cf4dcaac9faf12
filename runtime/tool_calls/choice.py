"""Which format a model has, and what ``tool_choice`` makes of its output."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmc.errors import UsageError
from llmc.runtime.constraints.base import ConstraintSpec
from llmc.runtime.constraints.grammars import literal
from llmc.runtime.tool_calls import deepseek, granite, hermes, llama3, mistral, phi, pythonic, qwen3_coder
from llmc.runtime.tool_calls.base import ToolFormat, Tools, function

if TYPE_CHECKING:
    from llmc.runtime.tokenizer import Tokenizer

FORMATS: dict[str, ToolFormat] = {
    module.FORMAT.name: module.FORMAT
    for module in (qwen3_coder, hermes, deepseek, mistral, phi, granite, pythonic, llama3)
}
"""The first one that a template fits is taken."""


def find_format(template: str | None, name: str | None = None) -> ToolFormat | None:
    """The format of a name, or the one that a chat template teaches; None: it teaches none.

    Raises:
        UsageError: there is no format of that name.
    """
    if name is not None:
        if name not in FORMATS:
            raise UsageError(f"there is no tool parser {name!r}; known: {', '.join(sorted(FORMATS))}")
        return FORMATS[name]
    return next((f for f in FORMATS.values() if template is not None and f.fits(template)), None)


def shows_control_tokens(tool_format: ToolFormat, tokenizer: Tokenizer) -> bool:
    """Whether calls can only be seen with skip_special_tokens off."""
    special = {tokenizer.vocabulary.piece(i).decode(errors="replace") for i in tokenizer.vocabulary.special_ids}
    return not special.isdisjoint(tool_format.openings)


def tool_constraint(
    tool_format: ToolFormat, tools: Tools, tokenizer: Tokenizer, *, name: str | None = None, several: bool = True
) -> ConstraintSpec:
    """The output is one call or more: tool_choice ``required``; of one function: ``name``.

    Raises:
        RequestError: the tools make no grammar within the limits.
        UsageError: there is no such function.
    """
    chosen = [tool for tool in tools if name is None or function(tool)[0] == name]
    if not chosen:
        raise UsageError(f"there is no tool {name!r}" if tools else "there are no tools")
    vocabulary = tokenizer.vocabulary
    special = {vocabulary.piece(i).decode(errors="replace"): i for i in vocabulary.special_ids}

    def token(text: str) -> str:
        return f"<[{special[text]}]>" if text in special else literal(text)

    text = tool_format.grammar(chosen, token, several=several and name is None)
    return ConstraintSpec("grammar", text, control_tokens=True)
