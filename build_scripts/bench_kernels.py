"""Times the linear layers of a model's shape on random weights: GB/s of weights read, and GFLOP/s (or GOP/s).

    python build_scripts/bench_kernels.py --model smol135m --rows 1,16,512
    python build_scripts/bench_kernels.py --shapes 4864x896,2048x8192 --dtype bfloat16,int4:32,int4:128,int8:0

Each linear of each layer is timed by itself and its best time of all rounds counts, since other processes steal time.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import click
import numpy as np
from numpy.typing import NDArray

from llmc.plugins import _kernels, kernels
from llmc.plugins.linear.packing import packed_shape
from llmc.plugins.quantized_linear import packing as quantized

ITEM = {"float32": 4, "bfloat16": 2, "float16": 2, "uint8": 1}
COMPUTE = {"int8": "int8", "int4": "int8", "fp8": "bfloat16"}


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
class Storage:
    """How weights are stored: a dtype, or a quantized format and its group, such as ``int4:32``."""

    name: str
    dtype: str
    group: int = 0
    compute: str = ""

    @property
    def quantized(self) -> bool:
        """Whether it is a format."""
        return self.dtype in COMPUTE

    def tensors(self, outputs: int, inputs: int) -> list[tuple[str, tuple[int, ...]]]:
        """(dtype, shape) of what a weight consists of."""
        if not self.quantized:
            return [(self.dtype, packed_shape(outputs, inputs, self.dtype))]
        codes = quantized.packed_shape(self.dtype, outputs, inputs, self.group)
        return [("uint8", codes), ("float16", quantized.scale_shape(outputs, inputs, self.group))]

    def attributes(self) -> dict[str, str | int]:
        """Those of the step."""
        if not self.quantized:
            return {}
        x_group = min(self.group, 128) if self.compute == "int8" else 0
        return {"format": self.dtype, "group": self.group, "compute": self.compute, "x_group": x_group}


@dataclass(frozen=True)
class Setting:
    """How a plan is run."""

    storage: Storage
    isa: str
    threads: int
    rounds: int


class StorageType(click.ParamType):  # type: ignore[type-arg]
    """A list of dtypes and formats."""

    name = "storage"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> list[Storage]:
        """Parse ``bfloat16,int4:32``."""
        found = []
        for text in str(value).split(","):
            dtype, _, group = text.partition(":")
            if dtype not in (*ITEM, *COMPUTE) or dtype == "uint8" or (group and not group.isdigit()):
                self.fail(f"{text!r} is no dtype and no format, such as {', '.join(COMPUTE)}, with a group")
            found.append(Storage(text, dtype, int(group or 0), COMPUTE.get(dtype, "")))
        return found


@click.command()
@click.option("--model", type=click.Choice(list(MODELS)), default="smol135m", show_default=True)
@click.option("--shapes", help="Linears of these shapes (outputs x inputs) instead of a model's, such as 4864x896.")
@click.option("--dtype", "storages", type=StorageType(), default="bfloat16", show_default=True, help="A list.")
@click.option("--isa", type=click.Choice(kernels.isas()), default=kernels.best_isa(), show_default=True)
@click.option("--threads", type=click.IntRange(1), default=len(os.sched_getaffinity(0)), show_default=True)
@click.option("--rows", default="1,4,16,64,512", show_default=True, help="Rows of x, one table each.")
@click.option("--rounds", type=click.IntRange(1), default=10, show_default=True)
@click.option("--layers", type=click.IntRange(1), help="Fewer layers than the model has.")
def main(
    model: str,
    shapes: str | None,
    storages: list[Storage],
    isa: str,
    threads: int,
    rows: str,
    rounds: int,
    layers: int | None,
) -> None:
    """Time the linear layers of a model's shape; the output layer has one row."""
    shape = MODELS[model]
    kinds = [*shape.linears()] * (layers or shape.layers) + [("lm_head", shape.vocabulary, shape.hidden)]
    if shapes is not None:
        kinds = [(text, *map(int, text.split("x"))) for text in shapes.split(",")]  # type: ignore[misc]
    for name, number in _kernels.ceilings(threads, 256 << 20).items():
        click.echo(f"ceiling {name}: {number:.4g}")
    for count in map(int, rows.split(",")):
        for storage in storages:
            seconds = measure(kinds, count, Setting(storage, isa, threads, rounds))
            title = shapes or model
            click.echo(
                f"\n{title} {storage.name} {isa}, {threads} threads, {count} rows, load {os.getloadavg()[0]:.1f}"
            )
            report(kinds, seconds, count, storage)


def report(kinds: Sequence[tuple[str, int, int]], seconds: Sequence[float], rows: int, storage: Storage) -> None:
    """Print the sum of each kind, and of all."""
    totals: dict[str, NDArray[np.float64]] = {}
    for (name, outputs, inputs), spent in zip(kinds, seconds, strict=True):
        used = 1 if name == "lm_head" else rows
        size = sum(int(np.prod(shape)) * ITEM[dtype] for dtype, shape in storage.tensors(outputs, inputs))
        figures = np.array([spent, size, 2 * used * outputs * inputs])
        for key in (name, "all"):
            totals[key] = totals.get(key, np.zeros(3)) + figures
    totals["all"] = totals.pop("all")
    for name, (spent, size, operations) in totals.items():
        rates = f"{size / spent / 1e9:7.1f} GB/s {operations / spent / 1e9:8.1f} GFLOP/s"
        click.echo(f"  {name:10} {spent * 1e3:9.3f} ms {rates}")


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
    values: list[_kernels._Value] = []
    steps, weights, storage = [], [], setting.storage
    space = max(rows * max(inputs for _, _, inputs in kinds), 16) * 4

    def add(*given: object) -> int:
        values.append(value(f"v{len(values)}", *given))  # type: ignore[arg-type]
        return len(values) - 1

    for name, outputs, inputs in kinds:
        count = (1, 0, 0) if name == "lm_head" else (0, 1, 0)
        parts = []
        for dtype, shape in storage.tensors(outputs, inputs):
            weights.append(random_weight(shape, dtype))
            parts.append(add("weight", len(weights) - 1, dtype, [(n, 0, 0) for n in shape]))
        x = add("arena", 0, "float32", [count, (inputs, 0, 0)])
        y = add("arena", space, "float32", [count, (outputs, 0, 0)])
        op = "quantized_linear" if storage.quantized else "linear"
        steps.append((op, name, [x, *parts], [y], storage.attributes()))
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
    bits: dict[str, NDArray[Any]] = {
        "float32": noise.view(np.uint32),
        "bfloat16": (noise.view(np.uint32) >> 16).astype(np.uint16),
        "float16": noise.astype(np.float16).view(np.uint16),
        "uint8": np.random.default_rng(1).integers(0, 120, 4099, np.uint8),
    }
    return np.resize(bits[dtype], int(np.prod(shape))).view(np.uint8)


if __name__ == "__main__":
    main()
