"""Every decoder of the list builds and runs natively: logits and greedy tokens of transformers, packed in any way."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import engines
import numpy as np
import pytest
from configs import CONFIGS
from cuda_models import FAR, check_on_cuda, distance
from method_grid import check_kv_types, check_methods
from packed import MIXED, expected_logits, random_ids

from llmc import LLM, SamplingParams
from llmc.compiler import api
from llmc.compiler.api import Compiled, compile_model
from llmc.runtime.devices.cpu import CpuExecutor
from llmc.runtime.engine import load_engine

WHOLE = ((("a", 29),),)
CHUNKED = ((("a", 7),), (("a", 16),), (("a", 5),), (("a", 1),))
DECODE = ((("b", 17),), (("b", 1),), (("b", 1),), (("b", 2),))
GREEDY = 32
CUDA_FARTHER = {"jetmoe": 0.15}
"""Its queries are made by experts, too, which are no step of their own: rounding sends some rows to others."""
CUDA_MARGIN = 0.1
"""In standard deviations of logits: what a token may be behind that of transformers."""


@dataclass(frozen=True)
class Built:
    """A random model of the list, its engine, and what was compiled for that."""

    name: str
    model: Any
    engine: Path
    compiled: Compiled


@pytest.fixture(scope="module", params=CONFIGS)
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Built:
    """Traced once for all tests."""
    entry, found = CONFIGS[request.param], []

    def compiled(*given: Any) -> Compiled:
        found.append(compile_model(*given))
        return replace(found[-1], graph=found[-1].graph.clone())  # writing an engine uses it up

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(api, "compile_model", compiled)
        folder = tmp_path_factory.mktemp(request.param)
        model, path = engines.build(entry.make(), folder, entry.reference, max_seq_len=entry.max_len)
    return Built(request.param, model, path, found[0])


def test_runs_as_in_transformers(built: Built) -> None:
    entry, model = CONFIGS[built.name], built.model
    ids = random_ids(entry.make(), a=29, b=21)
    expected = {key: expected_logits(model, x)[0].numpy() for key, x in ids.items()}
    tokens = {key: x[0].tolist() for key, x in ids.items()}
    engine = load_engine(built.engine)
    for steps in (WHOLE, CHUNKED, DECODE, MIXED):
        packed = engines.Packed(CpuExecutor(engine, num_blocks=16, threads=2), tokens)
        for key, logits in packed.run(steps).items():
            np.testing.assert_allclose(logits, expected[key][: len(logits)], rtol=0, atol=1e-4)
    results = LLM(built.engine, num_blocks=32, threads=2).generate(
        list(tokens.values()), SamplingParams(max_tokens=GREEDY, ignore_eos=True)
    )
    for result, prompt in zip(results, tokens.values(), strict=True):
        assert len(result.token_ids) == min(GREEDY, entry.max_len - len(prompt))
        assert engines.is_greedy(model, prompt, result.token_ids)


def test_every_quantization_method(built: Built, tmp_path: Path) -> None:
    """All of them, over the weights of each decoder; which weight has which differs from decoder to decoder."""
    check_methods(built.compiled, list(CONFIGS).index(built.name), tmp_path)


def test_every_type_of_kv_cache(built: Built) -> None:
    check_kv_types(built.compiled)


def test_on_cuda(built: Built, tmp_path: Path) -> None:
    """The kernels on an emulator, behind the driver API of cuda.bindings."""
    ids = random_ids(CONFIGS[built.name].make(), a=29, b=21)
    prompts = {key: x[0].tolist() for key, x in ids.items()}
    cpu, far = load_engine(built.engine), CUDA_FARTHER.get(built.name, FAR)
    found, answers = check_on_cuda(built.compiled, cpu, tmp_path / "engine", prompts, far)
    if not any(step.op == "moe" for step in built.compiled.steps.steps):  # else rounding sends rows to other experts
        for (key, prompt), answer in zip(prompts.items(), answers, strict=True):
            logits = found[key][: len(prompt)]
            assert distance(logits, expected_logits(built.model, ids[key])[0].numpy()) < FAR
            assert engines.is_nearly_greedy(built.model, prompt, answer, CUDA_MARGIN)
