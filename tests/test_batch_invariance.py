"""A request's logits are the same bits alone, in a batch, in chunks of any size, preempted, on one thread or two."""

import engines
import numpy as np
import pytest

from llmc import LLM, SamplingParams
from llmc.plugins import kernels
from llmc.runtime.devices.cpu import CpuExecutor
from llmc.runtime.engine import Engine, load_engine

LENGTH = 100
NEIGHBOURS = 15


TYPES = [
    ("float32", "auto"),
    ("bfloat16", "auto"),
    ("float16", "auto"),
    ("bfloat16", "float8_e4m3"),
    ("bfloat16", "int8"),
    ("float32", "int4"),
    ("float32", "auto", "rtn:group=32"),
    ("bfloat16", "auto", "int8"),
]
"""Of weights, and of keys and values; and how weights are quantized."""


@pytest.fixture(scope="module", params=TYPES, ids="-".join)
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    dtype, kv_dtype, quantization = (*request.param, "none")[:3]
    folder = tmp_path_factory.mktemp("-".join(request.param))
    _, path = engines.build(engines.small_llama(), folder, dtype=dtype, kv_dtype=kv_dtype, quantization=quantization)
    return load_engine(path)


def tokens(seed: int, count: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, 131, count).tolist()


def chunks(name: str, size: int) -> list[list[tuple[str, int]]]:
    return [[(name, min(size, LENGTH - start))] for start in range(0, LENGTH, size)]


@pytest.mark.parametrize("isa", kernels.isas())
def test_logits_are_the_same_bits(engine: Engine, isa: str) -> None:
    ids = {"a": tokens(0, LENGTH)} | {f"n{i}": tokens(i + 1, 90) for i in range(NEIGHBOURS)}

    def run(steps: list[list[tuple[str, int]]], threads: int) -> np.ndarray:
        executor = CpuExecutor(engine, num_blocks=8 * len(ids), threads=threads, isa=isa)
        return engines.Packed(executor, ids).run(steps)["a"]

    alone = run([[("a", LENGTH)]], 1)
    assert np.isfinite(alone).all()
    crowd = [
        [(f"n{i}", i + 1) for i in range(7)] + [("a", 50)] + [(f"n{i}", 3) for i in range(7, NEIGHBOURS)],
        [("a", 1), *((f"n{i}", 1 + i % 5) for i in range(NEIGHBOURS))],
        [*((f"n{i}", 1) for i in range(NEIGHBOURS)), ("a", 48)],
        [*((f"n{i}", 2) for i in range(NEIGHBOURS)), ("a", 1)],
    ]
    for threads in (1, 2):
        for size in (1, 7, 16, 48):
            np.testing.assert_array_equal(run(chunks("a", size), threads), alone, f"chunks of {size}")
        np.testing.assert_array_equal(run(crowd, threads), alone, f"in a batch of 16, {threads} threads")


def test_preemption_changes_nothing(engine: Engine) -> None:
    """A pool of 8 blocks of 16 positions, and 16 requests: all finish, each with its own text."""
    prompts = [tokens(i, 20 + i) for i in range(16)]
    params = SamplingParams(max_tokens=40, ignore_eos=True, logprobs=3)
    small = LLM(engine.path, num_blocks=8, threads=2, check=True)
    results = small.generate(prompts, params)
    assert small.scheduler.statistics.preemptions > 0
    large = LLM(engine.path, num_blocks=256, threads=1, check=True)
    for prompt, result in zip(prompts, results, strict=True):
        (alone,) = large.generate([prompt], params)
        assert result.token_ids == alone.token_ids
        assert result.logprobs == alone.logprobs  # floats, compared exactly
    assert large.scheduler.statistics.preemptions == 0


def test_kv_15_the_prefix_cache_changes_nothing(engine: Engine) -> None:
    """The same prompt again and again with others in between, alone and together, also of quantized keys."""
    prompts = [tokens(0, 70)[:n] + tokens(n, 9) for n in (70, 64, 33, 70)]
    params = SamplingParams(max_tokens=6, ignore_eos=True, logprobs=3)

    def answers(llm: LLM, some: list[list[int]]) -> list[object]:
        return [(r.token_ids, r.logprobs) for r in llm.generate(some, params)]

    off = LLM(engine.path, threads=1, prefix_cache=False)
    expected = [answers(off, [prompt])[0] for prompt in prompts]
    on = LLM(engine.path, threads=2, num_blocks=30, max_batch_tokens=48, check=True)
    for _ in range(4):
        assert answers(on, prompts) == expected
        assert [answers(on, [prompt])[0] for prompt in prompts] == expected
        answers(on, [tokens(7, 200)])
    assert on.scheduler.statistics.prefix_hits > 0
