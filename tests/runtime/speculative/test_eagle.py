"""EAGLE layers: their numbers are those of the formula, trees of good ones are right, and none changes what is said."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import engines
import numpy as np
import pytest
import torch
from eagle_layers import Reference, config_of, good_layer, random_layer, write_layer
from packed import random_model
from script_models import T0, next_tokens, script_rows, write_script_model

from llmc import LLM, SamplingParams
from llmc.compiler.api import build_engine
from llmc.compiler.config import BuildConfig
from llmc.errors import EngineError, UsageError
from llmc.runtime.eagle import read_eagle
from llmc.runtime.engine import load_engine
from llmc.runtime.kv_cache import BlockTable
from llmc.runtime.speculative.base import Query, Tree
from llmc.runtime.speculative.eagle import EagleProposer, EagleRunner, _Part
from llmc.runtime.speculative.opening import Speculation

LAYERS, BLOCKS = (2, 3, 4), 12
KINDS = ("eagle", "eagle3")


class Built:
    """A model of seven layers, a random layer for it, their engine and the formula."""

    def __init__(self, folder: Path, kind: str) -> None:
        self.kind, self.config = kind, config_of(kind)
        self.arrays = random_layer(kind, self.config)
        self.model = random_model(engines.small_llama(num_hidden_layers=7), "eager")
        self.model.save_pretrained(folder / "model")
        layer = write_layer(folder / "layer", self.arrays, self.config)
        options: dict[str, Any] = {"dtype": "float32", "max_seq_len": 128, "max_batch_tokens": 48}
        build_engine(folder / "model", folder / "engine", BuildConfig(eagle=layer, **options))
        self.path = folder / "engine"
        embedding, head = self.model.model.embed_tokens.weight, self.model.lm_head.weight
        self.reference = Reference(kind, self.arrays, self.config, embedding.detach(), head.detach())

    def features(self, tokens: list[int]) -> torch.Tensor:
        """By transformers, of all tokens."""
        with torch.no_grad():
            states = self.model(torch.tensor([tokens]), output_hidden_states=True).hidden_states
        chosen = [states[-1]] if self.kind == "eagle" else [states[layer] for layer in LAYERS]
        return torch.cat(chosen, -1)[0]


@pytest.fixture(scope="module", params=KINDS)
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Built:
    return Built(tmp_path_factory.mktemp(request.param), request.param)


def close(found: Any, expected: torch.Tensor) -> bool:
    wanted = expected.numpy()
    return bool(np.abs(found - wanted).max() < 2e-4 * max(1.0, np.abs(wanted).max()))


def test_the_layer_computes_what_its_formula_says(built: Built) -> None:
    """Rows of a text in two parts, then a tree behind them, all beside another sequence."""
    rng = np.random.default_rng(3)
    runner = EagleRunner(load_engine(built.path), num_blocks=BLOCKS, threads=1)
    width = built.features([1]).shape[1]
    parents = [-1, -1, 0, 2, 1, 0]
    depths = [0, 0, 1, 2, 1, 1]
    tokens, known = rng.integers(0, 131, 21 + len(parents)).tolist(), 21
    given = torch.tensor(rng.normal(size=(known, width)), dtype=torch.float32)
    own = torch.tensor(rng.normal(size=(len(parents), 60)), dtype=torch.float32)
    hidden = torch.cat([built.reference.join(given), own])
    positions = [*range(known), *(known + depth for depth in depths)]
    mask = torch.ones(len(tokens), len(tokens), dtype=torch.bool).tril()
    for node, parent in enumerate(parents):
        mask[known + node, known:] = mask[known + parent, known:] if parent >= 0 else False
        mask[known + node, known + node] = True
    features, logits = built.reference.rows(hidden, torch.tensor(tokens), torch.tensor(positions), mask)

    table, other = BlockTable(), BlockTable()
    table.extend([4, 1, 7])
    other.extend([3])
    beside = _Part(other, 0, [7, 8], [0, 1], given.numpy()[:2], [1])
    found = []
    for begin, end in ((0, 9), (9, known)):
        rows = tokens[begin:end], positions[begin:end], given.numpy()[begin:end]
        part = _Part(table, begin, *rows, [end - begin - 1])
        _, (own_rows, last) = runner.run([beside, part], of_model=True)
        assert close(last[0], logits[end - 1])
        found.append(own_rows)
    wanted = list(range(len(parents)))
    tree = _Part(table, known, tokens[known:], positions[known:], own.numpy(), wanted, parents)
    chain = _Part(other, 2, [9], [2], own.numpy()[:1], [0], [-1])
    (own_rows, scores), _ = runner.run([tree, chain], of_model=False)
    assert close(np.concatenate([*found, own_rows]), features)
    assert close(scores, logits[known:])


class Watch(EagleProposer):
    """Compares trees with those that the formula gives."""

    built: Built
    seen = 0

    def propose(self, queries: list[Query]) -> list[Tree]:
        trees = super().propose(queries)
        for query, tree in zip(queries, trees, strict=True):
            self._compare(query.sequence.tokens, tree)
        return trees

    def _compare(self, tokens: list[int], tree: Tree) -> None:
        """The first child of each node is what the layer thinks likeliest, on the path to it."""
        reference, ids = self.built.reference, self._runner.eagle.token_ids
        known = reference.join(self.built.features(tokens[:-1]))
        own: dict[int, torch.Tensor] = {}
        for node in sorted(tree.children):
            path = []
            while node >= 0:
                path.append(node)
                node = tree.parents[node]
            path.reverse()
            hidden = torch.cat([known, *(own[above] for above in [-1, *path[:-1]] if path)])
            taken = torch.tensor(tokens[1:] + [tree.tokens[step] for step in path])
            size = len(taken)
            mask = torch.ones(size, size, dtype=torch.bool).tril()
            features, logits = reference.rows(hidden, taken, torch.arange(size), mask)
            last = path[-1] if path else -1
            own[last] = features[-1:]
            best = int(logits[-1].argmax())
            assert tree.tokens[tree.children[last][0]] == (best if ids is None else ids[best])
            self.seen += 1


def test_trees_are_those_of_the_formula(built: Built) -> None:
    """With prompts in chunks, beginnings from the prefix cache, and contexts that are computed twice."""
    prompts = [[5, 6, 7], list(range(3, 90)), list(range(3, 55)), [9] * 4]
    params = SamplingParams(max_tokens=14, ignore_eos=True)
    plain = LLM(built.path, threads=1)
    expected = [plain.generate(prompt, params)[0].token_ids for prompt in prompts]
    llm = LLM(built.path, threads=1, speculative=Speculation("eagle", tokens=7), check=True, num_blocks=8)
    speculator = llm.scheduler.speculator
    assert speculator is not None
    proposer = speculator._proposer
    assert isinstance(proposer, EagleProposer)
    proposer.__class__ = Watch
    assert isinstance(proposer, Watch)
    proposer.built = built
    assert llm.generate(prompts[1], params)[0].token_ids == expected[1]
    assert [result.token_ids for result in llm.generate(prompts, params)] == expected
    assert llm.scheduler.statistics.prefix_hits > 0
    assert llm.scheduler.statistics.preemptions > 0
    assert proposer.seen > 40
    assert speculator.acceptance.drafted > 60
    assert not proposer._states


def test_features_are_those_of_transformers(built: Built) -> None:
    """Of all tokens, whatever logits are asked for."""
    llm = LLM(built.path, threads=1)
    packed = engines.Packed(llm.executor, {"a": list(range(3, 40)), "b": [9, 8, 7, 100]})
    rows: dict[str, list[Any]] = {"a": [], "b": []}
    for step in ([("a", 20), ("b", 1)], [("b", 3), ("a", 17)]):
        for _ in packed.step(step):
            pass
        at = 0
        for name, count in step:
            rows[name].append(llm.executor.features()[at : at + count])  # type: ignore[attr-defined]
            at += count
    for name, parts in rows.items():
        assert close(np.concatenate(parts), built.features(packed.ids[name]))


SCRIPT_PROMPTS = [[3], [10, 11, 12], [200] * 20, [382], list(range(20, 60))]


@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_that_knows_the_model_is_always_right(kind: str, tmp_path: Path) -> None:
    model = write_script_model(tmp_path / "model", [], eos_token_id=2)
    following = next_tokens([], T0["vocab_size"])
    rows = script_rows()
    options: dict[str, Any] = {"max_seq_len": 96, "dtype": "float32"}
    for name, noise in (("good", 0.0), ("fair", 0.85)):
        arrays, config = good_layer(kind, following, rows, noise)
        layer = write_layer(tmp_path / f"{name}-layer", arrays, config)
        build_engine(model, tmp_path / name, BuildConfig(eagle=layer, **options))
    params = [SamplingParams(max_tokens=40, ignore_eos=True)] * len(SCRIPT_PROMPTS)
    params[1] = SamplingParams(max_tokens=40, ignore_eos=True, temperature=0.02, seed=1, n=2)
    texts: list[Any] = []
    few, more = Speculation("eagle", tokens=3), Speculation("eagle", tokens=4)
    for name, asked in (("good", None), ("good", more), ("fair", few)):
        llm = LLM(tmp_path / name, threads=1, check=True, speculative=asked)
        results = llm.generate(SCRIPT_PROMPTS, params)
        texts.append([choice.token_ids for result in results for choice in result.choices])
        if (speculator := llm.scheduler.speculator) is not None:
            acceptance = speculator.acceptance
            if name == "good":
                known = range(T0["vocab_size"]) if kind == "eagle" else ids_of(tmp_path / name).tolist()
                missed = sum(token not in known for text in texts[0] for token in text)
                assert min(acceptance.rates) >= 1 - 2 * missed / acceptance.steps
                assert acceptance.tokens_per_step > 4
            else:
                assert 0 < acceptance.accepted < acceptance.drafted
    assert texts[0] == texts[1] == texts[2]


def ids_of(engine: Path) -> Any:
    eagle = load_engine(engine).eagle
    assert eagle is not None and eagle.token_ids is not None
    return eagle.token_ids


@pytest.fixture(scope="module", params=[("bfloat16", "int8", "none"), ("float32", "auto", "rtn:bits=4,group=32")])
def close_model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that depends little on what is before the last token, and a layer that has seen that."""
    dtype, kv_dtype, quantization = request.param
    folder = tmp_path_factory.mktemp("close")
    model = random_model(engines.small_llama(num_hidden_layers=3), "eager")
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                weight *= 0.05
    model.save_pretrained(folder / "model")
    config = config_of("eagle")
    arrays = random_layer("eagle", config)
    for name, array in arrays.items():
        if name.endswith(("o_proj.weight", "down_proj.weight", "fc.bias")):
            array *= 0.1
    embedding, norm = model.model.embed_tokens.weight.detach(), model.model.norm.weight.detach()
    scaled = torch.diag(norm / embedding.pow(2).mean().sqrt()).numpy()
    arrays["fc.weight"][:] = np.concatenate([scaled, np.zeros((60, 60))], 1)
    layer = write_layer(folder / "layer", arrays, config)
    options = {"dtype": dtype, "kv_dtype": kv_dtype, "quantization": quantization, "max_seq_len": 128}
    build_engine(folder / "model", folder / "engine", BuildConfig(eagle=layer, **options))
    return folder / "engine"


def mixed(llm: LLM) -> list[Any]:
    rng = random.Random(1)
    prompts = [[rng.randrange(3, 131) for _ in range(n)] for n in (1, 16, 31, 33, 70, 90)]
    prompts[3] = prompts[2] + prompts[3][:9]  # found in the prefix cache
    common: dict[str, Any] = {"ignore_eos": True, "logprobs": 2}
    params = [
        SamplingParams(max_tokens=30, **common),
        SamplingParams(max_tokens=25, repetition_penalty=1.2, **common),
        SamplingParams(max_tokens=20, temperature=1.0, seed=3, n=2, **common),
        SamplingParams(max_tokens=20, temperature=0.7, top_k=20, top_p=0.9, seed=4, **common),
        SamplingParams(max_tokens=24, stop_token_ids=list(range(40)), min_tokens=9, **common),
        SamplingParams(max_tokens=17, prompt_logprobs=1, **common),
    ]
    results = llm.generate(prompts, params)
    return [(r.prompt_logprobs, [(c.token_ids, c.logprobs, c.finish_reason) for c in r.choices]) for r in results]


def test_drafts_change_nothing(close_model: Path) -> None:
    expected = mixed(LLM(close_model, threads=1))
    for sizes in ({}, {"num_blocks": 10, "max_batch_tokens": 40, "max_sequences": 4}):
        for sampling in ("exact", "rejection"):
            asked = Speculation("eagle", tokens=9, sampling=sampling)
            llm = LLM(close_model, threads=2, check=True, speculative=asked, **sizes)
            results = mixed(llm)
            drawn = (2, 3) if sampling == "rejection" else ()
            assert all(r == e for n, (r, e) in enumerate(zip(results, expected, strict=True)) if n not in drawn)
            speculator = llm.scheduler.speculator
            assert speculator is not None
            assert speculator.acceptance.accepted > 20
            proposer = speculator._proposer
            assert isinstance(proposer, EagleProposer)
            assert not proposer._states


class Record(EagleProposer):
    """Keeps what was drafted behind which tokens."""

    trees: dict[tuple[int, ...], tuple[tuple[int, ...], tuple[int, ...]]]

    def propose(self, queries: list[Query]) -> list[Tree]:
        trees = super().propose(queries)
        for query, tree in zip(queries, trees, strict=True):
            if query.sequence in self._states:  # else a step has to run first
                self.trees[tuple(query.sequence.tokens)] = tree.tokens, tree.parents
        return trees


def recorded(engine: Path, sampling: str = "exact", **options: Any) -> tuple[LLM, Record]:
    asked = Speculation("eagle", tokens=6, sampling=sampling)
    llm = LLM(engine, threads=1, check=True, speculative=asked, **options)
    assert llm.scheduler.speculator is not None
    proposer: Any = llm.scheduler.speculator._proposer
    proposer.__class__, proposer.trees = Record, {}
    return llm, proposer


@pytest.mark.parametrize("sampling", ["exact", "rejection"])
def test_a_beginning_that_is_found_brings_what_the_layer_has_of_it(close_model: Path, sampling: str) -> None:
    """Drafts are those without a prefix cache: behind a prompt, its answer, its choices, and what was embedded."""
    rng = random.Random(5)
    shared, *ends = ([rng.randrange(3, 131) for _ in range(n)] for n in (48, 1, 9, 16, 17))
    prompts = [shared + end for end in ends] + [shared]
    common: dict[str, Any] = {"ignore_eos": True, "max_tokens": 18}
    params = [SamplingParams(**common, temperature=0.6 * (n % 2), seed=n, n=1 + (n == 3)) for n in range(5)]

    def answer(llm: LLM, number: int) -> Any:
        return [choice.token_ids for choice in llm.generate(prompts[number], params[number])[0].choices]

    cold, expected = recorded(close_model, sampling, prefix_cache=False)
    answers = [answer(cold, number) for number in range(len(prompts))]
    prompts.append(prompts[2] + list(answers[2][0]) + ends[1])
    params.append(params[2])
    answers.append(answer(cold, -1))
    warm, found = recorded(close_model, sampling, num_blocks=40)
    warm.embed([[*shared, 7]])
    results = [answer(warm, number) for number in range(len(prompts))]
    assert results == answers and found.trees == expected.trees
    drafts = [llm.scheduler.speculator.acceptance for llm in (cold, warm)]  # type: ignore[union-attr]
    assert drafts[0].counts == drafts[1].counts and drafts[0].by_depth == drafts[1].by_depth
    assert drafts[0].accepted > 10
    assert all(tokens for tokens, _ in found.trees.values())
    assert 0 < drafts[1].read_tokens < drafts[0].read_tokens and drafts[1].read_seconds > 0
    (again,) = warm.generate(prompts[-1], params[-1])
    assert again.usage.cached_tokens == (len(prompts[-1]) - 1) // 16 * 16
    assert warm.scheduler.statistics.prefix_hits > 32 * len(prompts)
    for llm in (cold, warm):
        cache = llm.scheduler.kv_cache
        assert (cache.num_used, cache.num_available) == (0, cache.num_blocks)


def test_drafts_that_are_drawn_keep_the_distribution(close_model: Path) -> None:
    """Of the second and third tokens of 1,000 answers, with and without; and what is accepted is at least as much."""
    prompts, number = [[5, 6, 7], list(range(3, 40))], 500
    counts, rates = [], []
    for sampling in (None, "exact", "rejection"):
        asked = None if sampling is None else Speculation("eagle", tokens=7, sampling=sampling)
        llm = LLM(close_model, threads=1, speculative=asked)
        first = 0 if sampling is None else number  # of other seeds than what they are compared with
        params = [
            SamplingParams(max_tokens=4, ignore_eos=True, temperature=0.4, top_k=6, seed=first + n)
            for n in range(number)
            for _ in prompts
        ]
        results = llm.generate(prompts * number, params)
        counts.append(np.zeros((4, 131)))
        for index, result in enumerate(results):
            for place in (1, 2):
                counts[-1][2 * (index % 2) + place - 1, result.token_ids[place]] += 1
        if (speculator := llm.scheduler.speculator) is not None:
            rates.append(speculator.acceptance.tokens_per_step)
    for found in counts[1:]:
        for ours, theirs in zip(found, counts[0], strict=True):
            common = ours + theirs >= 20
            pairs = np.append(ours[common], ours[~common].sum()), np.append(theirs[common], theirs[~common].sum())
            both = np.maximum(pairs[0] + pairs[1], 1)
            free = len(both) - 1
            bound = free * (1 - 2 / (9 * free) + 3.09 * (2 / (9 * free)) ** 0.5) ** 3  # p = 0.001, Wilson-Hilferty
            assert ((pairs[0] - pairs[1]) ** 2 / both).sum() < bound
    print(f"{rates[0]:.2f} tokens a verification with exact, {rates[1]:.2f} with rejection")
    assert rates[1] > rates[0]


def test_what_follows_a_block_is_part_of_its_name(close_model: Path) -> None:
    """The layer's last row of a block has taken the next token: who goes on with another one does not find it."""
    llm, _ = recorded(close_model)
    prompt, params = list(range(3, 36)), SamplingParams(max_tokens=20, ignore_eos=True)
    first = llm.generate(prompt, params)[0]
    for last, cached in ((prompt[-1], 32), (9, 16), (prompt[-1], 32)):
        result = llm.generate([*prompt[:-1], last], params)[0]
        assert result.usage.cached_tokens == cached
    assert result.token_ids == first.token_ids
    answer = prompt + list(first.token_ids)
    assert llm.generate([*answer, 5], params)[0].usage.cached_tokens == 48  # of 52 that were computed


def test_with_little_memory_drafts_are_fewer_and_blocks_come_back(close_model: Path) -> None:
    """Drafts take only what is left; what they did not need is free at once."""
    plain = mixed(LLM(close_model, threads=1))
    llm = LLM(close_model, threads=1, check=True, num_blocks=9, speculative=Speculation("eagle", tokens=24))
    assert mixed(llm) == plain
    cache = llm.scheduler.kv_cache
    assert (cache.num_used, cache.num_available) == (0, cache.num_blocks)
    assert llm.scheduler.statistics.preemptions > 0
    assert llm.scheduler.statistics.drafted > 0


@pytest.mark.parametrize("sampling", ["rejection", "typical"])
def test_what_depends_on_drafts_depends_on_nothing_beside(close_model: Path, sampling: str) -> None:
    """Nor on where a prompt is divided: the last chunk of the first one has one token."""
    params = SamplingParams(max_tokens=20, ignore_eos=True, temperature=0.8, seed=3)
    prompts = [list(range(3, 40)), list(range(3, 36)), [9] * 40]
    asked = Speculation("eagle", tokens=4, sampling=sampling)
    alone = [LLM(close_model, threads=1, speculative=asked).generate(prompt, params)[0] for prompt in prompts]
    llm = LLM(close_model, threads=1, check=True, speculative=asked)
    for _ in range(2):
        beside = llm.generate(prompts, params)
        assert [result.token_ids for result in beside] == [result.token_ids for result in alone]
    for seed in range(20):
        params = SamplingParams(max_tokens=8, ignore_eos=True, temperature=1.0, seed=seed)
        sizes: list[Any] = [{}, {"max_batch_tokens": 36, "max_sequences": 2}]
        found = [LLM(close_model, threads=1, speculative=asked, **size).generate(prompts[0], params) for size in sizes]
        assert found[0][0].token_ids == found[1][0].token_ids


def test_what_is_aborted_holds_nothing(close_model: Path) -> None:
    asked = Speculation("eagle", tokens=4)  # adaptive sizes depend on the clock
    llm = LLM(close_model, threads=1, check=True, speculative=asked, max_batch_tokens=32)
    numbers = [llm.add_request([5 + n] * 50, SamplingParams(max_tokens=30, ignore_eos=True)) for n in range(3)]
    for number in numbers:
        for _ in range(4):
            llm.step()
        llm.abort(number)
    speculator = llm.scheduler.speculator
    assert speculator is not None and speculator.acceptance.drafted > 0
    proposer = speculator._proposer
    assert isinstance(proposer, EagleProposer)
    assert not proposer._states


def test_the_cache_of_the_layer_is_part_of_the_budget(close_model: Path) -> None:
    plain = LLM(close_model, threads=1, kv_memory="256KiB").scheduler.config.num_blocks
    shared = LLM(close_model, threads=1, kv_memory="256KiB", speculative="eagle").scheduler.config.num_blocks
    assert shared < plain


def test_what_makes_no_sense_is_refused(built: Built, tmp_path: Path) -> None:
    """The last one is an engine whose layer does not go on with what its model computes."""
    if built.kind == "eagle3":
        plan = built.path / "eagle/plan.json"
        text = plan.read_bytes()
        spoiled = text.replace(b'"hidden"', b'"other"').replace(b'"target_features"', b'"hidden"')
        engine = load_engine(built.path)
        own = {**engine.weights, **engine.eagle.weights}  # type: ignore[union-attr]
        spec = (built.path / "eagle/eagle.json").read_bytes()
        more = (engine.plan, 131, engine.limits, "there")
        assert read_eagle(text, spec, own, engine.weights, *more).begin == 1
        with pytest.raises(EngineError, match=r"plan.json: it does not go on with what the model computes"):
            read_eagle(spoiled, spec, own, engine.weights, *more)
        with pytest.raises(EngineError, match="kv_dtype 'nf4' is unknown"):
            read_eagle(text, spec.replace(b"float32", b"nf4"), own, engine.weights, *more)
        return
    with pytest.raises(UsageError, match="leave =x away"):
        LLM(built.path, threads=1, speculative="eagle=x")
    build_engine(write_script_model(tmp_path / "model", []), tmp_path / "engine", BuildConfig(max_seq_len=96))
    with pytest.raises(UsageError, match=r"has no EAGLE layer; build it with: llmc build MODEL --eagle DIR"):
        LLM(tmp_path / "engine", threads=1, speculative="eagle")
