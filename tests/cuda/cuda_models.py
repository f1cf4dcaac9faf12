"""Small models as engines for CUDA, which run through the driver API of cuda.bindings on the stand-in driver."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import engines
import numpy as np
import pytest
from driver import fake_gpu
from numpy.typing import NDArray

from llmc.compiler import api
from llmc.compiler.api import Compiled
from llmc.compiler.config import BuildConfig
from llmc.compiler.cuda.build import kernels_of
from llmc.runtime.devices import open_cuda
from llmc.runtime.devices.cuda.executor import CudaExecutor
from llmc.runtime.engine import Engine, load_engine

SIZES = {"max_batch_tokens": 64, "max_sequences": 8}


def build_again(compiled: Compiled, engine: Path, **options: Any) -> Engine:
    """An engine of a model that is traced already, for CUDA unless the options say otherwise."""
    sizes = {"max_seq_len": compiled.limits.max_seq_len, **SIZES}
    config = BuildConfig(**{"target": "cuda:sm_90", "dtype": "bfloat16", **sizes, **options})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(api, "trace", lambda *_, **__: compiled.program)
        patch.setattr(api, "make_graph", lambda *_: compiled.graph.clone())  # writing an engine uses it up
        api.build_engine(compiled.checkpoint.path, engine, config)
    return load_engine(engine)


@contextlib.contextmanager
def gpu_for(engine: Engine) -> Iterator[None]:
    """The stand-in driver with the engine's kernels."""
    kernels = kernels_of(engine.plan, engine.limits, engine.kv_cache, 90).values()
    with fake_gpu(kernels, mode="plain"):
        yield


@contextlib.contextmanager
def executor_for(engine: Engine) -> Iterator[CudaExecutor]:
    """One on a device of its own, with room for the requests of `engines.Packed`."""
    executor = CudaExecutor(engine, open_cuda(), num_blocks=16)
    try:
        yield executor
    finally:
        executor.close()


def packed_logits(engine: Engine, tokens: dict[str, list[int]], steps: Any) -> dict[str, NDArray[np.float32]]:
    """Logits of each request; see `engines.Packed`."""
    with executor_for(engine) as executor:
        return engines.Packed(executor, tokens).run(steps)


def distance(found: NDArray[np.float32], wanted: NDArray[np.float32], share: float = 1.0) -> float:
    """The root of the mean square of what differs, in standard deviations of what is wanted.

    ``share``: of the rows, those that are nearest. In a mixture of experts rounding sends some rows to other experts.
    """
    rows = np.sort(np.mean((found - wanted[: len(found)]) ** 2, axis=1))
    return float(np.sqrt(rows[: max(1, round(share * len(rows)))].mean()) / wanted.std())


def nearest(compiled: Compiled) -> float:
    """The share of rows that have to be near."""
    return 0.25 if any(step.op == "moe" for step in compiled.steps.steps) else 1.0
