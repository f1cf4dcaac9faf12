"""An engine that was built here runs on aarch64: verify passes, and the logits are those of this machine.

Needs --kernel-server (build_scripts/aarch64.sh); its name keeps it out of other runs.
"""

import engines
import numpy as np
import pytest
import remote_kernels

from llmc.plugins import kernels
from llmc.runtime.devices.cpu import CpuExecutor
from llmc.runtime.engine import load_engine
from llmc.runtime.verification import verify_engine

IDS = {"a": np.random.default_rng(0).integers(3, 131, 40).tolist(), "b": list(range(3, 23))}
STEPS = [[("a", 20), ("b", 7)], [("b", 13), ("a", 1)], *[[("a", 1)]] * 4, [("a", 15)]]
TYPES = [
    # of weights, of keys and values, how weights are quantized; how far logits may be apart, in standard deviations
    ("float32", "auto", "none", 1e-5),
    ("bfloat16", "auto", "none", 0.05),
    ("float16", "auto", "none", 1e-3),
    ("bfloat16", "int8", "int8", 0.1),
    ("float32", "float32", "rtn:group=32", 1e-5),
]


@pytest.mark.parametrize(("dtype", "kv_dtype", "quantization", "distance"), TYPES)
def test_the_same_engine(
    tmp_path_factory: pytest.TempPathFactory, dtype: str, kv_dtype: str, quantization: str, distance: float
) -> None:
    def logits(isa: str) -> dict[str, np.ndarray]:
        executor = CpuExecutor(load_engine(path), num_blocks=16, threads=2, isa=isa, poison=True)
        return engines.Packed(executor, IDS).run(STEPS)

    with remote_kernels.here():
        folder = tmp_path_factory.mktemp("engine")
        given = {"dtype": dtype, "kv_dtype": kv_dtype, "quantization": quantization}
        _, path = engines.build(engines.small_llama(), folder, **given)
        wanted = logits("scalar")
    report = verify_engine(path, threads=2)
    assert [replay.isa for replay in report.replays] == ["scalar", kernels.best_isa()]
    assert report.passed, list(report.lines())
    assert report.replays[0].equal_tokens == report.replays[0].tokens
    for isa in kernels.isas():
        for name, found in logits(isa).items():
            error = np.abs(found - wanted[name]).max() / wanted[name].std()
            assert error <= (0 if isa == "scalar" else distance), f"{name} on {isa}: {error}"
