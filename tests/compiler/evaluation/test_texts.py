"""Texts and prompts: what is read, how it is cut, and what is refused."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from llmc import quantization
from llmc.compiler.evaluation import texts
from llmc.compiler.evaluation.evaluate import Evaluation
from llmc.errors import UsageError


def write(folder: Path, name: str, content: str | bytes) -> Path:
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def test_windows_do_not_overlap_and_the_rest_is_dropped() -> None:
    assert texts.windows(range(10), 4, 0, None) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert texts.windows(range(10), 4, 1, None) == [[0, 1, 2, 3]]
    assert texts.windows(range(10), 4, 0, 99) == [[99, 0, 1, 2], [99, 3, 4, 5], [99, 6, 7, 8]]
    with pytest.raises(UsageError, match="has 3 tokens, fewer than a window of 4; use a smaller --context"):
        texts.windows(range(3), 4, 0, None)


def test_a_text_keeps_its_line_ends(tmp_path: Path) -> None:
    path = write(tmp_path, "a.txt", "one\r\ntwo\u2028\n")
    text = texts.read_text(path)
    assert text.content == "one\r\ntwo\u2028\n"
    assert (text.name, text.sha256) == ("a.txt", hashlib.sha256(path.read_bytes()).hexdigest())


def test_our_own_text_is_not_what_calibration_uses() -> None:
    text = texts.read_text(None)
    assert isinstance(text.content, str) and len(text.content.split()) > 2000
    corpus = (Path(quantization.__file__).parent / "corpus.txt").read_text(encoding="utf-8")
    lines = {line for line in text.content.split("\n") if len(line) > 30}
    assert len(lines) > 50 and not lines & set(corpus.split("\n"))


def test_token_ids(tmp_path: Path) -> None:
    text = texts.read_text(write(tmp_path, "a.json", "[1, 2, 3]"))
    assert texts.token_ids(text, None, 4) == [1, 2, 3]
    with pytest.raises(UsageError, match="3 is not a token id below 3"):
        texts.token_ids(text, None, 3)
    with pytest.raises(UsageError, match="no tokenizer; use token ids, a list in"):
        texts.token_ids(texts.Text("t", "", "words"), None, 4)


@pytest.mark.parametrize("content", ["{}", "[]", "[1, -2]", "[1.5]", "[true]", "[1, ", '["a"]'])
def test_json_that_is_no_list_of_token_ids(tmp_path: Path, content: str) -> None:
    with pytest.raises(UsageError, match=r"a\.json"):
        texts.read_text(write(tmp_path, "a.json", content))


def test_files_that_can_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=r"no\.txt: can't be read"):
        texts.read_text(tmp_path / "no.txt")
    with pytest.raises(UsageError, match="can't be read"):
        texts.read_text(tmp_path)
    with pytest.raises(UsageError, match="not UTF-8"):
        texts.read_text(write(tmp_path, "bad.txt", b"\xff\xfe"))
    monkeypatch.setattr(texts, "MAX_FILE_BYTES", 3)
    with pytest.raises(UsageError, match="at most 3 are read"):
        texts.read_text(write(tmp_path, "long.txt", "four"))


def test_prompts(tmp_path: Path) -> None:
    assert texts.read_prompts(None) is None
    found = texts.read_prompts(write(tmp_path, "p.txt", "one\n\n two\r\n"))
    assert found is not None and found.each == ("one", " two")
    lines = '{"prompt": "a\u2028b"}\n{"token_ids": [1, 2], "id": 7}\n{"messages": [{"role": "user", "content": "x"}]}\n'
    found = texts.read_prompts(write(tmp_path, "p.jsonl", lines))
    assert found is not None
    assert found.each == ("a\u2028b", (1, 2), ({"role": "user", "content": "x"},))
    assert texts.prompt_ids([(1, 2)], None, 3) == [[1, 2]]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("[]", "expected an object with one of prompt, token_ids, messages"),
        ('{"prompt": "a", "token_ids": [1]}', "expected an object with one of"),
        ('{"prompt": "a", "top_k": 1}', "unknown key 'top_k'"),
        ('{"prompt": 3}', "prompt: expected a text"),
        ('{"messages": "hello"}', "messages: expected"),
        ('{"token_ids": [-1]}', "token_ids: expected"),
        ("{", "p.jsonl:1"),
        (" ", "there is no prompt"),
    ],
)
def test_lines_that_are_no_prompts(tmp_path: Path, line: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        texts.read_prompts(write(tmp_path, "p.jsonl", line))


def test_prompts_that_do_not_suit_the_model() -> None:
    for prompt, message in (("text", "no tokenizer"), ((5,), "not below 3"), ((), "no tokens")):
        with pytest.raises(UsageError, match=f"prompt 1: .*{message}"):
            texts.prompt_ids([prompt], None, 3)
    ours = texts.prompt_ids(None, None, 50)
    assert len(ours) == len(texts.TEXTS) and all(0 <= i < 50 for ids in ours for i in ids)


def test_prompts_without_tokens_to_generate(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no tokens are to be generated"):
        Evaluation(write(tmp_path, "a.txt", "x"), tokens=0, prompts=tmp_path / "p").read()
