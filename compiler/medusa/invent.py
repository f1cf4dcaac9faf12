"""Prompts that a model writes itself: what it expects a user to say at the beginning of a chat (arXiv:2406.08464)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import TYPE_CHECKING

from llmc.runtime.request import SamplingParams

if TYPE_CHECKING:
    from llmc.runtime.llm import LLM
    from llmc.runtime.tokenizer import Tokenizer

ROUNDS = 3
"""So often new ones are asked for in place of those that are no prompts."""

MIN_P = 0.05
SHARE = 3
"""A prompt has at most one part in so many of the tokens that it shares with its answer."""


def invent(llm: LLM, count: int, length: int, seed: int) -> list[str]:
    """At most ``count`` different prompts of a chat; fewer if the model has written too little else.

    Args:
        llm: whose tokenizer has a chat template.
        count: how many.
        length: tokens of a prompt and its answer at most.
        seed: that they are drawn with.
    """
    assert llm.tokenizer is not None, "it has a chat template"
    begin, found = _before_a_user(llm.tokenizer), dict[str, None]()
    for number in range(ROUNDS):
        missing = range(count - len(found))
        params = [
            SamplingParams(
                max_tokens=max(1, length // SHARE - len(begin)),
                temperature=1.0,
                min_p=MIN_P,
                seed=(seed * ROUNDS + number) * 1_000_003 + i,
            )
            for i in missing
        ]
        results = llm.generate([begin for _ in missing], params)
        found |= dict.fromkeys(r.text.strip() for r in results if r.finish_reason == "stop" and r.text.strip())
    return list(found)


def _before_a_user(tokenizer: Tokenizer) -> list[int]:
    """The tokens of a chat up to where the first message of its user begins: what two chats have in common."""
    one, other = (tokenizer.encode_chat([{"role": "user", "content": text}]) for text in ("Why", "9"))
    return [a for a, _ in takewhile(_is_same, zip(one, other, strict=False))]


def _is_same(pair: Sequence[int]) -> bool:
    return pair[0] == pair[1]
