"""Real models say the same as in transformers: golden texts, greedy tokens, perplexity."""

import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from llmc import LLM, SamplingParams
from llmc.compiler.api import build_engine
from llmc.compiler.config import BuildConfig

pytestmark = pytest.mark.real_model

SMOLLM2, QWEN, GEMMA = "SmolLM2-135M-Instruct", "Qwen2.5-Coder-0.5B-Instruct", "gemma-3-270m"
PERPLEXITY = {f"{SMOLLM2}-float32": 30.6406, f"{SMOLLM2}-bfloat16": 30.6467}
"""Of transformers in float32 on the first 8 windows of 512 tokens of WikiText-2 (the folder's README)."""

ModelFinder = Callable[[str], Path]


@pytest.fixture(scope="module")
def engine(real_model: ModelFinder, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Builds an engine once; by model and dtype."""
    built: dict[tuple[str, str], Path] = {}

    def build(name: str, dtype: str = "auto") -> Path:
        key = (name, dtype)
        if key not in built:
            built[key] = tmp_path_factory.mktemp("engines") / "engine"
            build_engine(real_model(name), built[key], BuildConfig(dtype=dtype, max_seq_len=2048))
        return built[key]

    return build


def prompts(shared: Path, count: int) -> list[str]:
    lines = (shared / "data/mt_bench_prompts.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["turns"][0] for line in lines[:count]]


def most_likely(directory: Path, ids: list[list[int]], starts: list[int]) -> list[list[int]]:
    """What transformers takes for the most likely token after each of the tokens from a start on: one pass for each."""
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    results = []
    for tokens, start in zip(ids, starts, strict=True):
        with torch.inference_mode():
            logits = model(torch.tensor([tokens]), use_cache=False).logits[0]
        results.append(logits[start - 1 : -1].argmax(-1).tolist())
    return results


def test_stories_golden_text(shared: Path, tmp_path: Path) -> None:
    folder = shared / "models/stories260K"
    build_engine(folder, tmp_path / "engine", BuildConfig())
    result = LLM(tmp_path / "engine").generate([[1]], SamplingParams(max_tokens=200, ignore_eos=True))[0]
    assert [1, *result.token_ids] == json.loads((folder / "expected_greedy_ids.json").read_text())
    assert result.text == (folder / "expected_greedy.txt").open(encoding="utf-8", newline="").read()


@pytest.mark.parametrize(
    ("name", "count"), [(f"{SMOLLM2}-float32", 20), (f"{QWEN}-bfloat16", 8), (f"{GEMMA}-bfloat16", 8)]
)
def test_greedy_tokens_equal_transformers(
    name: str, count: int, shared: Path, real_model: ModelFinder, engine: Callable[..., Path]
) -> None:
    """64 tokens of each prompt; weights in float32 on both sides."""
    directory = real_model(name)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    ids = [tokenizer(text).input_ids for text in prompts(shared, count)]
    results = LLM(engine(name, "float32")).generate(ids, SamplingParams(max_tokens=64))
    whole = [prompt + list(r.token_ids) for prompt, r in zip(ids, results, strict=True)]
    expected = most_likely(directory, whole, [len(prompt) for prompt in ids])
    assert [list(r.token_ids) for r in results] == expected


def test_tokenizer_and_chat_template_equal_transformers(
    shared: Path, real_model: ModelFinder, engine: Callable[..., Path]
) -> None:
    name = f"{SMOLLM2}-float32"
    theirs: Any = AutoTokenizer.from_pretrained(real_model(name))
    ours = LLM(engine(name, "float32")).tokenizer
    assert ours is not None
    for text in prompts(shared, 80):
        assert ours.encode(text) == theirs(text).input_ids
        messages = [{"role": "user", "content": text}]
        expected = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert ours.encode_chat(messages) == list(expected)


def test_perplexity_equals_transformers(shared: Path, engine: Callable[..., Path]) -> None:
    """That of bfloat16 is in test_kv_types.py."""
    name = f"{SMOLLM2}-float32"
    llm = LLM(engine(name, "auto"))
    assert llm.tokenizer is not None
    with (shared / "data/wikitext2_test.txt").open(encoding="utf-8", newline="") as file:
        ids = llm.tokenizer.encode(file.read())
    windows = [ids[start : start + 512] for start in range(0, 8 * 512, 512)]
    results = llm.generate(windows, SamplingParams(max_tokens=0, prompt_logprobs=0))
    scores = [entry.logprob for r in results for entry in (r.prompt_logprobs or ()) if entry is not None]
    assert len(scores) == 8 * 511
    perplexity = math.exp(-sum(scores) / len(scores))
    print(f"{name}: perplexity {perplexity:.4f}, transformers {PERPLEXITY[name]}")
    assert perplexity == pytest.approx(PERPLEXITY[name], abs=0.01)


@pytest.mark.parametrize("name", PERPLEXITY)
def test_eval_equals_the_protocol(
    name: str, shared: Path, real_model: ModelFinder, engine: Callable[..., Path]
) -> None:
    """`llmc eval` on the engine and on its source model; the source is transformers itself, only cut differently."""
    command = ["eval", str(engine(name, "auto")), "--against", str(real_model(name)), "--tokens", "24", "--json"]
    command += ["--eval", str(shared / "data/wikitext2_test.txt"), "--context", "512", "--quiet"]
    command += ["--gate", "ppl<=+0.1%,top1>=0.98,kl<=0.001"]
    done = subprocess.run([sys.executable, "-P", "-m", "llmc", *command], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["scored"], found["windows_of"]) == (8 * 511, 595)
    assert found["comparison"]["perplexity"] == pytest.approx(PERPLEXITY[name], abs=0.001)
    assert found["perplexity"] == pytest.approx(PERPLEXITY[name], abs=0.01)
    assert found["generation"]["divergence"] > (20 if name.endswith("float32") else 4)


@pytest.mark.parametrize(
    ("example", "arguments", "expected"),
    [("generate.py", (), "'The capital of France is' -> ' Paris."), ("chat.py", ("What is 2 + 2?",), "4")],
)
def test_examples_run(example: str, arguments: tuple[str, ...], expected: str, engine: Callable[..., Path]) -> None:
    script = Path(__file__).parents[2] / "examples" / example
    command = [sys.executable, "-P", str(script), str(engine(f"{SMOLLM2}-float32", "float32")), *arguments]
    assert expected in subprocess.run(command, capture_output=True, text=True, check=True).stdout
