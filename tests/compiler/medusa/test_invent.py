"""Prompts that the model writes itself: what a user's message would be, different ones, kept for the next run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from llmc.compiler.config import BuildConfig
from llmc.compiler.medusa import collect
from llmc.compiler.medusa.build import _prompts
from llmc.compiler.medusa.collect import make_prompts
from llmc.compiler.medusa.invent import ROUNDS, invent
from llmc.compiler.medusa.settings import HeadTraining
from llmc.compiler.progress import Progress
from llmc.quantization.calibration import Calibration
from llmc.runtime.request import SamplingParams


class Writer:
    """Says what it was given, in turn, and then the last of it again and again; letters are its tokens."""

    vocab_size = 256

    def __init__(self, *said: tuple[str, str]) -> None:
        self.tokenizer = self
        self.chat_template = "there is one"
        self.asked: list[tuple[list[int], SamplingParams]] = []
        self._said = said

    def encode_chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        return list(b"<be kind><user>" + "".join(m["content"] for m in messages).encode() + b"<end>")

    def generate(self, prompts: list[list[int]], params: list[SamplingParams]) -> list[Any]:
        numbers = range(len(self.asked), len(self.asked) + len(prompts))
        self.asked += zip(prompts, params, strict=True)
        said = [self._said[min(number, len(self._said) - 1)] for number in numbers]
        return [SimpleNamespace(text=text, finish_reason=reason) for text, reason in said]


def test_it_goes_on_where_a_user_would_speak() -> None:
    writer: Any = Writer(*((f" prompt {i}\n", "stop") for i in range(4)))
    assert invent(writer, 4, 90, 3) == [f"prompt {i}" for i in range(4)]
    for begin, params in writer.asked:
        assert bytes(begin) == b"<be kind><user>"
        assert params.max_tokens == 90 // 3 - len(begin)
    assert len({params.seed for _, params in writer.asked}) == 4


def test_what_is_no_prompt_is_asked_for_again() -> None:
    """One that is empty, one that was cut off, and one that is there already; in the end there are fewer."""
    writer: Any = Writer(("a", "stop"), (" ", "stop"), ("b", "length"), ("a", "stop"), ("b", "stop"), ("a", "stop"))
    assert invent(writer, 4, 90, 0) == ["a", "b"]
    assert len(writer.asked) == 4 + 3 + 2 and len({params.seed for _, params in writer.asked}) == len(writer.asked)
    assert ROUNDS == 3


def test_every_second_piece_is_the_models_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collect, "AT_ONCE", 2)
    writer: Any = Writer(*((f"own {i}", "stop") for i in range(3)), ("", "stop"))
    settings = HeadTraining(texts=9, length=300)
    texts = [bytes(ids) for ids in make_prompts(settings, writer, tmp_path, Progress())]
    assert len(texts) == 9
    assert [b"<user>own" in text for text in texts] == [False, False, True, True, False, False, True, False, False]
    asked = len(writer.asked)
    assert [bytes(ids) for ids in make_prompts(settings, writer, tmp_path, Progress())] == texts
    assert len(writer.asked) == asked, "they were kept"


def test_heads_are_measured_on_them_unless_a_text_is_named(tmp_path: Path) -> None:
    writer: Any = Writer(("what?", "stop"), ("x" * 90, "stop"), ("why?", "stop"), ("", "stop"))

    def text() -> Calibration:
        return Calibration(np.arange(80, dtype=np.int32).reshape(2, 40), "there")

    begin = b"<be kind><user>"
    prompts, where = _prompts(writer, 60, BuildConfig(medusa=tmp_path), text)
    assert [bytes(ids) for ids in prompts] == [begin + b"what?<end>", begin + b"why?<end>"]
    assert where == {"source": "prompts of the model", "samples": 2, "seed": 1}
    (tmp_path / "text.txt").write_text("a text")
    for config, name in (
        (BuildConfig(medusa=tmp_path, calib=str(tmp_path / "text.txt")), "text.txt"),
        (BuildConfig(medusa=tmp_path, calib_seed=2), "builtin"),
    ):
        prompts, where = _prompts(writer, 60, config, text)
        assert prompts == [list(range(30)), list(range(40, 70))]
        assert where["source"] == name
    where = _prompts(writer, 60, BuildConfig(medusa=tmp_path), text)[1]
    assert where["source"] == "builtin", "it had nothing more to say"
