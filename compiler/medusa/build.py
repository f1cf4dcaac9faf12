"""Puts heads into an engine that is being built: their plan and weights, and the tree that they are asked for."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from llmc.compiler.engine_writer import ArrayTensor, DraftPart, EngineContents, add_part, to_json, write_manifest
from llmc.compiler.lower import LoweredGraph
from llmc.compiler.medusa.collect import Features, hidden_rows
from llmc.compiler.medusa.heads import TOKENS, Heads, count_heads, read_heads
from llmc.compiler.medusa.invent import invent
from llmc.compiler.medusa.lowering import (
    describe,
    embedding_step,
    lower_heads,
    output_factors,
    output_step,
)
from llmc.compiler.medusa.tree import COSTS, RANKS, Cost, choose, given_tree, read_cost, shown, step_cost
from llmc.compiler.progress import Progress
from llmc.compiler.quantize import locked
from llmc.compiler.quantize.build import describe as describe_text
from llmc.compiler.staging import Staging
from llmc.errors import CompileError, UsageError
from llmc.plugins import kernels
from llmc.quantization.calibration import Calibration, CalibrationSettings
from llmc.runtime import strict
from llmc.runtime.batch import Batch, EmbeddingExecutor
from llmc.runtime.heads import PLAN, TOKEN_IDS, TREE, WEIGHTS, HeadTree
from llmc.runtime.llm import LLM
from llmc.runtime.request import SamplingParams

if TYPE_CHECKING:
    from llmc.compiler.api import Compiled
    from llmc.compiler.config import BuildConfig
    from llmc.quantization.base import Method
    from llmc.runtime.lora import Linears

TEXTS, PROMPT, ANSWER = 16, 64, 128
"""What acceptance is measured on: so many windows of the calibration begin so, and are continued greedily."""

CHATS, LENGTH, SEED = 32, 384, 1
"""Or so many prompts that a model which chats writes itself; heads are trained on those of another seed."""

OWN = "prompts of the model"
"""What recipe.json calls them."""

VOCABULARY = 8192
"""Tokens that heads choose from, if they know which are frequent: few more would be right, and all take far longer."""

COST_ROWS = (1, 2, 4, 8, 16, 32, 64)
COST_CONTEXT, COST_ROUNDS = 128, 7
"""Tokens in the cache while steps are timed, and how often each is."""


@dataclass(frozen=True)
class HeadsToBuild:
    """Heads that were read and looked at before anything else is done. ``tree`` None: it is to be chosen.

    ``ids``: tokens, rising, that they choose from; None: all.
    """

    heads: Heads
    ids: NDArray[np.int32] | None
    tree: HeadTree | None
    cost: Cost | None
    """None: to be measured."""
    locked: Mapping[str, Any] | None


def check_heads(config: BuildConfig) -> None:
    """Refuse heads that can't be read, and a tree that is not for them, before there is a model to compare them with.

    Raises:
        CheckpointError, UsageError: as `open_heads`.
    """
    if config.medusa is not None:
        if config.medusa_cost == "measure" and config.target != "cpu":
            raise UsageError(
                f"--medusa-cost measure: steps of engines for {config.target} are not run here; use default"
            )
        heads = count_heads(config.medusa, config.allow_hard_links)
        if config.locked is None:
            given_tree(config.medusa_tree, heads)


def open_heads(config: BuildConfig, steps: LoweredGraph, target: str) -> HeadsToBuild | None:
    """Read the heads that the build is asked to include; None if it isn't.

    Raises:
        CheckpointError: they are damaged, or of another model.
        UsageError: the tree is none.
    """
    section = None if config.locked is None else locked.read(config.locked).get("medusa")
    if config.medusa is None:
        if section is not None:
            raise UsageError(f"--locked {config.locked}: that engine has Medusa heads; give them with --medusa HEADS")
        return None
    if config.locked is not None and section is None:
        raise UsageError(f"--medusa: the build of {config.locked} had no heads; leave the option away")
    last = output_step(steps)
    assert last.inputs[0] is not None, "a product has an input"
    hidden, vocabulary = last.inputs[0].shape[-1].constant, last.outputs[0].shape[-1].constant
    table = embedding_step(steps)
    embedding = None if table is None else table.outputs[0].shape[-1].constant
    heads = read_heads(config.medusa, hidden, vocabulary, config.allow_hard_links, embedding)
    if section is not None:
        where = f"--locked {config.locked}: medusa"
        tree = strict.load(HeadTree, section.get("tree"), where)
        tree.check(where, UsageError)
        asked = section.get("vocabulary", "all")
        if asked != "all" and type(asked) is not int:
            raise UsageError(f"{where}: its vocabulary is damaged")
        ids = _tokens(str(asked), heads, vocabulary)
        return HeadsToBuild(heads, ids, tree, read_cost(section.get("cost"), where), section)
    cost = None if config.medusa_cost == "measure" else COSTS[target.partition(":")[0]]
    ids = _tokens(config.medusa_vocab, heads, vocabulary)
    return HeadsToBuild(heads, ids, given_tree(config.medusa_tree, len(heads.heads)), cost, None)


def _tokens(asked: str, heads: Heads, vocabulary: int) -> NDArray[np.int32] | None:
    """The most frequent ones, rising; None: all.

    Raises:
        UsageError: nobody knows which are frequent, or not of so many.
    """
    if asked == "all" or (asked == "auto" and heads.frequent is None):
        return None
    count = VOCABULARY if asked == "auto" else int(asked)
    if count >= vocabulary:
        return None
    if heads.frequent is None or count < 1:
        raise UsageError(
            f"--medusa-vocab {asked}: expected 1 or more, of heads that have a {TOKENS}, as `llmc medusa train` "
            "writes it; use all"
        )
    if asked != "auto" and count > (most := len(heads.frequent)):
        raise UsageError(f"--medusa-vocab {asked}: {TOKENS} of the heads has {most} tokens; ask for fewer, or all")
    return np.sort(heads.frequent[:count])


def add_heads(
    wanted: HeadsToBuild,
    staging: Staging,
    contents: EngineContents,
    compiled: Compiled,
    config: BuildConfig,
    text: Callable[[], Calibration],
    progress: Progress,
) -> EngineContents:
    """Write the files of the heads into an engine that is complete otherwise; what is recorded of them is added.

    Raises:
        CompileError: the heads can't be lowered.
        UsageError: there is no text to choose a tree on.
    """
    progress.step("adding Medusa heads")
    part, method = heads_part(wanted, compiled, config, contents.linears)
    lowered, sizes = part.write(staging, compiled.target, {tensor.name for tensor in contents.weights})
    first = wanted.tree or HeadTree(len(wanted.heads.heads), ((0,),))
    staging.write(TREE, to_json(strict.dump(first)))
    write_manifest(staging, contents)
    share = sizes["read_bytes"] / sum(tensor.nbytes for tensor in contents.weights)
    asked = "all" if wanted.ids is None else len(wanted.ids)
    section = wanted.locked or {"vocabulary": asked} | _chosen(wanted, staging.path, share, config, text, progress)
    tree = strict.load(HeadTree, section["tree"], TREE)
    staging.write(TREE, to_json(strict.dump(tree)))
    report = {
        **section,
        "shown": shown(tree, lowered.plan.value(lowered.plan.logits).shape[1].constant),
        "heads": len(wanted.heads.heads),
        "layers": len(wanted.heads.heads[0].blocks),
        "tied": wanted.heads.is_tied,
        "sees_token": wanted.heads.sees_token,
        "quantization": describe(method),
        **sizes,
    }
    return add_part(staging, contents, part, section, report)


def heads_part(
    wanted: HeadsToBuild, compiled: Compiled, config: BuildConfig, linears: Linears | None = None
) -> tuple[DraftPart, Method | None]:
    """The heads as a plan of their own, and how the weights that only they have are quantized.

    ``linears``: of the engine; without them nothing is known of factors, which change no size but that of their vector.
    """
    recipe = config.quantization_recipe
    method = None if recipe is None else recipe.method
    steps, dtype, factors = compiled.steps, compiled.dtype, output_factors(compiled.steps, linears)
    graph = lower_heads(wanted.heads, steps, factors, dtype, method, config.compute, wanted.ids)
    few = replace(compiled.limits, max_batch_tokens=compiled.limits.max_sequences)
    more = () if wanted.ids is None else (ArrayTensor(TOKEN_IDS, wanted.ids),)
    return DraftPart("medusa", (PLAN, WEIGHTS), graph, few, compiled.kv_dtype, more), method


def _chosen(
    wanted: HeadsToBuild,
    engine: Path,
    share: float,
    config: BuildConfig,
    text: Callable[[], Calibration],
    progress: Progress,
) -> dict[str, Any]:
    """The section of recipe.json. ``share``: bytes that the heads read, as a part of those of the model."""
    cost = wanted.cost or _measured_cost(engine, progress)
    section: dict[str, Any] = {
        "asked": "file" if config.medusa_tree.endswith(".json") else config.medusa_tree,
        "cost": [list(pair) for pair in cost],
        "cost_source": "default" if wanted.cost else "measured",
    }
    if wanted.tree is not None:
        return section | {"tree": strict.dump(wanted.tree)}
    ranks, measured_on = _ranks(engine, config, text, progress)
    choice = choose(ranks, cost, round(share * step_cost(cost, len(wanted.heads.heads)), 4))
    if choice.speedup <= 1:
        progress.note(
            f"Medusa heads: even the best tree is expected to be only {choice.speedup:.2f} times as fast as none, "
            "so --spec medusa will gain nothing; train better heads, or measure this machine with --medusa-cost measure"
        )
    expected = {
        "nodes": choice.nodes,
        "tokens_per_step": choice.tokens_per_step,
        "speedup": choice.speedup,
        "places": len(ranks),
    }
    return section | {
        "tree": strict.dump(choice.tree),
        "expected": expected,
        "calibration": measured_on,
        "isa": kernels.best_isa(),
    }


def _ranks(
    engine: Path, config: BuildConfig, text: Callable[[], Calibration], progress: Progress
) -> tuple[NDArray[np.int64], dict[str, Any]]:
    """Which candidate of each head was right, [places, heads], in what the engine itself writes; and on which texts."""
    from llmc.runtime.speculative.medusa import HeadRunner

    llm = LLM(engine, prefix_cache=False)
    try:
        assert llm.engine is not None, "it was loaded"
        if not isinstance(llm.executor, EmbeddingExecutor):
            raise UsageError("LLMC_REFERENCE=1 runs no heads; leave it away, or give a tree")
        runner = HeadRunner(llm.engine)
        context = llm.engine.limits.max_seq_len
        progress.step("measuring Medusa heads")
        prompts, measured_on = _prompts(llm, context, config, text)
        progress.step("measuring Medusa heads", len(prompts), "texts")
        is_chat = measured_on["source"] == OWN
        params = [SamplingParams(max_tokens=min(ANSWER, context - len(ids)), ignore_eos=not is_chat) for ids in prompts]
        results = llm.generate(prompts, params)
        found = []
        for prompt, result in zip(prompts, results, strict=True):
            answer = list(result.token_ids)
            parts = hidden_rows(llm.executor, llm.engine, [*prompt, *answer][:-1], len(prompt) - 1)
            rows = np.concatenate(list(parts))
            tokens = np.array(answer, np.int32)
            targets = Features(rows, tokens, np.zeros(len(answer), np.int32)).targets(runner.tree.heads)
            right = runner.best(rows, tokens, RANKS) == targets.T[:, :, None]
            ranks = np.where(right.any(-1), right.argmax(-1), RANKS).T
            found.append(ranks[(targets >= 0).all(1)])
            progress.advance(1)
    finally:
        llm.close()
    places = np.concatenate(found)
    if not len(places):
        raise CompileError("--medusa-tree auto: the engine is too short to try heads; give a tree, such as chain:1")
    return places, measured_on


def _prompts(
    llm: LLM, context: int, config: BuildConfig, text: Callable[[], Calibration]
) -> tuple[list[list[int]], dict[str, Any]]:
    """What is answered: what the model expects to be asked, if it chats and no text is named; else the calibration."""
    tokenizer, length = llm.tokenizer, min(LENGTH, context)
    unnamed = config.calibration == CalibrationSettings()
    if unnamed and tokenizer is not None and tokenizer.chat_template is not None:
        own = invent(llm, CHATS, length, SEED)
        ids = [tokenizer.encode_chat([{"role": "user", "content": prompt}]) for prompt in own]
        if prompts := [prompt for prompt in ids if len(prompt) + 1 < length]:
            return prompts, {"source": OWN, "samples": len(prompts), "seed": SEED}
    calibration = text()
    windows = calibration.tokens[:TEXTS]
    begin = max(1, min(PROMPT, windows.shape[1], context // 2))
    return [list(map(int, window[:begin])) for window in windows], describe_text(calibration, config.calibration)


def _measured_cost(engine: Path, progress: Progress) -> Cost:
    """Times of steps on this machine, those of different sizes in turn; the least of each counts."""
    llm = LLM(engine, prefix_cache=False)
    progress.step("measuring steps")
    try:
        assert llm.engine is not None, "it was loaded"
        limits, size = llm.engine.limits, llm.engine.kv_cache.block_size
        most = min(limits.max_batch_tokens, limits.max_seq_len)
        sizes = [rows for rows in COST_ROWS if rows <= most]
        if len(sizes) < 2:
            raise UsageError("--medusa-cost measure: the engine takes one row a step; use larger limits")
        computed = min(COST_CONTEXT, limits.max_seq_len - sizes[-1])
        tables = np.arange(-(-(computed + sizes[-1]) // size), dtype=np.int32)[None]
        least = dict.fromkeys(sizes, float("inf"))
        for _ in range(COST_ROUNDS):
            for rows in sizes:
                numbers = np.arange(rows, dtype=np.int32)
                ends, start = np.array([0, rows], np.int32), np.array([computed], np.int32)
                batch = Batch(np.zeros(rows, np.int32), numbers + computed, numbers, ends, start, tables)
                begin = time.perf_counter()
                llm.executor.step(batch)
                least[rows] = min(least[rows], time.perf_counter() - begin)
    finally:
        llm.close()
    return tuple((rows, round(least[rows] / least[1], 3)) for rows in sizes)
