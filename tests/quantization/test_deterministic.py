import os
import subprocess
import sys

import numpy as np
import pytest
from threadpoolctl import threadpool_info

from llmc.quantization.deterministic import single_threaded

SCRIPT = """
import hashlib, sys, threading
import numpy as np
from llmc.quantization.base import Statistics, parse_method
from llmc.quantization.statistics import InputCollector
rng = np.random.default_rng(0)
rows = (rng.normal(size=(1100, 150)) @ rng.normal(size=(150, 600)) + rng.normal(size=(1100, 600))).astype(np.float32)
weight = rng.normal(size=(200, 600)).astype(np.float32)
collector = InputCollector(600, Statistics.HESSIAN, threads=int(sys.argv[1]))
collector.add(rows)
inputs = collector.finish()
digest = hashlib.sha256(inputs.hessian.tobytes())
for text in sys.argv[2:]:
    method = parse_method(text)
    scale = method.input_scale(weight, inputs)
    scale = np.ones(600, np.float32) if scale is None else scale
    quantized, _ = method.quantize(weight * scale, inputs.divided(scale))
    for values in (scale, quantized.codes, quantized.scale):
        digest.update(values.tobytes())
print(digest.hexdigest())
"""


def threads_of_blas() -> set[int]:
    return {pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"}


def digest(threads: int, *methods: str) -> str:
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "OPENBLAS_NUM_THREADS": str(threads)}
    command = [sys.executable, "-P", "-c", SCRIPT, str(threads), *methods]
    return subprocess.check_output(command, env=environment, text=True).strip()


@pytest.mark.parametrize("method", ["rtn:clip=true", "gptq", "awq:group=64", "smoothquant"])
def test_codes_are_the_same_on_any_number_of_threads(method: str) -> None:
    assert digest(1, method) == digest(2, method)


def test_the_limit_ends_with_the_last_user() -> None:
    assert np.__version__  # loaded, and with it its BLAS
    before = threads_of_blas()
    with single_threaded():
        with single_threaded():
            assert threads_of_blas() == {1}
        assert threads_of_blas() == {1}
    assert threads_of_blas() == before
