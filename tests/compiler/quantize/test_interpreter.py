"""Steps in stretches over chunks of tokens: the logits of transformers, and the same bits however it is cut."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from packed import expected_logits
from quantizable import compiled, interpret, samples, save_model
from transformers import AutoModelForCausalLM

from llmc.compiler.lowering.builder import LoweredStep
from llmc.compiler.quantize import interpreter
from llmc.compiler.quantize.activations import Activations
from llmc.compiler.quantize.interpreter import Interpreter, make_chunks

NAMES = ["llama", "gemma3n_text", "mixtral", "gpt2", "falcon_new", "mpt", "deepseek_v3", "gpt_oss"]


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    path = save_model(name, tmp_path / "model")
    graph = compiled(path, dtype="float32").steps
    tokens = samples(3, 12)
    cuts = list(range(3, len(graph.steps) - 1, 5))
    found = np.concatenate(interpret(graph, "float32", tmp_path, cuts, tokens=tokens))
    from configs import CONFIGS

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation=CONFIGS[name].reference)
    wanted = [expected_logits(model, torch.from_numpy(ids)[None].long())[0].numpy() for ids in tokens]
    np.testing.assert_allclose(found, np.concatenate(wanted), atol=2e-4, rtol=2e-4)


def test_same_bits_for_any_cuts_chunks_memory_and_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = compiled(save_model("llama", tmp_path / "model"), dtype="bfloat16").steps
    tokens = samples(5, 11)
    whole = np.concatenate(interpret(graph, "bfloat16", tmp_path, [], tokens=tokens, per_chunk=1000))
    cuts = list(range(1, len(graph.steps) - 1))
    pieces = interpret(graph, "bfloat16", tmp_path, cuts, tokens=tokens, limit=20_000, threads=2)
    assert len(pieces) == 3
    np.testing.assert_array_equal(np.concatenate(pieces), whole)
    assert not list((tmp_path / "activations").iterdir()), "files of activations are removed when they are read"
    monkeypatch.setattr(interpreter, "STRETCH_BYTES", 20_000)
    loaded: list[int] = []
    load = Interpreter._load

    def counted(self: Interpreter, steps: Sequence[LoweredStep]) -> dict[str, np.ndarray]:
        weights = load(self, steps)
        loaded.append(sum(array.nbytes for array in weights.values()))
        return weights

    monkeypatch.setattr(Interpreter, "_load", counted)
    np.testing.assert_array_equal(
        np.concatenate(interpret(graph, "bfloat16", tmp_path, [cuts[-1]], tokens=tokens)), whole
    )
    largest = max(tensor.nbytes for tensor in graph.weights.values())
    assert len(loaded) > 5 and max(loaded) <= max(20_000, largest), "however long a stretch is, its weights are few"


def test_activations_in_memory_stay_within_their_limit(tmp_path: Path) -> None:
    """Buffers that are put by turns, as the steps of a chunk make them."""
    kept, arrays = Activations(tmp_path, 8, limit=4000), {"a": 100, "b": 50, "c": 60}
    for chunk in range(8):
        for name, size in arrays.items():
            kept.put(name, chunk, np.full(size - (chunk == 7), chunk, np.float32))
    assert kept.most == 4 * (100 * 8 - 1), "b and c would not fit beside a"
    assert len(list((tmp_path / "activations").iterdir())) == 2
    for name, size in arrays.items():
        assert (kept.get(name, 6) == 6).all() and len(kept.get(name, 7)) == size - 1
    kept.drop("a")
    kept.put("d", 0, np.zeros(100, np.float32))
    assert kept.most == 4 * (100 * 8 - 1) and len(list((tmp_path / "activations").iterdir())) == 2


def test_state_is_saved_and_loaded(tmp_path: Path) -> None:
    first = Activations(tmp_path, 2, limit=50)
    arrays = {"a": np.arange(10, dtype=np.float32), "b": np.arange(30, dtype=np.int64)}
    for name, array in arrays.items():
        first.put(name, 0, array)
        first.put(name, 1, array + 1)
    first.save(tmp_path, 7)
    second = Activations(tmp_path, 2)
    assert second.load(tmp_path) == 7
    for name, array in arrays.items():
        np.testing.assert_array_equal(second.get(name, 1), array + 1)
    assert Activations(tmp_path, 3).load(tmp_path) is None, "of other chunks"
    Activations.forget(tmp_path)
    assert Activations(tmp_path, 2).load(tmp_path) is None
    second.clear()
    assert second.nbytes == 0 and second.names == []


def test_chunks_are_whole_samples() -> None:
    chunks = make_chunks(samples(5, 10), 25)
    assert [len(chunk.input_ids) for chunk in chunks] == [20, 20, 10]
    assert chunks[0].cu_seqlens.tolist() == [0, 10, 20] and chunks[0].position_ids[10] == 0
    assert [len(chunk.input_ids) for chunk in make_chunks(samples(2, 10), 5)] == [10, 10]
