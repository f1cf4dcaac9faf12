"""The targets for NVIDIA GPUs, alone and several in one engine."""

from pathlib import Path

import engines
import ml_dtypes
import numpy as np
import pytest

from llmc.compiler.cuda.form import cuda_form
from llmc.compiler.lower import LoweredGraph
from llmc.compiler.lowering.builder import LoweredStep, PackedWeight
from llmc.compiler.lowering.values import Buffer, View, contiguous, dims, product
from llmc.compiler.targets.base import all_targets, find_target
from llmc.compiler.weights import Array
from llmc.errors import UsageError
from llmc.plugins.cuda import SM_90A
from llmc.plugins.cuda_packing import common
from llmc.runtime.plan import Storage


def test_each_architecture_is_a_target() -> None:
    assert {name for name, target in all_targets().items() if target.device == "cuda"} == {
        f"cuda:sm_{number}" for number in (80, 89, 90, "90a", 100, 120)
    }


def test_one_engine_may_be_for_several() -> None:
    target = find_target("cuda:sm_80,sm_90")
    assert (target.name, target.device, target.alignment) == ("cuda:sm_80,sm_90", "cuda", 256)


@pytest.mark.parametrize(
    ("capabilities", "packed_for"),
    [([80, 89], 80), ([90, SM_90A], 90), ([89, 100], 100), ([89, 120], 89), ([SM_90A], SM_90A)],
)
def test_weights_for_several_are_packed_for_the_one_that_knows_least(capabilities: list[int], packed_for: int) -> None:
    assert common(capabilities) == packed_for


@pytest.mark.parametrize("name", ["cuda", "cuda:", "cuda:sm_70", "cuda:sm_90,sm_90", "cuda:sm_90,", "tpu"])
def test_others_are_refused(name: str) -> None:
    with pytest.raises(UsageError, match=r"--target .*unknown; known: cpu, cuda:sm_80"):
        find_target(name)


@pytest.mark.parametrize(
    ("dtypes", "message"),
    [
        ({"dtype": "float32"}, "use --dtype bfloat16"),
        ({"kv_dtype": "int4"}, "--kv-dtype int4: --target cuda:sm_90 has"),
    ],
)
def test_dtypes_without_kernels_are_refused_before_tracing(
    dtypes: dict[str, str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr("llmc.compiler.api.trace")
    with pytest.raises(UsageError, match=message):
        engines.build(engines.small_llama(), tmp_path, target="cuda:sm_90", **{"dtype": "bfloat16"} | dtypes)


@pytest.mark.parametrize(("gated", "rows", "inner"), [(True, 48, 24), (False, 24, 24), (True, 40, 20)])
def test_packed_experts_say_how_wide_they_are(gated: bool, rows: int, inner: int) -> None:
    """The last ones have 19 columns of down: gate_up has a row of zeros more of each kind."""
    experts, hidden, columns = 3, 32, 19 if inner == 20 else inner
    shapes = {"gate_up": (experts, rows, hidden), "down": (experts, hidden, columns)}
    weights = {
        name: PackedWeight(name, Array(np.ones(s, ml_dtypes.bfloat16)), panels=True) for name, s in shapes.items()
    }

    def view(name: str, shape: tuple[int, ...], storage: Storage = Storage.ARENA, dtype: str = "float32") -> View:
        sizes = dims(shape)
        return View(Buffer(name, storage, dtype, product(sizes)), sizes, contiguous(sizes))

    routed = [view("x", (5, hidden)), view("ids", (5, 2), dtype="int64"), view("weights", (5, 2))]
    packed = [view(name, weight.shape, Storage.WEIGHT, "bfloat16") for name, weight in weights.items()]
    given = {"function": "silu", "gated": gated, "interleaved": False, "alpha": 1.0, "limit": 0.0}
    y = view("y", (5, hidden))
    step = LoweredStep("moe", (*routed, *packed, None, None), (y,), given)
    (made,) = cuda_form(LoweredGraph([step], y, weights, {}), "bfloat16", 90, {}).steps
    assert made.attributes == {**given, "inner": inner}
