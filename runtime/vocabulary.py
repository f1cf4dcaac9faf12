"""The bytes of each token of a tokenizer.json."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import tokenizers


class Vocabulary:
    """What tokens stand for. ``exact``: a text is the concatenation of its tokens' bytes (`piece`).

    That holds for byte-level and SentencePiece tokenizers, which are nearly all. Of others, text is only known for
    whole runs of tokens (`decode`), and `piece` is the text of a token by itself.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer, spec: dict[str, Any]) -> None:
        self._tokenizer = tokenizer
        self._added = {int(t["id"]): str(t["content"]) for t in spec.get("added_tokens") or []}
        self.special_ids = frozenset(int(t["id"]) for t in spec.get("added_tokens") or [] if t.get("special"))
        self.leading_space = b""
        """What is dropped at the start of a text."""
        self._pieces: dict[int, bytes] = {}
        self._replacements: list[tuple[str, str]] = []
        self._byte_fallback = False
        self._byte_level = False
        self.exact = self._understand(_flatten(spec.get("decoder")))

    @cached_property
    def size(self) -> int:
        """One more than the highest id."""
        return 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)

    def piece(self, token: int) -> bytes:
        """The bytes of a token; none for an id without a token."""
        piece = self._pieces.get(token)
        if piece is None:
            piece = self._pieces[token] = self._make_piece(token)
        return piece

    def decode(self, tokens: Sequence[int], *, skip_special: bool) -> str:
        """The text of a run of tokens at the start of a text, by the tokenizers library."""
        text: str = self._tokenizer.decode(list(tokens), skip_special_tokens=skip_special)
        return text

    def has_text(self, tokens: Sequence[int]) -> bool:
        """Whether any token other than special ones has a text."""
        return any(token not in self.special_ids and self.piece(token) for token in tokens)

    def tokens_containing(self, words: Collection[str]) -> NDArray[np.intp]:
        """Ids of the tokens, other than special ones, whose own text contains one of the words."""
        text, ends = self._all_pieces
        found: set[int] = set()
        for word in map(str.encode, words):
            at = text.find(word)
            while at >= 0:
                token = int(np.searchsorted(ends, at, side="right"))
                found.add(token)
                at = text.find(word, int(ends[token]))
        return np.array(sorted(found - self.special_ids), np.intp)

    @cached_property
    def _all_pieces(self) -> tuple[bytes, NDArray[np.intp]]:
        """The pieces of all tokens with a byte between them that no text has, and where each one's end is."""
        pieces = [self.piece(i) for i in range(self._tokenizer.get_vocab_size(with_added_tokens=True))]
        return b"\xff".join(pieces), np.cumsum([len(piece) + 1 for piece in pieces])

    def _understand(self, decoders: list[dict[str, Any]]) -> bool:
        """Read the decoder; whether it is one that joins bytes."""
        kinds = [d.get("type") for d in decoders]
        if kinds == ["ByteLevel"]:
            self._byte_level = True
            return True
        for d in decoders:
            match d:
                case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)} if len(old) == 1:
                    self._replacements.append((old, new))
                case {"type": "Metaspace", "replacement": str(old)}:
                    self._replacements.append((old, " "))
                    if d.get("prepend_scheme", "always") != "never":
                        self.leading_space = b" "
                case {"type": "ByteFallback"}:
                    self._byte_fallback = True
                case {"type": "Fuse"}:
                    pass
                case {"type": "Strip", "content": str(content), "start": int(start), "stop": 0} if start <= 1:
                    self.leading_space = content.encode() * start
                case _:
                    return False
        return bool(decoders)

    def _make_piece(self, token: int) -> bytes:
        text = self._added.get(token) or self._tokenizer.id_to_token(token)
        if text is None:
            return b""
        if not self.exact:
            return self.decode([token], skip_special=False).encode()
        if self._byte_level:
            if token in self._added or not all(c in BYTE_OF for c in text):
                return str(text).encode()
            return bytes(BYTE_OF[c] for c in text)
        if self._byte_fallback and len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
            try:
                return bytes([int(text[3:5], 16)])
            except ValueError:
                pass
        for old, new in self._replacements:
            text = text.replace(old, new)
        return str(text).encode()


def _flatten(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    if decoder is None:
        return []
    if decoder.get("type") == "Sequence":
        return [part for d in decoder.get("decoders", []) for part in _flatten(d)]
    return [decoder]


def _bytes_of_characters() -> dict[str, int]:
    """The printable characters that stand for bytes in byte-level vocabularies: GPT-2's encoder, 2019."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


BYTE_OF = _bytes_of_characters()
