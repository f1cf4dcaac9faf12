"""Factors of inputs fold into norms, glu and attention: the float model computes the same with them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from quantizable import compiled, interpret, samples, save_model

from llmc.compiler.quantize.folding import Folding, Producer
from llmc.compiler.quantize.sites import DOWN, GATE_UP, find_sites

EXPECTED = {
    "llama": {"norm", "attention", "glu"},
    "llama_tied_bias": {"norm", "attention", "glu"},
    "gemma3_text": {"norm", "attention", "glu"},
    "gemma3n_text": {"norm", "glu"},
    "qwen3_moe": {"norm", "attention", "experts"},
    "mixtral": {"norm", "attention", "experts"},
    "gpt2": {"norm", "attention"},
    "falcon_new": {"norm", "attention"},
    "mpt": {"norm", "attention"},
    "gpt_oss": {"norm", "attention"},
    "deepseek_v3": {"norm", "attention", "glu", "experts"},
    "phi3": {"norm", "attention", "glu"},
    "olmo2": {"norm", "attention", "glu"},
}
"""Kinds of producers that factors fold into."""


def factors(count: int, tie: np.ndarray | None, seed: int) -> np.ndarray:
    found = np.random.default_rng(seed).uniform(0.3, 3, count).astype(np.float32)
    return found if tie is None else found[np.unique(tie, return_inverse=True)[1]]


@pytest.mark.parametrize("name", EXPECTED)
def test_the_float_model_stays_the_same(name: str, tmp_path: Path) -> None:
    model = compiled(save_model(name, tmp_path / "model"), dtype="float32")
    graph, kinds, seen = model.steps, set(), set()
    folding = Folding(graph)
    weights = {n: model.checkpoint.weight(n) for n in model.checkpoint.names}
    for number, site in enumerate(find_sites(graph, weights)):
        if site.product is None or site.name in seen or len(site.readers) > 1:
            continue
        step = graph.steps[site.product[0]]
        if site.product[1] == DOWN:
            if step.attributes["function"] == "gpt_oss":
                continue
            scale = np.stack([factors(site.columns, None, number + e) for e in range(site.experts or 0)])
            rows = np.ones((len(scale), 2 * site.columns), np.float32)
            rows[:, site.columns :] = scale
            folding.divide_expert_rows(site.product[0], rows)
            folding.multiply(site.name, scale)
            kinds.add("experts")
            continue
        x = step.inputs[0]
        assert x is not None
        producer = folding.find(x)
        if isinstance(producer, str):
            continue
        names = [graph.steps[n].inputs[GATE_UP if graph.steps[n].op == "moe" else 1] for n in folding.readers_of(x)]
        read = [view.buffer.name for view in names if view is not None]
        if any(
            sum(r == n for v in graph.steps for i in v.inputs if i is not None and (r := i.buffer.name)) > 1
            for n in read
        ):
            continue
        scale = factors(site.columns, producer.tie, number)
        folding.divide(producer, scale)
        for weight in read:
            folding.multiply(weight, scale)
        seen.update(read)
        kinds.add(producer.kind)
    assert kinds == EXPECTED[name]
    tokens = samples(2, 12)
    before = np.concatenate(interpret(graph, "float32", tmp_path, [], tokens=tokens))
    after = np.concatenate(interpret(folding.apply(), "float32", tmp_path, [], tokens=tokens))
    np.testing.assert_allclose(after, before, atol=1e-4, rtol=1e-4)


def test_why_not(tmp_path: Path) -> None:
    graph = compiled(save_model("gpt2", tmp_path / "model"), dtype="float32").steps
    folding = Folding(graph)
    reasons = [
        found
        for step in graph.steps
        if step.op == "linear"
        and step.inputs[0] is not None
        and not isinstance(found := folding.find(step.inputs[0]), Producer)
    ]
    assert reasons == ["it is made by gelu_tanh"] * 3
