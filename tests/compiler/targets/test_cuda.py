"""The targets for NVIDIA GPUs, alone and several in one engine."""

from pathlib import Path

import engines
import pytest

from llmc.compiler.targets.base import all_targets, find_target
from llmc.errors import CompileError, UsageError


def test_each_architecture_is_a_target() -> None:
    assert {name for name, target in all_targets().items() if target.device == "cuda"} == {
        f"cuda:sm_{number}" for number in (80, 89, 90, 100, 120)
    }


def test_one_engine_may_be_for_several() -> None:
    target = find_target("cuda:sm_80,sm_90")
    assert (target.name, target.device, target.alignment) == ("cuda:sm_80,sm_90", "cuda", 256)


@pytest.mark.parametrize("name", ["cuda", "cuda:", "cuda:sm_70", "cuda:sm_90,sm_90", "cuda:sm_90,", "tpu"])
def test_others_are_refused(name: str) -> None:
    with pytest.raises(UsageError, match=r"--target .*unknown; known: cpu, cuda:sm_80"):
        find_target(name)


def test_activations_have_16_bits(tmp_path: Path) -> None:
    with pytest.raises((UsageError, CompileError), match="use --dtype bfloat16"):
        engines.build(engines.small_llama(), tmp_path, target="cuda:sm_90", dtype="float32")
