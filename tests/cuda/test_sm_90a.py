"""Engines for sm_90a: products by wgmma behind the driver API, which engines for other targets never take."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from configs import CONFIGS
from cuda_models import FAR, build_again, distance, gpu_for, packed_logits, step_on_both
from packed import MIXED, random_ids
from quantizable import compiled, save_model

from llmc.compiler.api import Compiled
from llmc.errors import EngineError
from llmc.runtime.devices.cuda.targets import choose

VARIANTS = {
    "bf16": ("llama", {}, FAR),
    "int4": ("llama", {"quantization": "rtn:group=32"}, FAR),
    "fp8": ("llama", {"quantization": "fp8:scale=tensor,inputs=fp8"}, 0.15),
    "experts": ("mixtral", {"quantization": "rtn:group=32"}, FAR),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Compiled]:
    """Each model is traced once."""
    return cache(lambda name: compiled(save_model(name, tmp_path_factory.mktemp(name)), max_seq_len=256))


@pytest.mark.parametrize("variant", VARIANTS)
def test_as_on_the_cpu(
    variant: str, models: Callable[[str], Compiled], tmp_path_factory: pytest.TempPathFactory
) -> None:
    name, options, far = VARIANTS[variant]
    folder = tmp_path_factory.mktemp(variant)
    cpu, cuda = (build_again(models(name), folder / t[-2:], target=t, **options) for t in ("cpu", "cuda:sm_90a"))
    assert [path for path in (cuda.path / "kernels-sm_90a").iterdir() if path.name.startswith("wgmma_")]
    tokens = {key: x[0].tolist() for key, x in random_ids(CONFIGS[name].make(), a=29, b=21).items()}
    with gpu_for(cuda):
        whole, expected = step_on_both(cuda, cpu, tokens)
        mixed = packed_logits(cuda, tokens, MIXED)
    for key, logits in whole.items():
        assert distance(logits, expected[key]) < far
        assert np.array_equal(mixed[key], logits[: len(mixed[key])])


def test_only_a_target_of_this_name_takes_them(models: Callable[[str], Compiled], tmp_path: Path) -> None:
    engine = build_again(models("llama"), tmp_path / "engine", target="cuda:sm_90")
    assert not [path for path in (engine.path / "kernels-sm_90").iterdir() if path.name.startswith("wgmma_")]
    for target, capability, arch in (
        ("cuda:sm_90a", 90, "sm_90a"),
        ("cuda:sm_80,sm_90a", 86, "sm_80"),
        ("cuda:sm_90,sm_90a", 90, "sm_90a"),
    ):
        assert choose(engine.path, replace(engine.manifest, target=target), capability, "a GPU") == arch
    with pytest.raises(EngineError, match=r"compute capability 10\.0; build it with: .* --target cuda:sm_100$"):
        choose(engine.path, replace(engine.manifest, target="cuda:sm_90a"), 100, "a GPU")
