"""Medusa heads on a model whose text is known: perfect ones are always right, others change nothing."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from medusa_heads import VOCABULARY, write_heads
from script_models import write_script_model

from llmc import LLM, SamplingParams
from llmc.compiler.api import build_engine
from llmc.compiler.config import BuildConfig
from llmc.errors import EngineError, UsageError
from llmc.runtime.engine import Weight, load_engine
from llmc.runtime.heads import TOKEN_IDS, HeadTree, read_heads
from llmc.runtime.speculative.medusa import FEW, MedusaProposer, _best, grow
from llmc.runtime.speculative.opening import Speculation

PROMPTS = [[3], [10, 11, 12], [200] * 20, [383]]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("medusa")
    model = write_script_model(folder / "model", [], eos_token_id=2)
    engines = {}
    for name, tree in (("perfect", "chain:3"), ("random", "tree.json")):
        heads = write_heads(folder / f"{name}-heads", right=name == "perfect")
        (folder / "tree.json").write_text("[[0], [1], [0, 0], [2], [0, 0, 3], [1, 1]]")
        path = tree if tree.startswith("chain") else str(folder / tree)
        vocabulary = "all" if name == "perfect" else "90"
        config = BuildConfig(medusa=heads, medusa_tree=path, medusa_vocab=vocabulary, max_seq_len=96)
        build_engine(model, folder / name, config)
        engines[name] = folder / name
    return engines


def answers(engine: Path, speculative: str | None, **params: Any) -> tuple[list[Any], Any]:
    fixed = speculative and Speculation(speculative, tokens=8)  # adaptive sizes depend on the clock
    llm = LLM(engine, threads=1, check=True, speculative=fixed)
    results = llm.generate(PROMPTS, SamplingParams(max_tokens=40, **params))
    alone = llm.generate(PROMPTS[:1], SamplingParams(max_tokens=40, **params))
    assert alone[0].token_ids == results[0].token_ids
    speculator = llm.scheduler.speculator
    acceptance = None if speculator is None else speculator.acceptance.to_json()
    return [(result.token_ids, result.finish_reason) for result in results], acceptance


def test_perfect_heads_are_always_right(built: dict[str, Path]) -> None:
    plain, none = answers(built["perfect"], None, ignore_eos=True)
    found, acceptance = answers(built["perfect"], "medusa", ignore_eos=True)
    assert none is None and found == plain
    assert acceptance["accepted"] == acceptance["drafted"] > 0
    assert acceptance["tokens_per_step"] > 3.5  # the last step of a text has less to draft


@pytest.mark.parametrize("params", [{}, {"temperature": 1.5, "seed": 5}, {"repetition_penalty": 1.3}])
def test_random_heads_change_nothing(built: dict[str, Path], params: dict[str, Any]) -> None:
    plain, _ = answers(built["random"], None, **params)
    found, acceptance = answers(built["random"], "medusa", **params)
    assert found == plain
    assert acceptance["drafted"] > 0


def test_trees_are_cut_to_what_there_is_room_for() -> None:
    tree = HeadTree(2, ((0,), (0, 1), (2,), (2, 0)))
    candidates = np.array([[5, 6, 7], [8, 9, 3]])
    whole = grow(tree, candidates, 9, 9)
    assert (whole.tokens, whole.parents) == ((5, 9, 7, 8), (-1, 0, -1, 2))
    assert grow(tree, candidates, 9, 1).tokens == (5, 7)
    assert grow(tree, candidates, 3, 2).tokens == (5, 9, 7)


@pytest.mark.parametrize("ranks", [1, 3, FEW, FEW + 1, 40, 50])
def test_the_best_come_first_and_the_lower_id_of_equals(ranks: int) -> None:
    logits = np.random.default_rng(ranks).permutation(2 * 3 * 40).reshape(2, 3, 40).astype(np.float32)
    logits[1, 2, [7, 11]] = 1000
    before = logits.copy()
    found = _best(logits, ranks)
    assert np.array_equal(found, np.argsort(-logits, axis=-1, kind="stable")[..., :ranks])
    assert np.array_equal(logits, before)


def test_nodes_are_worth_what_was_measured_of_them_or_of_their_heads() -> None:
    def gains(tree: HeadTree) -> tuple[float, ...]:
        runner: Any = SimpleNamespace(tree=tree)
        return MedusaProposer(runner).gains

    tree = HeadTree(2, ((0,), (0, 0), (1,)))
    assert gains(tree) == (0.5, 0.25, 0.25)
    tree = replace(tree, accuracy=((0.6, 0.2), (0.4, 0.1)))
    assert gains(tree) == pytest.approx((0.6, 0.24, 0.2))
    assert gains(replace(tree, gains=(0.6, 0.4, 0.2))) == (0.6, 0.4, 0.2)


def test_only_rows_of_the_arena_are_written_from_outside(built: dict[str, Path]) -> None:
    engine, folder = load_engine(built["random"]), built["random"] / "medusa"
    assert engine.heads is not None
    own, tree = {**engine.weights, **engine.heads.weights}, (folder / "tree.json").read_bytes()
    plan = json.loads((folder / "plan.json").read_bytes().replace(b'"hidden"', b'"other"'))
    weight = next(value for value in plan["values"] if value["storage"] == "weight")
    named = json.loads(json.dumps(plan).replace(f'"name": {json.dumps(weight["name"])}', '"name": "hidden"'))
    for step in named["steps"]:
        step["inputs"] = ["hidden" if name == weight["name"] else name for name in step["inputs"]]
    for spoiled in (plan, named):
        with pytest.raises(EngineError, match=r"plan.json: heads keep no cache and have an input 'hidden'"):
            read_heads(json.dumps(spoiled).encode(), tree, own, engine.weights, VOCABULARY, engine.limits, "there")


def test_heads_of_few_tokens_name_tokens_of_the_model(built: dict[str, Path]) -> None:
    engine, folder = load_engine(built["random"]), built["random"] / "medusa"
    assert engine.heads is not None and engine.heads.token_ids is not None
    plan, tree = (folder / "plan.json").read_bytes(), (folder / "tree.json").read_bytes()
    ids = engine.heads.token_ids
    for wrong in (None, ids[:-1], ids[::-1], ids.astype(np.int64), ids - ids[0] - 1, ids + VOCABULARY - ids[-1]):
        own = dict(engine.heads.weights)
        if wrong is not None:
            own[TOKEN_IDS] = cast(Weight, SimpleNamespace(name=TOKEN_IDS, dtype="int32", shape=(1,), array=wrong))
        with pytest.raises(EngineError, match="its 90 logits are not those of tokens of the model"):
            read_heads(plan, tree, own, engine.weights, VOCABULARY, engine.limits, "there")


def test_what_makes_no_sense_is_refused(built: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="leave =x away"):
        LLM(built["random"], threads=1, speculative="medusa=x")
    build_engine(write_script_model(tmp_path / "model", []), tmp_path / "engine", BuildConfig(max_seq_len=96))
    with pytest.raises(UsageError, match=r"has no Medusa heads; build it with: llmc build MODEL --medusa HEADS"):
        LLM(tmp_path / "engine", threads=1, speculative="medusa")
