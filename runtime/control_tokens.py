"""Control tokens (such as <|im_end|>) in what users write: kept apart from those that the chat template writes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from llmc.errors import RequestError

FIRST, LAST = 0xF0000, 0xFFFFD
"""Private-use characters: each stands for the text of a control token; the last one for nothing."""


class ControlTokens:
    """Replaces the texts of control tokens by placeholders before a template is rendered, and back afterwards.

    Args:
        tokens: {text: id}.
    """

    def __init__(self, tokens: Mapping[str, int]) -> None:
        self.ids = frozenset(tokens.values())
        texts = sorted(tokens, key=lambda text: (-len(text), text))
        self._pattern = re.compile("|".join(map(re.escape, texts)) or r"(?!)")
        self._placeholder_of = {text: chr(FIRST + i) for i, text in enumerate(texts)}
        self._text_of = {placeholder: text for text, placeholder in self._placeholder_of.items()}
        self._hidden = re.compile(f"[{chr(FIRST)}-{chr(LAST)}]")
        self._heads = {text[:count] for text in texts for count in range(2, len(text))}
        self._tails = {text[-count:] for text in texts for count in range(2, len(text))}
        self._longest = max(map(len, texts), default=0)

    def hide(self, value: Any, key: str = "") -> Any:
        """A copy with placeholders in its strings, keys excepted.

        Raises:
            RequestError: it has a placeholder already.
        """
        if isinstance(value, str):
            if self.found(value):
                raise RequestError("private-use characters U+F0000 to U+FFFFD are not allowed", "messages")
            value = self._pattern.sub(lambda match: self._placeholder_of[match[0]], value)
            return (
                value if key == "role" else self._break_ends(value)
            )  # templates make tokens such as <|user|> of roles
        if isinstance(value, Mapping):
            return {k: self.hide(v, k) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return [self.hide(v, key) for v in value]
        return value

    def found(self, text: str) -> bool:
        """Whether there is a placeholder."""
        return self._hidden.search(text) is not None

    def reveal(self, text: str) -> str:
        """What the user wrote."""
        return self._hidden.sub(lambda match: self._text_of.get(match[0], ""), text)

    def _break_ends(self, text: str) -> str:
        """Break what could become a control token together with the string before or after this one."""
        for count in range(min(self._longest - 1, len(text)), 1, -1):
            if text[-count:] in self._heads:
                text = text[: 1 - count] + chr(LAST) + text[1 - count :]
                break
        for count in range(min(self._longest - 1, len(text)), 1, -1):
            if text[:count] in self._tails:
                return text[:1] + chr(LAST) + text[1:]
        return text
