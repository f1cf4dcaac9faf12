"""Text as it comes: no half characters, no stop strings, the same streamed and whole."""

from __future__ import annotations

import random
from typing import Any

import pytest

from llmc.runtime.detokenizer import TextStream
from llmc.runtime.request import SamplingParams


def stream(kit: Any, spec: Any = None, chat: bool = False, prompt: Any = (), **params: Any) -> TextStream:
    return kit.tokenizer(spec).stream(SamplingParams(**params), prompt, chat=chat)


def feed(text: TextStream, tokens: list[int]) -> list[str]:
    """The deltas; stops at a stop string, else the end is forced."""
    deltas = []
    for token in tokens:
        stop = text.append(token)
        deltas.append(text.take())
        if stop is not None:
            return deltas
    text.flush()
    return [*deltas, text.take()]


def test_stp_21_an_emoji_in_four_tokens(kit: Any) -> None:
    emoji = kit.ids("\U0001f600")
    assert len(emoji) == 4
    assert feed(stream(kit), emoji) == ["", "", "", "\U0001f600", ""]
    assert feed(stream(kit), emoji[:2]) == ["", "", "\ufffd"]  # one at the forced end
    assert feed(stream(kit), [*emoji[:2], *kit.ids("a")]) == ["", "", "\ufffda", ""]
    assert feed(stream(kit), kit.ids(b"\xf0\x80\x80")) == ["", "\ufffd\ufffd", "\ufffd", ""]  # no bytes can mend it


def test_stp_01_held_text_is_flushed(kit: Any) -> None:
    assert feed(stream(kit, stop=["XYZ"]), kit.ids("..X")) == [".", ".", "", "X"]
    assert feed(stream(kit, stop=["XYZ"]), kit.ids("..XYa")) == [".", ".", "", "", "XYa", ""]


def test_stp_07_nothing_is_doubled(kit: Any) -> None:
    deltas = feed(stream(kit, stop=["ab"]), kit.ids("a a a ab"))
    assert "".join(deltas) == "a a a "
    assert deltas == ["", "a ", "", "a ", "", "a ", "", ""]


def test_stp_17_wanted_text_and_stop_string_in_one_token(kit: Any) -> None:
    token = kit.byte_level_spec()["model"]["vocab"]["d.Ċ"]
    text = kit.tokenizer().stream(SamplingParams(stop=["\n"]), ())
    assert text.append(token) == "\n"
    assert text.text == "d."


def test_include_stop_str(kit: Any) -> None:
    text = stream(kit, stop=["ab"], include_stop_str_in_output=True)
    assert feed(text, kit.ids("xabc")) == ["x", "", "ab"]


def test_the_stop_string_that_is_complete_first_wins(kit: Any) -> None:
    tokenizer = kit.tokenizer()
    for tokens in (kit.ids("hello"), tokenizer.encode("hello")):
        text = tokenizer.stream(SamplingParams(stop=["hello", "ll", "ell"]), ())
        assert "".join(feed(text, tokens)) == "h"  # "ell" and "ll" end together: the longer one


def test_stop_strings_do_not_count_before_min_tokens(kit: Any) -> None:
    text = stream(kit, stop=["ab"])
    assert [text.append(t, may_stop=False) for t in kit.ids("abxa")] == [None] * 4
    assert text.text == "abx"
    assert text.append(kit.ids("b")[0]) == "ab"  # began before, ends after
    assert text.text == "abx"


def test_stp_20_end_tokens(kit: Any) -> None:
    text = stream(kit, skip_special_tokens=False, stop=["abc"])
    text.append(kit.ids("a")[0])
    text.end(None)
    assert text.text == "a"
    shown = stream(kit)
    shown.end(2)
    assert shown.text == "</s>"


def test_special_tokens_have_no_text_by_default(kit: Any) -> None:
    assert feed(stream(kit), [1, *kit.ids("a"), 2]) == ["", "a", "", ""]
    assert feed(stream(kit, skip_special_tokens=False), [1, *kit.ids("a"), 2]) == ["<s>", "a", "</s>", ""]


def test_the_first_space_of_sentencepiece(kit: Any) -> None:
    spec = kit.sentencepiece_spec()
    hi, the = (spec["model"]["vocab"][p] for p in ("▁hi", "▁the"))
    assert "".join(feed(stream(kit, spec), [hi, the])) == "hi the"
    assert "".join(feed(stream(kit, spec, prompt=[1]), [1, hi, the])) == "hi the"  # only <s> before it
    assert "".join(feed(stream(kit, spec, prompt=[1, the]), [hi, the])) == " hi the"  # continues a text
    assert "".join(feed(stream(kit, spec, prompt=[1, the], chat=True), [hi, the])) == "hi the"


def test_unknown_ids_have_no_text(kit: Any) -> None:
    assert feed(stream(kit), [383, *kit.ids("a"), 10**6]) == ["", "a", "", ""]


@pytest.mark.parametrize("which", ["byte_level_spec", "sentencepiece_spec"])
def test_equal_to_the_library(kit: Any, which: str) -> None:
    spec = getattr(kit, which)()
    tokenizer, library = kit.tokenizer(spec), kit.library(spec)
    rng = random.Random(0)
    for text in ["hello the bar d.\n", "  a  b", "naïve 中文 🙂", "\t\r\n x", "the", " the"]:
        assert tokenizer.decode(tokenizer.encode(text)) == library.decode(library.encode(text).ids)
    for _ in range(500):
        ids = [rng.randrange(library.get_vocab_size()) for _ in range(rng.randint(1, 8))]
        expected = library.decode(ids)
        if "\ufffd" not in expected:
            assert tokenizer.decode(ids) == expected


def test_tokenizers_of_another_kind(kit: Any) -> None:
    """WordPiece: the text of a token depends on its neighbours."""
    words = ["[UNK]", "hello", "wor", "##ld", "##s", ".", "a"]
    spec = kit.byte_level_spec() | {
        "added_tokens": [],
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
        "model": {
            "type": "WordPiece",
            "unk_token": "[UNK]",
            "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100,
            "vocab": {w: i for i, w in enumerate(words)},
        },
    }
    tokenizer = kit.tokenizer(spec)
    ids = tokenizer.encode("hello worlds a worlds worlds hello .")
    deltas = feed(tokenizer.stream(SamplingParams(), ()), ids)
    assert "".join(deltas) == kit.library(spec).decode(ids)
    assert deltas[:4] == ["hello", " wor", "ld", "s"]
    text = tokenizer.stream(SamplingParams(stop=["lds"]), ())
    assert "".join(feed(text, ids)) == "hello wor"


def oracle(data: bytes, stops: list[str], include: bool) -> str:
    """Character by character: the text up to the stop string that is complete first."""
    text = ""
    for character in data.decode(errors="replace"):
        text += character
        found = [s for s in stops if text.endswith(s)]
        if found:
            longest = max(found, key=len)
            return text if include else text[: -len(longest)]
    return text


def test_any_script_any_stop_strings_any_chunks(kit: Any) -> None:
    rng = random.Random(5)
    tokenizer = kit.tokenizer()
    pieces = tokenizer.vocabulary
    alphabet = [*tokenizer.encode("hello the foo bar d.\nabXYZ é🙂"), *kit.ids("abX é🙂"), 0, 1]
    parts = ["a", "b", "ab", "XYZ", "XY", "é", "🙂", " b", "o", "\n", "d.", "lo t", "\ufffd"]
    for _ in range(3000):
        tokens = [rng.choice(alphabet) for _ in range(rng.randint(0, 12))]
        stops = rng.sample(parts, rng.randint(0, 3))
        include = rng.random() < 0.3
        text = tokenizer.stream(SamplingParams(stop=stops, include_stop_str_in_output=include), ())
        deltas, shown = [], ""
        for delta in feed(text, tokens):
            deltas.append(delta)
            shown += delta
        data = b"".join(pieces.piece(t) for t in tokens if t not in pieces.special_ids)
        assert shown == text.text == oracle(data, stops, include), (tokens, stops)


def test_bad_words_are_seen_before_they_come(kit: Any) -> None:
    text = stream(kit, stop=["foo bar"])
    for token in kit.ids("foo ba"):
        text.append(token)
    (r, x) = kit.ids("rx")
    assert text.would_contain(r, ["foo bar"])  # although it is held back
    assert not text.would_contain(x, ["foo bar"])
    assert not text.would_contain(r, ["foo  bar"])
    assert text.text == ""
