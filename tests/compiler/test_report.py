"""report.html: one page, well-formed, whatever tensors and texts are called."""

from __future__ import annotations

import dataclasses
import json
from html.parser import HTMLParser
from typing import Any

import numpy as np
import pytest
from checkpoints import write_llama

from llmc.compiler.api import build_engine
from llmc.compiler.config import BuildConfig
from llmc.compiler.engine_writer import EngineContents
from llmc.compiler.evaluation.evaluate import Evaluation
from llmc.compiler.evaluation.figures import Comparison, Continuation, Figures, Generation, Position
from llmc.compiler.gate import QualityRequest, parse_gate
from llmc.compiler.report.page import render, visible
from llmc.compiler.report.plots import HEIGHT, WIDTH, bars, strip
from llmc.runtime.engine import Engine, load_engine
from llmc.runtime.lora import Linears

VOID = {"meta", "br", "hr", "img", "input", "link"}
EVIL = "</td><script>alert(1)</script>\u202e\x00\ud800<img src=x onerror=a()>'\"&{{ 7 * 7 }}"


class Page(HTMLParser):
    """Checks that every element is closed in order, and collects what is there."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.attributes: list[tuple[str, str]] = []
        self.text: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.add(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        self.tags.add(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    folder = tmp_path_factory.mktemp("report")
    text = folder / "text.json"
    text.write_text(json.dumps(np.random.default_rng(0).integers(3, 48, 90).tolist()))
    request = QualityRequest(Evaluation(text, context=40, tokens=6), parse_gate("kl<=1,ppl<=+50%"))
    build_engine(write_llama(folder / "model"), folder / "e", BuildConfig(dtype="bfloat16"), quality=request)
    return load_engine(folder / "e")


def contents(engine: Engine, **changes: Any) -> EngineContents:
    values = {
        "target": "cpu",
        "limits": engine.limits,
        "model": engine.model,
        "kv_cache": engine.kv_cache,
        "plan": engine.plan,
        "weights": (),
        "graph": b"",
        "tokenizer": None,
        "generation_config": {},
        "recipe": json.loads(engine.read("recipe.json") or b""),
        "report": json.loads(engine.read("report.json") or b""),
        "linears": Linears({}),
    }
    return EngineContents(**(values | changes))


def hostile_figures() -> Figures:
    comparison = Comparison("model", 20.0, 1.05, 0.01, 0.02, 0.01, 0.2, 1.5, 0.97)
    continuation = Continuation(EVIL, EVIL, 5, 0.5, EVIL, 6, 0.25, 3)
    position = Position(0, 1, 0.5, 9.0, EVIL, EVIL, EVIL, EVIL)
    generation = Generation(256, 0.2, 0.4, (continuation,), 0.1, 40.0, 0.25)
    return Figures(EVIL, "0", 8, True, 1, 1, 7, 21.0, (21.0,), (position,), comparison, (20.0,), generation)


def hostile_report(engine: Engine, weights: int) -> dict[str, Any]:
    report = json.loads(engine.read("report.json") or b"")
    row = {"module": EVIL, "source_dtype": EVIL, "format": EVIL, "bits": 4.25, "group": 64, "error": 0.1, "reason": ""}
    kept = {"name": "n", "format": "float32", "bits": 32, "group": None, "error": None, "reason": EVIL}
    coverage = [row | {"name": f"{EVIL}{i}", "bytes": 10, "error": i / weights, "group": 0} for i in range(weights)]
    return report | {
        "coverage": [*coverage, kept],
        "warnings": [EVIL],
        "notes": {EVIL: EVIL},
        "ignored_tensors": [EVIL],
    }


def test_the_page_of_an_engine(engine: Engine) -> None:
    text = (engine.read("report.html") or b"").decode()
    page = Page(text)
    shown = " ".join(page.text)
    for word in (
        "LlamaForCausalLM",
        "bits per parameter",
        "perplexity",
        "kl",
        "passed",
        "lm_head",
        "float32",
        "max_seq_len",
    ):
        assert word in shown, word
    assert "Texts written freely" in shown and "weights.safetensors" in shown
    assert not {"script", "link", "img", "iframe", "object", "form"} & page.tags
    assert all(not value.startswith(("http", "//")) for name, value in page.attributes if name in ("href", "src"))
    assert not any(name.startswith("on") for name, _ in page.attributes)
    assert "default-src 'none'" in text and "url(" not in text


def test_an_engine_that_was_not_measured(engine: Engine) -> None:
    report = {k: v for k, v in contents(engine).report.items() if k not in ("quality", "gate")}
    shown = " ".join(Page(render(contents(engine), report, {}, None).decode()).text)
    assert "Not measured" in shown and "Gate" not in shown


def test_hostile_names_are_text(engine: Engine) -> None:
    model = dataclasses.replace(engine.model, architecture=EVIL, rope=EVIL)
    recipe = {"options": {EVIL: EVIL}, "versions": {}}
    report = hostile_report(engine, 3) | {
        "gate": {"text": EVIL, "conditions": [{"metric": EVIL, "wanted": EVIL, "shown": EVIL, "passed": False}]}
    }
    page_bytes = render(contents(engine, model=model, recipe=recipe), report, {EVIL: 1}, hostile_figures())
    text = page_bytes.decode()
    page = Page(text)
    assert not {"script", "img"} & page.tags and not any(name.startswith("on") for name, _ in page.attributes)
    assert "\x00" not in text and "\u202e" not in text and "{{ 7 * 7 }}" in text
    assert "\\u{202e}\\u{0}\\u{d800}" in text
    names = [value for name, value in page.attributes if name == "class"]
    known = ["tiles", "columns", "soft", "plot", "scale", "ends", "legend", "flat", "ok", "failed", "n", "ours"]
    assert set(" ".join(names).split()) <= {*known, *(f"k{i}" for i in range(6))}


def test_the_weights_of_a_quantization(engine: Engine) -> None:
    kept = {"name": "lm_head.weight", "source_dtype": "bfloat16", "bytes": 9, "kept": "it is the head"}
    norm = {"name": "norm.weight", "dtype": "float32", "bytes": 8, "kept": "weight of norm"}
    made = {"name": "q_proj.weight", "source_dtype": "bfloat16", "format": "int4", "group": 64, "bits": 4}
    made |= {"bits_per_weight": 4.25, "error": 0.0912, "output_error": 0.034, "bytes": 7}
    report = {**contents(engine).report, "quantization": {"weights": [made, kept, norm]}}
    shown = " ".join(Page(render(contents(engine), report, {}, None).decode()).text)
    for word in ("int4", "4.25", "9.12 %", "3.4 %", "it is the head", "weight of norm", "All 3 weights"):
        assert word in shown, word
    assert "Error of each weight" in shown and "Error of each layer" in shown


def test_the_same_input_gives_the_same_bytes(engine: Engine) -> None:
    report = hostile_report(engine, 5)
    assert len({render(contents(engine), report, {"a": 1}, hostile_figures()) for _ in range(2)}) == 1


def test_many_weights(engine: Engine) -> None:
    page = Page(render(contents(engine), hostile_report(engine, 3000), {}, None).decode())
    assert "All 3001 weights" in " ".join(page.text)


def test_nothing_forces_the_page_to_be_wide(engine: Engine) -> None:
    """What makes pages wider than a telephone: lengths in pixels, words that can not be broken, tables."""
    text = (engine.read("report.html") or b"").decode()
    style = text[text.index("<style>") : text.index("</style>")]
    for rule in (
        "overflow-wrap: anywhere",
        "box-sizing: border-box",
        "white-space: pre-wrap",
        "prefers-color-scheme: dark",
        "min-width: 0",
    ):
        assert rule in style
    assert "width=device-width" in text and "nowrap" not in style
    assert "minmax(min(" in style and not [w for name, w in Page(text).attributes if name == "style"]


def test_visible() -> None:
    assert visible("plain text, ünïcode 漢字\n\t") == "plain text, ünïcode 漢字\n\t"
    assert visible("a\x1b[31m\u200fb\u2028") == "a\\u{1b}[31m\\u{200f}b\\u{2028}"


def test_plots() -> None:
    assert bars([], "", "") is None and strip([(0, "", "k0")]) is None
    plot = bars([(1.0, "a", "k0"), (0.0, "b", "k1"), (2.0, "c", "k0")], "first", "last")
    assert plot is not None and plot.largest == 2
    assert [b.height for b in plot.bars] == [HEIGHT / 2, 0, HEIGHT]
    assert all(b.x >= 0 and b.x + b.width <= WIDTH and b.y + b.height == HEIGHT for b in plot.bars)
    flat = bars([(0.0, "a", "k0")], "", "")
    assert flat is not None and flat.bars[0].height == 0
    parts = strip([(1, "a", "k0"), (3, "b", "k1")])
    assert parts is not None and [b.width for b in parts.bars] == [WIDTH / 4, WIDTH * 3 / 4]
