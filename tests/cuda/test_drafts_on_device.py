"""Medusa heads and EAGLE layers of engines for CUDA: they run on the device, and change no token."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from cuda_models import distance
from driver import counts, fake_gpu, held
from eagle_layers import good_layer, write_layer
from emulated import EmulatedDevice
from medusa_heads import HEADS, HIDDEN, TOKENS, write_heads
from safetensors.numpy import load_file
from script_models import next_tokens, script_rows, write_script_model

from llmc import LLM, SamplingParams
from llmc.__main__ import cli
from llmc.compiler.api import build_engine
from llmc.compiler.config import BuildConfig
from llmc.errors import UsageError
from llmc.runtime.devices.cuda.executor import CudaExecutor
from llmc.runtime.devices.cuda.memory import budget, plan_of
from llmc.runtime.devices.cuda.rows import rounded
from llmc.runtime.engine import load_engine
from llmc.runtime.speculative.eagle import EagleProposer
from llmc.runtime.speculative.medusa import HeadRunner, MedusaProposer
from llmc.runtime.speculative.opening import Speculation

CONTEXT = 24
PROMPTS = [[3], [200] * 11]
GREEDY: dict[str, Any] = {"temperature": 0}
ENGINES = {
    "right": ("eagle3", True, {"quantization": "rtn:bits=8,group=32", "compute": "float32"}),
    "tied": ("eagle", False, {"kv_dtype": "int8", "medusa_vocab": "70"}),
}
"""The kind of layer, whether the heads are right, and how the engine is built."""

OPTIONS = {"quantization": "quant", "kv_dtype": "kv-dtype", "medusa_vocab": "medusa-vocab"}
"""Of the command line."""


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """By name, built once: with heads and a layer, both for a model whose text is known."""
    return cache(lambda name: build(name, tmp_path_factory.mktemp(name)))


def build(name: str, folder: Path) -> Path:
    kind, right, options = ENGINES[name]
    model, rows = write_script_model(folder / "model", [], eos_token_id=2), script_rows()
    arrays, config = good_layer(kind, next_tokens([], len(rows)), rows, 0.6)
    (folder / "tree.json").write_text("[[1], [0], [0, 0], [2], [0, 0, 0]]")
    heads = {"medusa": write_heads(folder / "heads", right=right), "medusa_tree": str(folder / "tree.json")}
    sizes = {"max_seq_len": CONTEXT, "max_batch_tokens": 64, "max_sequences": 6}
    layer = write_layer(folder / "layer", arrays, config)
    target = {"target": "cuda:sm_90", "dtype": "bfloat16"}
    build_engine(model, folder / "engine", BuildConfig(eagle=layer, **heads, **sizes, **target, **options))
    return folder / "engine"


@pytest.mark.parametrize(("name", "drafts"), [("right", "medusa"), ("right", "eagle"), ("tied", "eagle")])
def test_tokens_are_those_without_drafts(
    engines: Callable[[str], Path], emulated: list[EmulatedDevice], name: str, drafts: str
) -> None:
    """Greedy and drawn ones, up to the end of the context."""
    params = [SamplingParams(max_tokens=CONTEXT, ignore_eos=True, **more) for more in (GREEDY, {"seed": 5})]
    texts = []
    for asked in (None, Speculation(drafts, tokens=5)):
        llm = LLM(engines(name), check=True, speculative=asked)
        waits = emulated[-1].waits
        texts.append([result.token_ids for result in llm.generate(PROMPTS, params)])
        assert [len(text) for text in texts[-1]] == [CONTEXT - len(prompt) for prompt in PROMPTS]
    assert texts[0] == texts[1]
    assert len(emulated) == 2, "the model and what drafts share a device"
    statistics = llm.scheduler.statistics
    assert statistics.failed_steps == 0
    assert statistics.drafted > statistics.accepted > 7
    if drafts == "medusa":  # one wait for a step, one for the heads
        assert emulated[-1].waits - waits <= 2 * statistics.steps
    assert drafts == "eagle" or "move_positions" in emulated[-1].names  # past the wrong first branch


def test_memory_of_heads_and_layers_is_planned(engines: Callable[[str], Path]) -> None:
    with fake_gpu([], memory=32 << 20) as gpu:
        taken = {}
        for drafts in (None, "medusa", "eagle"):
            llm = LLM(engines("right"), speculative=drafts, gpu_memory="16MiB")
            taken[drafts] = counts(gpu)["bytes"]
            assert taken[drafts] <= budget("16MiB", 32 << 20)
            assert counts(gpu)["contexts"] == 1
            llm.close()
            assert not held(gpu)
        assert taken[None] < min(taken["medusa"], taken["eagle"])


def test_kernels_of_parts_are_planned_once(engines: Callable[[str], Path]) -> None:
    """A draft engine is loaded by itself, be it the same one."""
    engine, again = load_engine(engines("right")), load_engine(engines("right"))
    kernels = plan_of(engine, "sm_90").kernels
    assert kernels > 0 and plan_of(again, "sm_90", engine).kernels == kernels
    for kind in (MedusaProposer, EagleProposer):
        assert plan_of(kind.beside(engine, None), "sm_90", engine).kernels == 0
    with fake_gpu([], memory=32 << 20):
        llm = LLM(engines("right"), speculative="medusa")
        assert isinstance(llm.executor, CudaExecutor) and llm.scheduler.speculator is not None
        proposer = llm.scheduler.speculator._proposer
        assert isinstance(proposer, MedusaProposer)
        heads = proposer._runner._executor
        assert isinstance(heads, CudaExecutor)
        assert (llm.executor.memory.kernels, heads.memory.kernels) == (kernels, 0)
        llm.close()


def test_a_dry_run_and_inspect_tell_the_memory_of_what_drafts(engines: Callable[[str], Path]) -> None:
    """Both tell the same, and what is told is what a load plans with."""
    for name, (kind, _, options) in ENGINES.items():
        folder = engines(name).parent
        parts = ["--medusa", folder / "heads", "--medusa-tree", folder / "tree.json", "--eagle", folder / "layer"]
        sizes = ["--max-seq-len", CONTEXT, "--max-batch-tokens", 64, "--max-sequences", 6, "--dtype", "bfloat16"]
        more = [text for key, value in options.items() for text in (f"--{OPTIONS.get(key, key)}", value)]
        given = ["build", folder / "model", "--target", "cuda:sm_90", "--dry-run", "--quiet", *parts, *sizes, *more]
        text = CliRunner().invoke(cli, list(map(str, given))).stdout
        assert "--spec medusa besides: weights " in text and "--spec eagle besides: weights " in text
        dry = json.loads(CliRunner().invoke(cli, [*map(str, given), "--json"]).stdout)["device_memory"]["drafts"]
        shown = json.loads(CliRunner().invoke(cli, ["inspect", str(engines(name)), "--json"]).stdout)
        report = json.loads((engines(name) / "report.json").read_text())
        assert dry == shown["device_memory"]["drafts"] == report["device_memory"]["drafts"], kind
        assert dry["medusa"]["block"] == 0 < dry["eagle"]["block"]
        assert min(dry["medusa"]["graphs"], dry["eagle"]["graphs"]) > 0


def test_heads_compute_what_they_are(engines: Callable[[str], Path], emulated: list[EmulatedDevice]) -> None:
    """With the output layer of the model, of some tokens; also of rows that come in several runs."""
    engine = engines("tied")
    llm = LLM(engine, speculative="medusa")
    speculator = llm.scheduler.speculator
    assert speculator is not None
    proposer = speculator._proposer
    assert isinstance(proposer, MedusaProposer)
    runner: HeadRunner = proposer._runner
    tensors = load_file(engine.parent / "heads/medusa_lm_head.safetensors")
    head = load_file(engine.parent / "model/model.safetensors")["lm_head.weight"][np.sort(TOKENS[:70])]
    x = np.random.default_rng(2).normal(size=(5, HIDDEN)).astype(np.float32)
    tokens = np.array([7, 0, 383, 7, 55], np.int32)
    table = load_file(engine.parent / "model/model.safetensors")["model.embed_tokens.weight"]
    found = runner._run(x, tokens)
    for number in range(HEADS):
        begin = x + table[tokens] @ tensors[f"{number}.token.weight"].T
        y = begin @ tensors[f"{number}.0.linear.weight"].T + tensors[f"{number}.0.linear.bias"]
        assert distance(found[number], (begin + y / (1 + np.exp(-y))) @ head.T) < 0.03
    alone = np.concatenate([runner.best(x[i : i + 1], tokens[i : i + 1], 4) for i in range(5)], axis=1)
    both = runner.best(np.concatenate([x, x]), np.concatenate([tokens, tokens]), 4)
    assert np.array_equal(both[:, 5:], alone)


def test_rows_are_rounded_to_the_nearest() -> None:
    bits = np.array([0x3F808000, 0x3F818000, 0x3F808001, 0x7F7FFFFF, 0x7F800001, 0xFF800000], np.uint32)
    found = rounded("bfloat16", bits.view(np.float32)).view(np.uint16)
    assert found.tolist() == [0x3F80, 0x3F82, 0x3F81, 0x7F80, 0x7FC0, 0xFF80]
    assert rounded("float16", np.float32([1.5])).view(np.float16) == 1.5


def test_steps_are_not_timed_on_another_machine(engines: Callable[[str], Path], tmp_path: Path) -> None:
    folder = engines("right").parent
    config = BuildConfig(medusa=folder / "heads", medusa_cost="measure", target="cuda:sm_90")
    with pytest.raises(UsageError, match="--medusa-cost measure: steps of engines for cuda:sm_90 are not run here"):
        build_engine(folder / "model", tmp_path / "engine", config)
