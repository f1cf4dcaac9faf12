"""Figures of engines, against transformers called directly, and the command that prints them."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import engines
import numpy as np
import pytest
import torch
from click.testing import CliRunner
from packed import expected_logits
from transformers import Gemma2Config

from llmc.__main__ import cli
from llmc.compiler.api import build_engine
from llmc.compiler.checkpoint import Checkpoint
from llmc.compiler.config import BuildConfig
from llmc.compiler.evaluation import evaluate as module
from llmc.compiler.evaluation import source_model, subject
from llmc.compiler.evaluation.evaluate import Evaluation, evaluate, tokens_for
from llmc.compiler.evaluation.figures import Figures
from llmc.compiler.evaluation.generation import repetition
from llmc.compiler.evaluation.source_model import SourceModel
from llmc.compiler.evaluation.subject import EngineSubject, Subject
from llmc.compiler.progress import Progress
from llmc.errors import GateError, ResourceError, UsageError
from llmc.runtime.devices.cpu import CpuExecutor
from llmc.runtime.engine import load_engine

CONTEXT, TOKENS = 48, 24


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """(the model of transformers, a folder with model/, engine/, bf16/ and text.json)."""
    folder = tmp_path_factory.mktemp("evaluation")
    model, _ = engines.build(engines.small_llama(), folder, max_batch_tokens=20)
    build_engine(folder / "model", folder / "bf16", BuildConfig(dtype="bfloat16", kv_dtype="float32"))
    ids = np.random.default_rng(0).integers(3, 131, 5 * CONTEXT + 7).tolist()
    (folder / "text.json").write_text(json.dumps(ids))
    return model, folder


def figures(folder: Path, engine: str, against: Path | None, **options: Any) -> Figures:
    evaluation = Evaluation(folder / "text.json", **({"context": CONTEXT, "tokens": TOKENS} | options))
    loaded, inputs = load_engine(folder / engine), evaluation.read()
    ids = tokens_for(loaded, inputs)
    reference: Subject | None = None
    if against is not None:
        is_engine = (against / "engine.json").exists()
        reference = (
            EngineSubject(load_engine(against), ids.room, 1) if is_engine else SourceModel(Checkpoint.open(against), 1)
        )
    return evaluate(EngineSubject(loaded, ids.room, 1), reference, inputs, ids, Progress())


def expected(model: Any, folder: Path, windows: int) -> tuple[float, torch.Tensor]:
    """Perplexity and log-probabilities [windows, CONTEXT - 1, V], as the protocol says."""
    ids = torch.tensor(json.loads((folder / "text.json").read_text())[: windows * CONTEXT]).reshape(windows, CONTEXT)
    logits = torch.cat([expected_logits(model, window[None])[:, :-1] for window in ids]).double()
    nll = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
    return math.exp(nll), logits.log_softmax(-1)


def test_figures_equal_transformers(small: tuple[Any, Path]) -> None:
    model, folder = small
    for engine, against in (("engine", None), ("engine", folder / "model")):
        found = figures(folder, engine, against, windows=3)
        perplexity, _ = expected(model, folder, 3)
        assert found.perplexity == pytest.approx(perplexity, rel=1e-4)
        assert (found.windows, found.windows_of, found.scored) == (3, 5, 3 * (CONTEXT - 1))
        assert found.text == "text.json" and not found.bos
    c = found.comparison
    assert c is not None and c.reference == "model"
    assert c.perplexity == pytest.approx(perplexity, rel=1e-4)
    assert c.kl < 1e-8 and c.top1 > 0.99 and c.ratio == pytest.approx(1, abs=1e-5)


def test_the_distance_of_a_rounded_engine(small: tuple[Any, Path]) -> None:
    """KL and top-1 from the logits of two engines, by torch in float64."""
    model, folder = small
    found = figures(folder, "bf16", folder / "model", windows=0).comparison
    assert found is not None
    _, p = expected(model, folder, 5)
    q = torch.stack([engine_logits(folder / "bf16", folder, window) for window in range(5)]).double().log_softmax(-1)
    kl = (p.exp() * (p - q)).sum(-1).flatten()
    assert found.kl == pytest.approx(float(kl.mean()), rel=1e-3)
    assert found.kl_p99 == pytest.approx(float(kl.quantile(0.99)), rel=1e-2)
    assert found.kl_max == pytest.approx(float(kl.max()), rel=1e-2)
    assert found.top1 == pytest.approx(float((p.argmax(-1) == q.argmax(-1)).double().mean()), abs=0.005)
    assert 1e-7 < found.kl < 0.01


def engine_logits(engine: Path, folder: Path, window: int) -> torch.Tensor:
    ids = json.loads((folder / "text.json").read_text())[window * CONTEXT : (window + 1) * CONTEXT - 1]
    packed = engines.Packed(CpuExecutor(load_engine(engine), num_blocks=8, threads=1), {"a": ids})
    return torch.from_numpy(packed.run([[("a", 16)], [("a", 16)], [("a", 15)]])["a"])


def test_an_engine_against_itself(small: tuple[Any, Path]) -> None:
    _, folder = small
    found = figures(folder, "bf16", folder / "bf16")
    c, g = found.comparison, found.generation
    assert c is not None and g is not None and c.reference == "engine"
    assert (c.kl, c.kl_max, c.top1, c.ratio, c.ratio_error) == (0, 0, 1, 1, 0)
    assert g.prefix == 1 and g.divergence == sum(x.tokens for x in g.continuations) / len(g.continuations)
    assert g.repetition == g.reference_repetition
    assert all(x.text == x.reference_text for x in g.continuations)


def test_free_generation_equals_that_of_transformers(small: tuple[Any, Path]) -> None:
    model, folder = small
    found = figures(folder, "engine", folder / "model").generation
    assert found is not None and found.limit == TOKENS and found.prefix == 1
    for c in found.continuations:
        prompt, ids = ([int(i) for i in text.split()] for text in (c.prompt, c.text))
        assert engines.is_greedy(model, prompt, ids)
        assert c.repetition == pytest.approx(repetition(ids))
        assert len(ids) == TOKENS or ids[-1] == 2


def test_the_reference_goes_its_own_way_where_it_differs(small: tuple[Any, Path]) -> None:
    """Its text is its own, not the engine's guess."""
    _, folder = small
    source = SourceModel(Checkpoint.open(folder / "model"), 1)
    [own] = source.generate([[5, 6, 7]], TOKENS, [2])
    for guess in (own, [*own[:3], (own[3] + 1) % 131, 9, 9], [(own[0] + 1) % 131], own[:2]):
        if len(guess) < TOKENS:  # such a guess has ended
            assert module._continue(source, [5, 6, 7], guess, TOKENS, [2]) == own
    assert module._continue(source, [5, 6, 7], own, TOKENS, [2]) == own


def test_chunks_do_not_matter(small: tuple[Any, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    _, folder = small
    before = figures(folder, "bf16", folder / "model", tokens=0)
    monkeypatch.setattr(subject, "LOGIT_BYTES", 3 * 4 * 131)
    assert EngineSubject(load_engine(folder / "bf16"), CONTEXT, 1).max_rows == 3
    after = figures(folder, "bf16", folder / "model", tokens=0)
    assert after.perplexity == before.perplexity
    assert before.comparison is not None and after.comparison is not None
    assert after.comparison.kl == pytest.approx(before.comparison.kl, rel=1e-3)


def test_the_source_computes_no_more_rows_than_asked_for(small: tuple[Any, Path]) -> None:
    model, folder = small
    source = SourceModel(Checkpoint.open(folder / "model"), 1)
    seen: list[int] = []
    source._model.get_output_embeddings().register_forward_hook(lambda m, a, out: seen.append(out.shape[1]))
    runs: list[int] = []
    source._model.model.layers[0].register_forward_hook(lambda *a: runs.append(1))
    ids = list(range(3, 40))
    source.begin(ids)
    parts = [source.logits(start, min(start + 10, 37)).copy() for start in range(0, 37, 10)]
    assert seen == [10, 10, 10, 7] and len(runs) == 1
    np.testing.assert_allclose(np.concatenate(parts), expected_logits(model, torch.tensor([ids]))[0], atol=1e-5)


def test_a_model_with_a_soft_cap_behind_its_head(tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = Gemma2Config(**sizes, num_key_value_heads=1, head_dim=16, vocab_size=64, final_logit_softcapping=2.0)
    model, _ = engines.build(config, tmp_path, max_seq_len=64)
    (tmp_path / "text.json").write_text(json.dumps(list(range(3, 60))))
    found = figures(tmp_path, "engine", tmp_path / "model", context=20, tokens=4)
    assert found.comparison is not None and found.comparison.kl < 1e-8
    ids = torch.arange(3, 23)
    nll = torch.nn.functional.cross_entropy(expected_logits(model, ids[None])[0, :-1], ids[1:])
    assert found.window_perplexities[0] == pytest.approx(math.exp(nll), rel=1e-4)


def test_worst_positions_come_first(small: tuple[Any, Path]) -> None:
    _, folder = small
    found = figures(folder, "bf16", folder / "engine", tokens=0)
    distances = [p.divergence or 0 for p in found.worst]
    assert len(distances) == 10 and distances == sorted(distances, reverse=True)
    assert found.comparison is not None and distances[0] == found.comparison.kl_max
    worst, ids = found.worst[0], json.loads((folder / "text.json").read_text())
    at = worst.window * CONTEXT + worst.position
    assert worst.token == str(ids[at]) and worst.before.endswith(str(ids[at - 1]))
    alone = figures(folder, "bf16", None, tokens=0).worst
    assert [p.nll for p in alone] == sorted((p.nll for p in alone), reverse=True) and alone[0].divergence is None


def test_numbers_that_are_none(small: tuple[Any, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    _, folder = small

    def broken(self: Any, start: int, stop: int) -> np.ndarray:
        logits = np.zeros((stop - start, 131), np.float32)
        logits[:, 3] = np.nan if start <= 30 < stop else 0
        return logits

    monkeypatch.setattr(EngineSubject, "logits", broken)
    with pytest.raises(GateError, match=r"bf16: the logits of window 0, token \d+ are not finite"):
        figures(folder, "bf16", None, tokens=0)


def test_too_little_memory(small: tuple[Any, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_model.resources, "available_memory", lambda: 1000)
    with pytest.raises(ResourceError, match=r"takes .* bytes in float32, but only 1000 are free.*--against SOURCE"):
        figures(small[1], "bf16", small[1] / "model")


def test_sequences_that_are_too_long(small: tuple[Any, Path]) -> None:
    with pytest.raises(UsageError, match="built for sequences of 512 tokens, but 600 are needed"):
        EngineSubject(load_engine(small[1] / "engine"), 600)


# The command ---------------------------------------------------------------------------------------------------------


def llmc_eval(*arguments: object) -> Any:
    return CliRunner().invoke(cli, ["eval", *map(str, arguments)])


def test_the_table(small: tuple[Any, Path]) -> None:
    _, folder = small
    options = ("--eval", folder / "text.json", "--context", CONTEXT, "--tokens", 8, "--threads", 1)
    done = llmc_eval(folder / "bf16", "--against", folder / "model", *options)
    assert done.exit_code == 0, done.output
    for text in (
        "perplexity",
        "same best token",
        "KL, mean",
        "repeated in free texts",
        "5 of 5 windows",
        "where it is",
    ):
        assert text in done.output
    alone = llmc_eval(folder / "bf16", *options)
    assert alone.exit_code == 0 and "perplexity" in alone.output and "KL" not in alone.output


def test_json_and_gate(small: tuple[Any, Path]) -> None:
    _, folder = small
    options = ("--eval", folder / "text.json", "--context", CONTEXT, "--tokens", 8, "--threads", 1, "--quiet", "--json")
    gate = ("--gate", "ppl<=+2%,top1>=0.5,kl<=0.05")
    done = llmc_eval(folder / "bf16", "--against", folder / "engine", *options, *gate)
    found = json.loads(done.stdout)
    assert done.exit_code == 0 and found["digest"] == f"sha256:{load_engine(folder / 'bf16').digest}"
    assert [c["passed"] for c in found["gate"]] == [True] * 3
    assert found["comparison"]["reference"] == "engine" and found["scored"] == 5 * (CONTEXT - 1)
    assert len(found["generation"]["continuations"]) == 6
    failed = llmc_eval(folder / "bf16", "--against", folder / "engine", *options, "--gate", "ppl<=1.5")
    assert isinstance(failed.exception, GateError) and not json.loads(failed.stdout)["gate"][0]["passed"]
    assert "FAILED  ppl" in str(failed.exception)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--gate", "top1>=0.9"), "needs a source model; say which: --against MODEL"),
        (("--gate", "repetition<=0.5", "--tokens", "0"), "needs free generation"),
        (("--context", "600"), "fewer than a window"),
        (("--tokens", "600"), "built for sequences of 512"),
    ],
)
def test_wrong_use(small: tuple[Any, Path], options: tuple[str, ...], message: str) -> None:
    _, folder = small
    done = llmc_eval(folder / "bf16", "--eval", folder / "text.json", *options)
    assert isinstance(done.exception, UsageError) and message in str(done.exception)


def test_other_models_are_refused(small: tuple[Any, Path], tmp_path: Path) -> None:
    _, folder = small
    engines.build(engines.small_llama(vocab_size=140), tmp_path)
    done = llmc_eval(folder / "bf16", "--eval", folder / "text.json", "--against", tmp_path / "engine")
    assert isinstance(done.exception, UsageError) and "they are not the same model" in str(done.exception)


def test_engines_are_compared_without_torch(small: tuple[Any, Path]) -> None:
    _, folder = small
    script = (
        "import sys\nfrom llmc.__main__ import cli\n"
        "cli.main(['eval', *sys.argv[1:]], standalone_mode=False)\n"
        "print([m for m in ('torch', 'transformers', 'onnx_ir') if m in sys.modules])\n"
    )
    command = [sys.executable, "-P", "-c", script, str(folder / "bf16"), "--against", str(folder / "engine")]
    command += ["--eval", str(folder / "text.json"), "--context", "20", "--tokens", "4", "--windows", "1"]
    assert subprocess.check_output(command, text=True).splitlines()[-1] == "[]"
