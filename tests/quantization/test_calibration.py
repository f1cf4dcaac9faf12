import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmc.errors import UsageError
from llmc.quantization import calibration
from llmc.quantization.calibration import Calibration, CalibrationSettings, cut, load


def tokenize(text: str) -> list[int]:
    """A token a byte."""
    return list(text.encode())


def render(messages: list[dict[str, Any]]) -> str:
    return "".join(f"<{m['role']}>{m['content']}" for m in messages)


def read(path: Path, samples: int = 2, length: int = 4, seed: int = 0, prefix: tuple[int, ...] = ()) -> Calibration:
    return load(CalibrationSettings(str(path), samples, length, seed), tokenize, render, vocab_size=256, prefix=prefix)


def file(tmp_path: Path, name: str, content: str | bytes) -> Path:
    path = tmp_path / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def test_a_text_is_cut_into_windows(tmp_path: Path) -> None:
    result = read(file(tmp_path, "a.txt", "abcdefghij"))
    assert result.tokens.dtype == np.int32
    assert [bytes(row.tolist()).decode() for row in result.tokens] == ["abcd", "efgh"]


def test_line_ends_stay_and_a_byte_order_mark_goes(tmp_path: Path) -> None:
    result = read(file(tmp_path, "a.txt", b"\xef\xbb\xbfa\r\nbcdefg"))
    assert bytes(result.tokens[0].tolist()) == b"a\r\nb"


def test_rows_of_all_kinds_are_joined(tmp_path: Path) -> None:
    rows = [{"text": "abc", "source": "x"}, {"messages": [{"role": "u", "content": "hi"}]}, {"tokens": [1, 2, 3]}]
    path = file(tmp_path, "a.jsonl", "\n".join(json.dumps(row) for row in rows) + "\n\n")
    result = read(path, samples=1, length=11)
    assert bytes(result.tokens[0].tolist()) == b"abc<u>hi\x01\x02\x03"


def test_windows_are_chosen_by_the_seed(tmp_path: Path) -> None:
    text = bytes(range(32, 127)).decode() * 4
    path = file(tmp_path, "a.txt", text)
    results = [read(path, samples=10, seed=seed) for seed in (0, 0, 1)]
    assert np.array_equal(results[0].tokens, results[1].tokens)
    assert not np.array_equal(results[0].tokens, results[2].tokens)
    for result in results:
        places = [text.find(bytes(row.tolist()).decode()) for row in result.tokens]
        assert -1 not in places
        assert len({tuple(row) for row in result.tokens.tolist()}) == 10


def test_zero_samples_are_as_many_as_there_are_up_to_128(tmp_path: Path) -> None:
    assert read(file(tmp_path, "a.txt", "x" * 43), samples=0).tokens.shape == (10, 4)
    assert read(file(tmp_path, "a.txt", "x" * 4000), samples=0).tokens.shape == (128, 4)


def test_a_prefix_starts_each_window(tmp_path: Path) -> None:
    result = read(file(tmp_path, "a.txt", "abcdef"), prefix=(1,))
    assert result.tokens.tolist() == [[1, 97, 98, 99], [1, 100, 101, 102]]


def test_the_hash_is_that_of_the_ids_and_their_shape() -> None:
    settings = CalibrationSettings("self", 2, 3)
    first, second = (cut([[1, 2, 3, 4, 5, 6]], s, vocab_size=9) for s in (settings, CalibrationSettings("self", 3, 2)))
    assert first.sha256 == hashlib.sha256(b"2x3:" + np.arange(1, 7, dtype="<i4").tobytes()).hexdigest()
    assert first.sha256 != second.sha256


@pytest.mark.parametrize("samples", [0, 3])
def test_a_text_that_is_too_short_is_an_error_with_both_numbers(tmp_path: Path, samples: int) -> None:
    wanted = max(samples, 1)
    path = file(tmp_path, "a.txt", "ab")
    with pytest.raises(UsageError, match=rf"a\.txt: the text has 2 tokens, {wanted} samples of 4 take {wanted * 4}"):
        read(path, samples=samples)


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("a.jsonl", '{"text": "a"}\n{"text": 3}', r'line 2: "text" is not a string'),
        ("a.jsonl", '{"text": "a", "tokens": [1]}', 'line 1: expected an object with one of "text", "messages"'),
        ("a.jsonl", '{"prompt": "a"}', "line 1: expected an object with one of"),
        ("a.jsonl", '["a"]', "line 1: expected an object"),
        ("a.jsonl", '{"text": "a"', "line 1: not JSON"),
        ("a.jsonl", '{"tokens": [1, 2.5]}', '"tokens" is not a list of whole numbers'),
        ("a.jsonl", '{"tokens": [true]}', '"tokens" is not a list of whole numbers'),
        ("a.jsonl", '{"messages": []}', '"messages" is not a list of objects'),
        ("a.jsonl", '{"messages": ["hi"]}', '"messages" is not a list of objects'),
        ("a.jsonl", '{"tokens": [1, 2, 256, 3]}', "token id 256 is not below the vocabulary size 256"),
        ("a.jsonl", '{"tokens": [-1]}', "token id -1 is not below"),
        ("a.jsonl", '{"tokens": [1, 99999999999999999999]}', "line 1: 99999999999999999999 is no token id"),
        ("a.jsonl", "[" * 100_000, "line 1: not JSON"),
        ("a.jsonl", '{"text": "a\\ud800"}', "line 1: holds half of a surrogate pair"),
        ("a.txt", b"abc\xff", "byte 3 is not UTF-8"),
        ("a.csv", "a,b", r"unknown kind of file; known: \.txt, \.jsonl"),
        ("a.txt", "", "the text has 0 tokens"),
    ],
)
def test_mistakes_name_the_file_and_the_place(tmp_path: Path, name: str, content: str | bytes, complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint) as caught:
        read(file(tmp_path, name, content))
    assert name in str(caught.value)


def test_files_that_are_missing_or_huge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=r"none\.txt: No such file"):
        read(tmp_path / "none.txt")
    path = file(tmp_path, "a.txt", "abcdefghijkl")
    monkeypatch.setattr(calibration, "LARGEST_FILE", 10)
    with pytest.raises(UsageError, match="12 bytes; cut it to 10 bytes at most"):
        read(path)


def test_a_prefix_as_long_as_the_window(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="windows of 4 have no room"):
        read(file(tmp_path, "a.txt", "abcdef"), prefix=(1, 1, 1, 1))


def test_the_built_in_corpus_is_long_and_varied() -> None:
    result = load(CalibrationSettings(length=512), tokenize, render, vocab_size=256)
    text = bytes(result.tokens.ravel().tolist()).decode(errors="ignore")
    assert len(result.tokens) >= 112
    lines = [line for line in text.split("\n") if len(line) > 40]
    assert len(set(lines)) / len(lines) > 0.99
    words = text.lower().split()
    triples = {tuple(words[i : i + 3]) for i in range(len(words) - 2)}
    assert len(triples) / (len(words) - 2) > 0.9
    assert len(set(text)) > 150
