"""Small models as engines for CUDA, which run through the driver API of cuda.bindings on the stand-in driver."""

import contextlib
import ctypes
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import engines
import numpy as np
import pytest
from driver import fake_gpu
from numpy.typing import NDArray
from packed import MIXED

from llmc import LLM, SamplingParams
from llmc.compiler import api
from llmc.compiler.api import Compiled
from llmc.compiler.config import BuildConfig
from llmc.compiler.cuda.build import kernels_of
from llmc.plugins.cuda import capability_of
from llmc.runtime.batch import Batch
from llmc.runtime.devices import open_cuda
from llmc.runtime.devices.cpu import CpuExecutor
from llmc.runtime.devices.cuda.executor import CudaExecutor
from llmc.runtime.devices.cuda.program import Bucket, tensor
from llmc.runtime.devices.cuda.targets import choose
from llmc.runtime.engine import Engine, load_engine
from llmc.runtime.plan import Plan, Storage

SIZES = {"max_batch_tokens": 64, "max_sequences": 8}
ANSWER = 4
FAR = 0.045
"""What logits are off in the mean, in standard deviations of them."""
SAME_EXPERTS = 0.85
"""The share of rows, in each layer, that another rounding sends to the same experts with nearly the same weights."""


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
def gpu_for(engine: Engine) -> Iterator[ctypes.CDLL]:
    """The stand-in driver with the engine's kernels."""
    arch = choose(engine.path, engine.manifest, 90, "the stand-in driver")
    kernels = kernels_of(engine.plan, engine.limits, engine.kv_cache, capability_of(arch)).values()
    with fake_gpu(kernels, mode="plain") as gpu:
        yield gpu


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


def check_on_cuda(
    compiled: Compiled, cpu: Engine, folder: Path, prompts: dict[str, list[int]], far: float = FAR
) -> tuple[dict[str, NDArray[np.float32]], list[list[int]]]:
    """Logits of prompts with their greedy answers, and these, from an engine for CUDA behind the driver API.

    Logits are no farther than ``far`` from those of the engine for the CPU, have the same bits for any packing of rows,
    and make the answers.
    """
    engine = build_again(compiled, folder)
    with gpu_for(engine):
        llm = LLM(engine.path, num_blocks=16)
        params = SamplingParams(max_tokens=ANSWER, temperature=0, ignore_eos=True)
        answers = [list(result.token_ids) for result in llm.generate(list(prompts.values()), params)]
        llm.close()
        texts = {key: prompts[key] + answer for key, answer in zip(prompts, answers, strict=True)}
        found, expected = step_on_both(engine, cpu, texts)
        mixed = packed_logits(engine, prompts, MIXED)
    for key, answer in zip(prompts, answers, strict=True):
        logits, length = found[key], len(prompts[key])
        assert distance(logits, expected[key]) < far
        assert np.array_equal(mixed[key], logits[: len(mixed[key])])
        assert logits[length - 1 : -1].argmax(1).tolist() == answer
        assert len(answer) == ANSWER
    return found, answers


def check_variant(compiled: Compiled, folder: Path, ids: dict[str, list[int]], far: float, **options: Any) -> Engine:
    """Builds a model for the CPU and for CUDA, holds the logits of the two against each other, and gives the latter.

    Logits are no farther than ``far`` from those of the CPU, and have the same bits for any packing of rows.
    """
    cpu = build_again(compiled, folder / "cpu", **{**options, "target": "cpu"})
    cuda = build_again(compiled, folder / "cuda", **options)
    with gpu_for(cuda):
        whole, expected = step_on_both(cuda, cpu, ids)
        mixed = packed_logits(cuda, ids, MIXED)
    for key, logits in whole.items():
        assert distance(logits, expected[key]) < far
        assert np.array_equal(mixed[key], logits[: len(mixed[key])])
    return cuda


def step_on_both(
    cuda: Engine, cpu: Engine, tokens: dict[str, list[int]]
) -> tuple[dict[str, NDArray[np.float32]], dict[str, NDArray[np.float32]]]:
    """Logits of one step with all tokens of some requests, by request: on CUDA, and of the same model on the CPU.

    In a mixture of experts rounding sends some rows to other experts. So rows on the CPU go where those on CUDA went,
    after the CPU has said where it would send them: nearly always to the same ones, with nearly the same weights.
    """
    rows = [(name, len(ids)) for name, ids in tokens.items()]
    batch = engines.Packed(None, tokens).batch(rows)
    with executor_for(cuda) as executor:
        found, routes = _routed(executor, batch)
    expected = _rerouted(CpuExecutor(cpu, num_blocks=16, threads=1), batch, routes)
    parts = (np.split(logits, batch.cu_seqlens[1:-1]) for logits in (found, expected))
    on_cuda, on_cpu = (dict(zip(tokens, part, strict=True)) for part in parts)
    return on_cuda, on_cpu


def _routed(executor: CudaExecutor, batch: Batch) -> tuple[NDArray[np.float32], list[list[NDArray[Any]]]]:
    """Logits of a step, and of each mixture of experts the ids [T, K] and weights [T, K] that it was given."""
    bucket, begin, routes = executor._send(batch), 0, []
    prepared, steps = executor._prepare(bucket), executor.plan.steps
    for number in [*_mixtures(executor.plan), len(steps)]:
        executor.device.run([launch for launches in prepared[begin:number] for launch in launches])
        if number == len(steps):
            break
        names = [str(name) for name in steps[number].inputs[1:3]]
        routes.append([_read(executor, name, bucket, len(batch.input_ids)) for name in names])
        begin = number
    return executor._rows(bucket, len(batch.input_ids), executor.plan.logits)[0].copy(), routes


def _read(executor: CudaExecutor, name: str, bucket: Bucket, rows: int) -> NDArray[Any]:
    found = tensor(executor.plan.value(name), bucket, executor._memory)
    kind, (row, column), columns = np.dtype(found.dtype), found.strides, found.shape[1]
    data = executor.device.host(((rows - 1) * row + (columns - 1) * column + 1) * kind.itemsize)
    executor.device.fetch(data, found.address)
    executor.device.sync()
    strides = (row * kind.itemsize, column * kind.itemsize)
    return np.lib.stride_tricks.as_strided(data.view(kind), (rows, columns), strides).copy()


def _rerouted(executor: CpuExecutor, batch: Batch, routes: list[list[NDArray[Any]]]) -> NDArray[np.float32]:
    """Logits of a step whose rows go to these experts."""
    plan, native = executor.plan, executor._native
    places = _mixtures(plan)
    executor.run(batch, places[0] if places else None)
    for number, end, given in zip(places, [*places[1:], len(plan.steps)], routes, strict=False):
        names = [str(name) for name in plan.steps[number].inputs[1:3]]
        own = [native.view(executor._index[name]) for name in names]
        (ids, weights), (own_ids, own_weights) = given, own
        order, own_order = (np.argsort(a, axis=1, kind="stable") for a in (ids, own_ids))
        same = np.take_along_axis(ids, order, 1) == np.take_along_axis(own_ids, own_order, 1)
        there, here = np.take_along_axis(weights, order, 1), np.take_along_axis(own_weights, own_order, 1)
        near = np.isclose(there, here, rtol=0.1, atol=0.02 * np.abs(own_weights).max())
        assert (same & near).all(1).mean() > SAME_EXPERTS
        for name, view, values in zip(names, own, given, strict=True):
            if plan.value(name).storage is Storage.ARENA:  # else they are constants
                view[:] = values
        native.resume(number, end)
    return np.array(native.view(executor._index[plan.logits]))


def _mixtures(plan: Plan) -> list[int]:
    return [number for number, step in enumerate(plan.steps) if step.op == "moe"]


def distance(found: NDArray[np.float32], wanted: NDArray[np.float32]) -> float:
    """The root of the mean square of what differs, in standard deviations of what is wanted."""
    return float(np.sqrt(np.mean((found - wanted[: len(found)]) ** 2)) / wanted.std())
