"""Times the linear layers of a model's shape on random weights: GB/s of weights read, and GFLOP/s.

    python build_scripts/bench_kernels.py --model smol135m --rows 1,16,512

Each linear of each layer is timed by itself and its best time of all rounds counts, since other processes steal time.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import click
import numpy as np
from numpy.typing import NDArray

from llmc.plugins import _kernels, kernels
from llmc.plugins.linear.packing import packed_shape

ITEM = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Shape:
    """Sizes of a model, as in BENCHMARKS.md."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    vocabulary: int

    def linears(self) -> Iterator[tuple[str, int, int]]:
        """(name, outputs, inputs) of the merged linears of one layer."""
        yield "qkv", (self.heads + 2 * self.kv_heads) * self.head_dim, self.hidden
        yield "o", self.hidden, self.heads * self.head_dim
        yield "gate_up", 2 * self.inner, self.hidden
        yield "down", self.hidden, self.inner


MODELS = {
    "smol135m": Shape(576, 30, 9, 3, 64, 1536, 49152),
    "qwen05b": Shape(896, 24, 14, 2, 64, 4864, 151936),
    "llama1b": Shape(2048, 16, 32, 8, 64, 8192, 128256),
}


@dataclass(frozen=True)
class Setting:
    """How a plan is run."""

    dtype: str
    isa: str
    threads: int
    rounds: int


@click.command()
@click.option("--model", type=click.Choice(list(MODELS)), default="smol135m", show_default=True)
@click.option("--dtype", type=click.Choice(list(ITEM)), default="bfloat16", show_default=True)
@click.option("--isa", type=click.Choice(kernels.isas()), default=kernels.best_isa(), show_default=True)
@click.option("--threads", type=click.IntRange(1), default=len(os.sched_getaffinity(0)), show_default=True)
@click.option("--rows", default="1,4,16,64,512", show_default=True, help="Rows of x, one table each.")
@click.option("--rounds", type=click.IntRange(1), default=10, show_default=True)
@click.option("--layers", type=click.IntRange(1), help="Fewer layers than the model has.")
def main(model: str, dtype: str, isa: str, threads: int, rows: str, rounds: int, layers: int | None) -> None:
    """Time the linear layers of a model's shape; the output layer has one row."""
    shape, setting = MODELS[model], Setting(dtype, isa, threads, rounds)
    kinds = [*shape.linears()] * (layers or shape.layers) + [("lm_head", shape.vocabulary, shape.hidden)]
    for name, value in _kernels.ceilings(threads, 256 << 20).items():
        click.echo(f"ceiling {name}: {value:.4g}")
    for count in map(int, rows.split(",")):
        seconds = measure(kinds, count, setting)
        click.echo(f"\n{model} {dtype} {isa}, {threads} threads, {count} rows, load {os.getloadavg()[0]:.1f}")
        report(kinds, seconds, count, ITEM[dtype])


def report(kinds: Sequence[tuple[str, int, int]], seconds: Sequence[float], rows: int, item: int) -> None:
    """Print the sum of each kind, and of all."""
    totals: dict[str, NDArray[np.float64]] = {}
    for (name, outputs, inputs), spent in zip(kinds, seconds, strict=True):
        used = 1 if name == "lm_head" else rows
        figures = np.array([spent, outputs * inputs * item, 2 * used * outputs * inputs])
        for key in (name, "all"):
            totals[key] = totals.get(key, np.zeros(3)) + figures
    totals["all"] = totals.pop("all")
    for name, (spent, size, operations) in totals.items():
        rates = f"{size / spent / 1e9:7.1f} GB/s {operations / spent / 1e9:8.1f} GFLOP/s"
        click.echo(f"  {name:8} {spent * 1e3:9.3f} ms {rates}")


def measure(kinds: Sequence[tuple[str, int, int]], rows: int, setting: Setting) -> list[float]:
    """Seconds of each linear."""
    executor = build(kinds, rows, setting)
    executor.trace(True)
    one, ids = np.zeros(1, np.int32), np.zeros(rows, np.int32)
    batch = _kernels.Batch(ids, np.array([0, rows], np.int32), one, np.zeros((1, 0), np.int32))
    best = np.full(len(kinds), np.inf)
    for _ in range(setting.rounds):
        executor.run(ids, one, batch, len(kinds))
        best = np.minimum(best, [end - begin for _, begin, end in executor.take_times()])
    return [float(nanoseconds) / 1e9 for nanoseconds in best]


def build(kinds: Sequence[tuple[str, int, int]], rows: int, setting: Setting) -> _kernels.Executor:
    """A plan that is nothing but linears, each with a weight of its own; all read and write the same rows."""
    values, steps, weights = [], [], []
    space = max(rows * max(inputs for _, _, inputs in kinds), 16) * 4
    for number, (name, outputs, inputs) in enumerate(kinds):
        count = (1, 0, 0) if name == "lm_head" else (0, 1, 0)
        shape = packed_shape(outputs, inputs, setting.dtype)
        weights.append(random_weight(shape, setting.dtype))
        values.append(value(f"w{number}", "weight", number, setting.dtype, [(n, 0, 0) for n in shape]))
        values.append(value(f"x{number}", "arena", 0, "float32", [count, (inputs, 0, 0)]))
        values.append(value(f"y{number}", "arena", space, "float32", [count, (outputs, 0, 0)]))
        steps.append(("linear", name, [3 * number + 1, 3 * number], [3 * number + 2], {}))
    largest = max((1 if name == "lm_head" else rows) * outputs for name, outputs, _ in kinds)
    arena = space + largest * 4
    return _kernels.Executor(
        values, steps, arena, weights, [], "float32", 16, 1, setting.threads, setting.isa, poison=False
    )


def value(name: str, storage: str, base: int, dtype: str, shape: list[tuple[int, int, int]]) -> _kernels._Value:
    """A contiguous view; its dims but the first are constant."""
    strides = [(int(np.prod([size[0] for size in shape[axis + 1 :]])), 0, 0) for axis in range(len(shape))]
    return name, storage, base, dtype, shape, strides, (0, 0, 0)


def random_weight(shape: tuple[int, ...], dtype: str) -> NDArray[np.uint8]:
    """Small numbers, the same few again and again; the speed does not depend on them."""
    noise = 0.02 * np.random.default_rng(0).standard_normal(4099, np.float32)
    bits = {
        "float32": noise.view(np.uint32),
        "bfloat16": (noise.view(np.uint32) >> 16).astype(np.uint16),
        "float16": noise.astype(np.float16).view(np.uint16),
    }[dtype]
    return np.resize(bits, int(np.prod(shape))).view(np.uint8)


if __name__ == "__main__":
    main()
