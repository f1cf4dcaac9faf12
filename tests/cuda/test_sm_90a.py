"""Engines for sm_90a: products by wgmma behind the driver API, which engines for other targets never take."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from configs import CONFIGS
from cuda_models import FAR, build_again, check_variant
from packed import random_ids

from llmc.compiler.api import Compiled
from llmc.errors import EngineError
from llmc.runtime.devices.cuda.targets import choose

FP8 = "fp8:scale=tensor,inputs=fp8"
VARIANTS = {
    "bf16": ("llama", {}, FAR),
    "int4": ("llama", {"quantization": "rtn:group=32"}, FAR),
    "fp8": ("llama", {"quantization": FP8}, 0.15),
    "fp8 for both": ("llama", {"quantization": FP8, "target": "cuda:sm_90,sm_90a"}, 0.15),
    "experts": ("mixtral", {"quantization": "rtn:group=32"}, FAR),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_as_on_the_cpu(variant: str, models: Callable[[str], Compiled], tmp_path: Path) -> None:
    name, options, far = VARIANTS[variant]
    ids = {key: x[0].tolist() for key, x in random_ids(CONFIGS[name].make(), a=29, b=21).items()}
    engine = check_variant(models(name), tmp_path, ids, far, **{"target": "cuda:sm_90a", **options})
    assert [path for path in (engine.path / "kernels-sm_90a").iterdir() if path.name.startswith("wgmma_")]


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
