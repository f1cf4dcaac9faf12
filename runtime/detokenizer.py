"""Tokens to text, one at a time: half a character is never shown, stop strings never leak."""

from __future__ import annotations

import codecs
from collections.abc import Collection
from typing import Protocol

from llmc.runtime.vocabulary import Vocabulary

REPLACEMENT = "\ufffd"


class Decoder(Protocol):
    """Turns tokens into text that is final. Concatenated, the parts are the text."""

    def push(self, token: int) -> str:
        """The text that is certain after one more token."""
        ...

    def peek(self, token: int) -> str:
        """What `push` would return."""
        ...

    def flush(self) -> str:
        """The rest: U+FFFD for bytes that were waiting for more."""
        ...


class ByteDecoder:
    """For vocabularies whose tokens are bytes wherever they stand: UTF-8 is decoded as its bytes come in.

    ``at_start``: nothing stands before the text, so that the space which some tokenizers put there is dropped.
    """

    def __init__(self, vocabulary: Vocabulary, *, skip_special: bool, at_start: bool) -> None:
        self._vocabulary, self._skip_special = vocabulary, skip_special
        self._strip = vocabulary.leading_space if at_start else b""
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """See Decoder."""
        piece = self._piece(token)
        if piece and self._strip:
            piece, self._strip = piece.removeprefix(self._strip), b""
        return self._utf8.decode(piece)

    def peek(self, token: int) -> str:
        """See Decoder."""
        state, strip = self._utf8.getstate(), self._strip
        text = self.push(token)
        self._utf8.setstate(state)
        self._strip = strip
        return text

    def flush(self) -> str:
        """See Decoder."""
        return self._utf8.decode(b"", final=True)

    def _piece(self, token: int) -> bytes:
        if self._skip_special and token in self._vocabulary.special_ids:
            return b""
        return self._vocabulary.piece(token)


class WindowDecoder:
    """For any other vocabulary: the text of a token is what it adds to the text of the few before it."""

    KEEP = 6
    """Tokens of context."""

    def __init__(self, vocabulary: Vocabulary, *, skip_special: bool) -> None:
        self._vocabulary, self._skip_special = vocabulary, skip_special
        self._context: list[int] = []
        self._pending: list[int] = []

    def push(self, token: int) -> str:
        """See Decoder."""
        self._pending.append(token)
        text = self._text()
        if text.endswith(REPLACEMENT):
            return ""
        self._settle()
        return text

    def peek(self, token: int) -> str:
        """See Decoder."""
        self._pending.append(token)
        text = self._text()
        self._pending.pop()
        return "" if text.endswith(REPLACEMENT) else text

    def flush(self) -> str:
        """See Decoder."""
        text = self._text()
        self._settle()
        return text.rstrip(REPLACEMENT) + REPLACEMENT if text.endswith(REPLACEMENT) else text

    def _text(self) -> str:
        before = self._vocabulary.decode(self._context, skip_special=self._skip_special)
        after = self._vocabulary.decode(self._context + self._pending, skip_special=self._skip_special)
        return after[len(before) :]

    def _settle(self) -> None:
        self._context = (self._context + self._pending)[-self.KEEP :]
        self._pending = []


class TextStream:
    """The text of one sequence. ``text`` is what may be shown; the start of a possible stop string is held back.

    A stop string counts as found where it is complete first, as if the text came in character by character; of two that
    end there, the longer one.
    """

    def __init__(
        self, decoder: Decoder, vocabulary: Vocabulary, stop: Collection[str] = (), *, include_stop: bool = False
    ):
        self.text = ""
        self._decoder, self._vocabulary = decoder, vocabulary
        self._stop, self._include_stop = tuple(stop), include_stop
        self._held = ""
        self._taken = 0

    def append(self, token: int, *, may_stop: bool = True) -> str | None:
        """Add a token; returns the stop string that it completes, which ends the text."""
        return self._feed(self._decoder.push(token), may_stop)

    def flush(self) -> str | None:
        """The end of the text: nothing is held back any longer. Returns a stop string as `append` does."""
        stop = self._feed(self._decoder.flush(), may_stop=True)
        self.text += self._held
        self._held = ""
        return stop

    def end(self, token: int | None) -> None:
        """The end of the text by an end token, shown if it is given."""
        self.text += self._held + self._decoder.flush()
        self._held = ""
        if token is not None:
            self.text += self._vocabulary.piece(token).decode(errors="replace")

    def take(self) -> str:
        """The text that came since the last call."""
        new, self._taken = self.text[self._taken :], len(self.text)
        return new

    def would_contain(self, token: int, words: Collection[str]) -> bool:
        """Whether the token would complete one of the words in the text, shown or not."""
        new = self._decoder.peek(token)
        if not new:
            return False
        before = (self.text[-256:] + self._held)[1 - max(map(len, words)) :] if max(map(len, words)) > 1 else ""
        return any(word in before + new for word in words)

    def _feed(self, new: str, may_stop: bool) -> str | None:
        if not self._stop:
            self.text += new
            return None
        seen, self._held = len(self._held), self._held + new
        found = self._find(seen) if may_stop else None
        if found is not None:
            begin, stop = found
            self.text += self._held[: begin + len(stop) if self._include_stop else begin]
            self._held = ""
            return stop
        keep = self._could_begin()
        self.text += self._held[: len(self._held) - keep]
        self._held = self._held[len(self._held) - keep :]
        return None

    def _find(self, seen: int) -> tuple[int, str] | None:
        """Where a stop string begins that ends after the first ``seen`` characters, and which."""
        found = []
        for stop in self._stop:
            begin = self._held.find(stop, max(0, seen - len(stop) + 1))
            if begin >= 0:
                found.append((begin + len(stop), begin, stop))
        if not found:
            return None
        _, begin, stop = min(found)
        return begin, stop

    def _could_begin(self) -> int:
        """Length of the longest end of the held text with which a stop string begins."""
        longest = min(len(self._held), max(map(len, self._stop)) - 1)
        for count in range(longest, 0, -1):
            tail = self._held[-count:]
            if any(len(stop) > count and stop.startswith(tail) for stop in self._stop):
                return count
        return 0
