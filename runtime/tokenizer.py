"""Text and chats to tokens, by the tokenizer that is frozen into the engine."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import tokenizers

from llmc.errors import EngineError, RequestError
from llmc.runtime.chat_template import ChatTemplate
from llmc.runtime.control_tokens import ControlTokens
from llmc.runtime.detokenizer import ByteDecoder, Decoder, TextStream, WindowDecoder
from llmc.runtime.request import SamplingParams
from llmc.runtime.vocabulary import Vocabulary

if TYPE_CHECKING:
    from llmc.runtime.constraints.grammars import Grammars
    from llmc.runtime.engine import Engine


class Tokenizer:
    """Encodes prompts and chats, and makes the text streams of sequences.

    Args:
        spec: the text of a tokenizer.json.
        add_bos, add_eos: whether a text that is not a chat gets these around it. None: as tokenizer.json says.
        bos_token_id: the beginning-of-text token.
        chat_template: Jinja source, or None if the model is not made for chats.
        special_tokens: texts for the template: bos_token and the like.
        parse_special_in_messages: whether the text of a control token in a message becomes that token, as in
            transformers by default, or ordinary text (a user can't pretend to be the system).
        grammar_cache_bytes: of compiled constraints that are kept.
    """

    def __init__(
        self,
        spec: str,
        *,
        add_bos: bool | None = None,
        add_eos: bool | None = None,
        bos_token_id: int | None = None,
        eos_token_ids: Sequence[int] = (),
        chat_template: str | None = None,
        special_tokens: Mapping[str, str] | None = None,
        parse_special_in_messages: bool = False,
        grammar_cache_bytes: int = 64 << 20,
    ) -> None:
        try:
            self._spec: dict[str, Any] = json.loads(spec)  # the library also takes some texts that are no JSON
            self._tokenizer = tokenizers.Tokenizer.from_str(spec)
        except Exception as problem:  # the library raises Exception itself
            raise EngineError(f"tokenizer/tokenizer.json: {problem}") from None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.vocabulary = Vocabulary(self._tokenizer, self._spec)
        self.chat_template = None if chat_template is None else ChatTemplate(chat_template, special_tokens or {})
        self.parse_special_in_messages = parse_special_in_messages
        self.grammar_cache_bytes = grammar_cache_bytes
        self.prefix, self.suffix = self._around_a_text()
        if add_bos is not None and bos_token_id is not None:
            self.prefix = _with(self.prefix, bos_token_id, add_bos, at=0)
        if add_eos is not None and eos_token_ids:
            self.suffix = _with(self.suffix, eos_token_ids[0], add_eos, at=-1)

    def encode(self, text: str) -> list[int]:
        """The tokens of a text, with what belongs around it. Texts of special tokens become those tokens.

        Raises:
            RequestError: the text is not valid Unicode.
        """
        return [*self.prefix, *self._encode(text).ids, *self.suffix]

    def encode_plain(self, text: str) -> list[int]:
        """The tokens of a text without what belongs around it.

        Raises:
            RequestError: the text is not valid Unicode.
        """
        return self._encode(text).ids

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """The tokens of a chat. An automatic beginning-of-text token is left out where the template has written one.

        Raises:
            RequestError: the model has no chat template, or the template refuses the messages.
        """
        template = self.chat_template
        if template is None:
            raise RequestError("the model has no chat template; use a prompt instead", "messages")
        checked = _checked(messages, template.source)
        if not self.parse_special_in_messages:
            hide = self._control.hide
            checked, tools, documents, variables = hide(checked), hide(tools), hide(documents), hide(variables)
        text = template.render(
            checked,
            tools=tools,
            documents=documents,
            add_generation_prompt=add_generation_prompt,
            variables=variables,
        )
        hidden = not self.parse_special_in_messages and self._control.found(text)
        ids = self._encode_hidden(text) if hidden else self._encode(text).ids
        return ids if ids[: len(self.prefix)] == self.prefix else [*self.prefix, *ids]

    def stream(self, params: SamplingParams, prompt: Sequence[int], *, chat: bool = False) -> TextStream:
        """The text of a sequence that continues a prompt, or answers a chat. A constraint holds for all of its text."""
        decoder: Decoder
        if self.vocabulary.exact:
            at_start = params.constraint is None and (chat or not self.vocabulary.has_text(prompt))
            decoder = ByteDecoder(self.vocabulary, skip_special=params.skip_special_tokens, at_start=at_start)
        else:
            decoder = WindowDecoder(self.vocabulary, skip_special=params.skip_special_tokens)
        return TextStream(decoder, self.vocabulary, params.stop, include_stop=params.include_stop_str_in_output)

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of tokens at the start of a text."""
        stream = self.stream(SamplingParams(skip_special_tokens=skip_special_tokens), ())
        for token in tokens:
            stream.append(token)
        stream.flush()
        return stream.text

    def _encode(self, text: str) -> tokenizers.Encoding:
        try:
            return self._tokenizer.encode(text, add_special_tokens=False)
        except (UnicodeEncodeError, TypeError) as problem:
            raise RequestError(f"not valid text: {problem}", "prompt") from None

    def _around_a_text(self) -> tuple[list[int], list[int]]:
        """What tokenizer.json puts before and after a text."""
        inner = self._tokenizer.encode("a", add_special_tokens=False).ids
        outer = self._tokenizer.encode("a", add_special_tokens=True).ids
        for start in range(len(outer) - len(inner) + 1):
            if outer[start : start + len(inner)] == inner:
                return outer[:start], outer[start + len(inner) :]
        return [], []

    @cached_property
    def grammars(self) -> Grammars:
        """What compiles and keeps constraints.

        Raises:
            RequestError: the tokenizer does not allow any.
        """
        from llmc.runtime.constraints.grammars import Grammars

        return Grammars(self.vocabulary, self.grammar_cache_bytes)

    def close(self) -> None:
        """End the processes that render chat templates and compile constraints."""
        if self.chat_template is not None:
            self.chat_template.close()
        if "grammars" in self.__dict__:
            self.grammars.close()

    # -- control tokens that users write ------------------------------------------------------------------------------

    @cached_property
    def _control(self) -> ControlTokens:
        """The special tokens, and other added tokens that the template itself writes."""
        source = "" if self.chat_template is None else self.chat_template.source
        added = self._spec.get("added_tokens") or []
        return ControlTokens(
            {t["content"]: t["id"] for t in added if t["content"] and (t["special"] or t["content"] in source)}
        )

    def _encode_hidden(self, text: str) -> list[int]:
        """Encode a rendered chat; stretches between control tokens that have placeholders are encoded anew."""
        encoding, control = self._encode(text), self._control
        ids: list[int] = []
        stretch: list[int] = []
        begin = 0
        for token, (left, right) in zip(encoding.ids, encoding.offsets, strict=True):
            if token in control.ids:
                ids += self._plain(text[begin:left], stretch, first=begin == 0)
                ids.append(token)
                stretch, begin = [], right
            else:
                stretch.append(token)
        return ids + self._plain(text[begin:], stretch, first=begin == 0)

    def _plain(self, text: str, ids: list[int], *, first: bool) -> list[int]:
        """The tokens of a text without control tokens; ``ids`` if it has no placeholder."""
        if not self._control.found(text):
            return ids
        tokenizer = self._first_plain_tokenizer if first else self._later_plain_tokenizer
        ids = tokenizer.encode(self._control.reveal(text), add_special_tokens=False).ids
        if not self._control.ids.isdisjoint(ids):
            raise RequestError("contains the text of a control token that this tokenizer can't write out", "messages")
        return ids

    @cached_property
    def _first_plain_tokenizer(self) -> tokenizers.Tokenizer:
        """One that takes control tokens as ordinary text."""
        return self._plain_tokenizer(self._spec)

    @cached_property
    def _later_plain_tokenizer(self) -> tokenizers.Tokenizer:
        """The same for texts that do not begin the prompt."""
        return self._plain_tokenizer(_without_first_space(self._spec))

    def _plain_tokenizer(self, spec: dict[str, Any]) -> tokenizers.Tokenizer:
        added = [{**t, "special": t["id"] in self._control.ids} for t in spec["added_tokens"]]
        tokenizer = tokenizers.Tokenizer.from_str(json.dumps({**spec, "added_tokens": added}))
        tokenizer.no_truncation()
        tokenizer.encode_special_tokens = True
        return tokenizer


def tokenizer_of(engine: Engine, **options: Any) -> Tokenizer | None:
    """The tokenizer of an engine; None if it has none. Options are those of Tokenizer that an engine does not know."""
    if engine.read("tokenizer/tokenizer.json") is None:
        return None
    facts = engine.model
    return Tokenizer(
        engine.tokenizer_json,
        add_bos=facts.add_bos,
        add_eos=facts.add_eos,
        bos_token_id=facts.bos_token_id,
        eos_token_ids=facts.eos_token_ids,
        chat_template=engine.chat_template,
        special_tokens=engine.special_tokens,
        **options,
    )


def _with(ids: list[int], token: int, wanted: bool, *, at: int) -> list[int]:
    if wanted:
        return ids if token in ids else ([token, *ids] if at == 0 else [*ids, token])
    return [i for i in ids if i != token]


def _without_first_space(value: Any) -> Any:
    """A tokenizer.json whose Metaspace parts put a space before the first word of a text no longer do so."""
    if isinstance(value, dict):
        changed = {k: _without_first_space(v) for k, v in value.items() if k not in ("vocab", "merges")}
        if value.get("prepend_scheme") == "first":
            changed["prepend_scheme"] = "never"
        return changed | {k: value[k] for k in ("vocab", "merges") if k in value}
    return [_without_first_space(v) for v in value] if isinstance(value, list) else value


def _checked(messages: Sequence[Mapping[str, Any]], source: str) -> list[dict[str, Any]]:
    """Messages as templates expect them. Parts of text are joined for templates that know only strings."""
    if isinstance(messages, str | bytes | Mapping) or not messages:
        raise RequestError("expected a list of messages, such as {'role': 'user', 'content': 'Hello'}", "messages")
    knows_parts = re.search(r"""['"]text['"]|\.text\b""", source) is not None
    result = []
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise RequestError(f"message {i} has no role: {message!r}"[:200], "messages")
        content = message.get("content")
        if isinstance(content, list):
            texts = list(_texts(content, i))
            content = content if knows_parts else "\n".join(texts)
        elif content is not None and not isinstance(content, str):
            raise RequestError(f"message {i}: content is neither a string nor a list of parts", "messages")
        result.append({**message, "content": content} if "content" in message else dict(message))
    return result


def _texts(parts: list[Any], i: int) -> Iterator[str]:
    for part in parts:
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise RequestError(f"message {i}: only parts of text are supported, found {part!r}"[:200], "messages")
        yield part["text"]
