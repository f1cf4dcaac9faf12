"""What a full block of the KV cache holds, and how a sequence finds blocks that others have computed.

Keys and values of a position are a function of the tokens up to it (and of engine and adapter), bit for bit, so a block
of the same tokens after the same tokens can be used instead of computing it again. Names are chained: SHA-256 over the
parent's and the block's tokens, from a root made of engine, adapter and salt; found blocks are compared by all of that.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llmc.runtime.kv_cache import KvCache
    from llmc.runtime.request import Request, Sequence


@dataclass(frozen=True, eq=False, slots=True)
class Content:
    """The tokens of a block (and of what is ahead), after those of ``parent``. A root has but a ``scope``."""

    parent: Content | None
    tokens: tuple[int, ...]
    key: bytes
    scope: tuple[str, ...] = ()


def digest(data: bytes) -> bytes:
    """SHA-256; tests put in one that collides."""
    return hashlib.sha256(data).digest()


def root(*scope: str) -> Content:
    """Where a chain begins: only what has the same scope is shared."""
    return Content(None, (), digest(json.dumps(scope).encode()), scope)


def child(parent: Content, tokens: tuple[int, ...]) -> Content:
    """The content of a block after the parent's."""
    return Content(parent, tokens, digest(parent.key + array("q", tokens).tobytes()))


def same_content(a: Content | None, b: Content | None) -> bool:
    """Compare whole chains; those that have met once share their beginning, so that this is quick."""
    while a is not b:
        if a is None or b is None or a.tokens != b.tokens or a.scope != b.scope:
            return False
        a, b = a.parent, b.parent
    return True


class PrefixCache:
    """Finds and names the blocks of sequences.

    Args:
        kv_cache: has the blocks.
        model: a digest of the engine.
        ahead: tokens after a block that what it holds depends on, too; it has no name before they are known.
    """

    def __init__(self, kv_cache: KvCache, model: str = "", *, ahead: int = 0) -> None:
        self._cache, self._model, self._ahead = kv_cache, model, ahead

    def find(self, sequence: Sequence, tokens: int) -> list[int]:
        """The blocks that hold the beginning of a sequence, of its first ``tokens`` tokens at most, in full blocks."""
        blocks: list[int] = []
        for index in range(tokens // self._cache.block_size):
            found = self._cache.find(self._content(sequence, index))
            if found is None:
                break
            blocks.append(found[0])
            self._rename(sequence, index, found[1])
        return blocks

    def keys(self, sequence: Sequence, start: int, stop: int) -> set[bytes]:
        """The keys of the blocks that computing these tokens completes, or takes a step further."""
        size = self._cache.block_size
        last = min(-(-stop // size), self._nameable(sequence))
        return {self._content(sequence, index).key for index in range(start // size, last)}

    def waits(self, sequence: Sequence, found: int, tokens: int, pending: set[bytes]) -> bool:
        """Whether the block after the ``found`` ones is among those that are being computed."""
        return found < tokens // self._cache.block_size and self._content(sequence, found).key in pending

    def store(self, sequence: Sequence, stop: int) -> None:
        """Name the blocks that hold all that they are to hold of tokens before ``stop``, and have no name yet."""
        assert sequence.table is not None, "a sequence that runs has blocks"
        last = min(stop // self._cache.block_size, self._nameable(sequence))
        for index in range(sequence.num_named, last):
            content = self._cache.name(sequence.table.blocks[index], self._content(sequence, index))
            self._rename(sequence, index, content)
            sequence.num_named = index + 1

    def _nameable(self, sequence: Sequence) -> int:
        """Blocks of which all tokens are known that their names are made of."""
        return (len(sequence.tokens) - self._ahead) // self._cache.block_size

    def _content(self, sequence: Sequence, index: int) -> Content:
        """Of the sequence's block ``index``; those before it are made on the way, once."""
        contents = sequence.contents
        size = self._cache.block_size
        while len(contents) <= index:
            start = len(contents) * size
            parent = contents[-1] if contents else self._root(sequence.request)
            contents.append(child(parent, tuple(sequence.tokens[start : start + size + self._ahead])))
        return contents[index]

    def _rename(self, sequence: Sequence, index: int, content: Content) -> None:
        """Take over the name of an equal content; what came after the old one is made anew."""
        if sequence.contents[index] is not content:
            sequence.contents[index:] = [content]

    def _root(self, request: Request) -> Content:
        if request.root is None:
            request.root = root(self._model, request.adapter or "", request.salt)
        return request.root
